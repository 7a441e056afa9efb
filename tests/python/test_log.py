"""The library's log lines in Python's logging."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import kvferry
import kvferry.log
import pytest


def test_lines_reach_logging_until_unrouted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvferry")
    kvferry.log.route("info")
    try:
        with kvferry.Agent({"name": "log test", "transport": "tcp"}):
            pass
    finally:
        kvferry.log.unroute()
    lines = [record for record in caplog.records if record.name.startswith("kvferry.agent")]
    assert any("log test" in record.getMessage() and "UCX" in record.getMessage() for record in lines)
    assert {record.levelno for record in lines} <= {logging.INFO, logging.WARNING, logging.ERROR}
    caplog.clear()
    with kvferry.Agent({"name": "silent", "transport": "tcp"}):
        pass
    assert not caplog.records


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        kvferry.log.route("loud")


def test_the_interpreter_ends_cleanly_with_a_route_and_a_running_agent() -> None:
    code = "import kvferry, kvferry.log; kvferry.log.route('trace'); agent = kvferry.Agent({'transport': 'tcp'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=os.environ)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
