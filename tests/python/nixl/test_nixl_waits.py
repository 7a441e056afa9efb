"""Stock NIXL with the plug-in: a call that waits holds up nobody else, and what was sent before the end arrives."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hosts import SIZE, Failed, Process, acquaint, read, serve
from nixl_host import GENEROUS

pytestmark = pytest.mark.slow

MESSAGES = 100


def until(path: Path) -> None:
    """Waits for a file."""
    deadline = time.monotonic() + GENEROUS
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.001)


@pytest.fixture
def three(plugin: Path, edge: str, late: Path, tmp_path: Path) -> Iterator[tuple[Process, Process, Process, Path]]:
    """Agents a, b and c, of which a's is held up while a file is there, and that file's path."""
    hold = tmp_path / "hold"
    env = {"KVFERRY_LIBRARY": str(late), "KVFERRY_TEST_HOLD": str(hold)}
    try:
        with Process(edge, plugin, env=env) as a, Process(edge, plugin) as b, Process(edge, plugin) as c:
            yield a, b, c, hold
    finally:
        hold.unlink(missing_ok=True)


@contextmanager
def held(a: Process, hold: Path, command: str, *arguments: object) -> Iterator[None]:
    """While a thread of `a` is held up in a command."""
    hold.touch()
    a.begin(command, *arguments)
    until(hold.with_name("hold.held"))
    yield
    hold.unlink()


def test_a_call_that_waits_holds_up_no_other_transfer(three: tuple[Process, Process, Process, Path]) -> None:
    a, b, c, hold = three
    there = acquaint(a, b, SIZE)
    serve(c, "c", 3, SIZE)
    with held(a, hold, "add", c.metadata()):
        read(a, there)
        a.notify("b", b"meanwhile")
        assert b.notified(1) == [("a", b"meanwhile")]
    assert a.finish() == "c"
    later = b.buffer("later", 2, SIZE)
    b.register("later", [("later", 0, SIZE)])
    hold.with_name("hold.held").unlink()
    # A region of a peer is loaded, to which transfers go on too.
    with held(a, hold, "add", b.partial("later", False)):
        read(a, there)
    assert a.finish() == "b"
    read(a, later)
    a.notify("c", b"still there")
    assert c.notified(1) == [("a", b"still there")]


def test_a_transfer_that_connects_again_holds_up_no_other(three: tuple[Process, Process, Process, Path]) -> None:
    a, b, c, hold = three
    there = acquaint(a, b, SIZE)
    elsewhere = serve(c, "c", 3, SIZE)
    a.add(c.metadata())
    for message in (b"", b"done"):
        a.make(f"c{len(message)}", "READ", [("cache", 0, SIZE)], [(elsewhere, SIZE, 0)], "c", message)
        assert a.run(f"c{len(message)}") == "DONE"
    c.kill()
    deadline = time.monotonic() + GENEROUS
    while not any("the connection to agent c broke" in line for line in a.log):
        assert time.monotonic() < deadline, a.log
        a.look()
    with held(a, hold, "post", "c0"):
        read(a, there)
    with pytest.raises(Failed, match="REMOTE_DISCONNECT"):
        a.finish()


def test_what_was_sent_before_the_end_arrives(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a, Process(edge, plugin) as b, Process(edge, plugin) as c:
        serve(b, "b", 2, SIZE)
        for number in range(5):
            # The peer has not answered yet.
            a.start("a", ["KVFERRY"])
            a.send_and_end(b.metadata(), "b", f"at once {number}".encode())
            assert b.notified(1) == [("a", f"at once {number}".encode())]
        sent = [f"message {number}".encode() * number for number in range(MESSAGES)]
        # The peer sees the messages and the end at once.
        serve(c, "c", 3, SIZE)
        c.add(b.metadata())
        c.notify("b", b"first")
        assert b.notified(1) == [("c", b"first")]
        b.freeze()
        for message in sent:
            c.notify("b", message)
        c.end()
        b.child.send_signal(signal.SIGCONT)
        assert b.notified(MESSAGES) == [("c", message) for message in sent]


def test_what_was_not_delivered_before_the_end_is_told(plugin: Path, edge: str) -> None:
    environment = {"KVFERRY_CANCEL_GRACE_MS": "100", "KVFERRY_LOG": "info"}
    with Process(edge, plugin, env=environment) as a, Process(edge, plugin) as b:
        serve(a, "a", 1, SIZE)
        serve(b, "b", 2, SIZE)
        metadata = b.metadata()
        b.freeze()
        a.add(metadata)
        for _ in range(3):
            a.notify("b", b"anyone there?")
        a.end()
        assert a.said("messages to agent b that were not delivered: 3", 1) == 1, a.log
        b.kill()


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_a_dead_peer_that_never_answered_costs_descriptors_once(plugin: Path, edge: str, transport: str) -> None:
    env = {"KVFERRY_TRANSPORT": transport}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        serve(a, "a", 1, SIZE)
        serve(b, "b", 2, SIZE)
        metadata = b.metadata()
        b.kill()
        attempts: list[int] = []
        for _ in range(20):
            with suppress(Failed):
                a.add(metadata)
                a.notify("b", b"anyone there?")
            with suppress(Failed):
                a.remove("b")
            a.look()
            attempts.append(a.sockets())
        # What UCX never gives back it has opened once.
        deadline = time.monotonic() + GENEROUS
        while a.sockets() > attempts[0]:
            assert time.monotonic() < deadline, attempts
            time.sleep(0.05)
