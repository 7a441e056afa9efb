"""The library's log lines in Python's logging."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import kvferry
import kvferry.log
import pytest
from kvferry import _lib
from pair import BLOCKS, pair, until

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


_UNROUTED = """
import kvferry, kvferry.log, logging
logging.basicConfig(level=logging.DEBUG, format="in logging: %(message)s")
kvferry.log.route("error")
kvferry.log.unroute()
with kvferry.Agent({"transport": "tcp"}):
    pass
"""


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("off", False), (None, False)])
def test_unrouted_lines_are_those_of_the_environment(level: str | None, shown: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "KVFERRY_LOG"}
    if level is not None:
        environment["KVFERRY_LOG"] = level
    done = subprocess.run(
        [sys.executable, "-c", _UNROUTED], capture_output=True, timeout=60, env=environment, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("kvferry INFO kvferry::agent" in done.stderr) == shown, done.stderr
    assert "in logging" not in done.stderr


class Asks(logging.Handler):
    """Calls the library from the handler of its lines, and lets go of objects there."""

    def __init__(self) -> None:
        super().__init__()
        self.agent: kvferry.Agent | None = None
        self.let_go: list[kvferry.Agent] = []
        self.refused: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.let_go.clear()
        if self.agent is None:
            return
        try:
            self.agent.stats()
        except kvferry.InvalidArgumentError as error:
            self.refused.append(error.message)


def test_a_handler_that_calls_the_library_is_refused_at_once() -> None:
    handler, logger = Asks(), logging.getLogger("kvferry")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(1)
    kvferry.log.route("trace")
    try:
        with kvferry.Agent({"transport": "tcp"}) as agent, kvferry.Agent({"transport": "tcp"}) as other:
            third = kvferry.Agent({"transport": "tcp"})
            pointer = third._handle.get()
            handler.agent = agent
            handler.let_go.append(third)
            del third
            agent.connect(other.metadata())
            until("no line", lambda: bool(handler.refused) and not handler.let_go)
            handler.agent = None
            assert all("log callback" in text for text in handler.refused)
            # What is let go of in a handler is freed all the same.
            until("not freed", lambda: is_freed(pointer))
            agent.stats()
    finally:
        kvferry.log.unroute()
        logger.removeHandler(handler)
        logger.setLevel(level)


def is_freed(pointer: Any) -> bool:
    try:
        _lib.ask("kvf_agent_stats", pointer)
    except kvferry.NotFoundError:
        return True
    except kvferry.ShutDownError:
        pass
    return False


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


HERE = os.path.dirname(__file__)
_PAIR = """
import sys; sys.path[:0] = {folders!r}
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
        file.write(_PAIR.format(folders=[HERE, os.path.dirname(HERE)]))
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
        file.write(_PAIR.format(folders=[HERE, os.path.dirname(HERE)]))
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
