"""The library's log lines in Python's logging."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import kvferry
import kvferry.log
import pytest
from pair import BLOCKS, pair

pytestmark = pytest.mark.slow


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


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.DEBUG, logger="kvferry")
    kvferry.log.route("info")
    yield caplog
    kvferry.log.unroute()


def of(lines: pytest.LogCaptureFixture, part: str) -> list[logging.LogRecord]:
    return [record for record in lines.records if part in record.getMessage()]


@pytest.mark.parametrize(("transport", "way"), [("tcp", "served by messages"), ("shm", "cma/memory")])
def test_a_connection_is_one_line_with_all_that_is_known(
    lines: pytest.LogCaptureFixture, transport: str, way: str
) -> None:
    with pair(transport=transport) as both:
        for _ in range(3):
            assert both.hand_over() is None
    (record,) = of(lines, "connected to ")
    text = record.getMessage()
    assert record.levelno == logging.INFO
    for part in (
        "rank (pp 0, tp 0) of engine prefill",
        "(prefill pp0 tp0)",
        "an engine of tp 1 x pp 1",
        "over tcp/",
        "host memory is",
        way,
        "this engine is of tp 1 x pp 1",
    ):
        assert part in text, text


def test_what_repeats_while_something_is_wrong_is_limited_and_counted(lines: pytest.LogCaptureFixture) -> None:
    failures = 12
    with pair() as both:
        for _ in range(failures):
            request, params = both.grant()
            params["remote_block_ids"] = [[1, 2, 3, BLOCKS + 7]]
            both.load(request, params)
            assert both.over(request) == "invalid_request"
        # Another cause has its own first line.
        request, params = both.grant()
        both.load(request, {**params, "remote_incarnation": "00000000000000aa"})
        assert both.over(request) == "peer_died"
    said = of(lines, "was not received (invalid_request)")
    assert all(record.levelno == logging.WARNING for record in said)
    # One in 10 s, which is one unless the machine is very slow.
    assert 1 <= len(said) <= failures // 2
    assert "left out" not in said[0].getMessage()
    left_out = sum(int(number) for record in said for number in re.findall(r"\((\d+) such lines", record.getMessage()))
    assert len(said) + left_out <= failures
    assert len(of(lines, "was not received (peer_died)")) == 1


_PAIR = """
import sys; sys.path.insert(0, {folder!r})
from pair import pair
if __name__ == "__main__":
    with pair() as both:
        assert both.hand_over() is None
"""


@pytest.mark.parametrize(
    ("level", "wanted", "unwanted"),
    [
        ("info", ["INFO kvferry::connector::driver: kvferry worker: connected to rank"], ["DEBUG"]),
        ("debug", ["DEBUG kvferry::agent::engine::dispatch: agent"], ["TRACE"]),
        ("error", [], ["WARN", "INFO"]),
        ("off", [], ["kvferry"]),
        ("loud", ['KVFERRY_LOG="loud" is no level; expected off, error, warn, info, debug or trace'], ["INFO"]),
    ],
)
def test_the_environment_names_the_level(tmp_path: object, level: str, wanted: list[str], unwanted: list[str]) -> None:
    script = f"{tmp_path}/hand_over.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(_PAIR.format(folder=os.path.dirname(__file__)))
    environment = {**os.environ, "KVFERRY_LOG": level}
    done = subprocess.run([sys.executable, script], capture_output=True, timeout=120, env=environment, text=True)
    assert done.returncode == 0, done.stderr
    for text in wanted:
        assert text in done.stderr
    for text in unwanted:
        assert text not in done.stderr


def test_a_line_on_standard_error_is_one_write(tmp_path: object) -> None:
    # UCX and other processes write there too. A socket that keeps datagrams apart keeps writes apart.
    script = f"{tmp_path}/hand_over.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(_PAIR.format(folder=os.path.dirname(__file__)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            environment = {**os.environ, "KVFERRY_LOG": "info"}
            process = subprocess.Popen([sys.executable, script], stderr=theirs, env=environment)
        try:
            ours.settimeout(120)
            writes = list(iter(lambda: ours.recv(1 << 16), b""))
            assert process.wait(timeout=120) == 0, writes
        finally:
            process.kill()
            process.wait()
    lines = [write for write in writes if b"INFO kvferry::" in write]
    assert any(b"connected to rank" in line for line in lines), writes
    assert all(line.startswith(b"kvferry INFO ") and line.endswith(b"\n") for line in lines), writes
