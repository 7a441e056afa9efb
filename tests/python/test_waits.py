"""Waits end when a signal's handler raises, hold nobody up, and lose nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvferry
import numpy as np
import pytest
from kvferry import Segment, _lib
from lab.process import GENEROUS
from pair import pair, worker_of

LONG = 4 * GENEROUS
"""Seconds of a wait for what never comes."""


class Interrupted(Exception):
    """What the handler raises, as that of Ctrl-C raises KeyboardInterrupt."""


@contextmanager
def interrupted() -> Iterator[None]:
    """A signal whose handler raises comes while the block waits."""
    came = []

    def handle(_number: int, _frame: object) -> None:
        came.append(True)
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    sender.start()
    try:
        yield
    except Interrupted:
        pass
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert came == [True]


class Calls:
    """Stands before the calls of an object of the library."""

    def __init__(self, handle: _lib.Handle, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verb, self.count, self.original = verb, 0, handle.call
        self.before: Callable[[], None] = lambda: None
        self.interrupts: Callable[..., bool] = lambda *_: False
        monkeypatch.setattr(handle, "call", self)

    def __call__(self, verb: str, *arguments: Any) -> None:
        if verb != self.verb:
            self.original(verb, *arguments)
            return
        self.count += 1
        self.before()
        self.original(verb, *arguments)
        if self.interrupts(*arguments):
            # Once, and before anything else happens.
            self.interrupts = lambda *_: False
            raise Interrupted


@contextmanager
def agents() -> Iterator[tuple[kvferry.Agent, kvferry.Agent, int]]:
    """Two agents, and the second one's id at the first, which has taken every event."""
    with kvferry.Agent({"transport": "tcp"}) as agent, kvferry.Agent({"transport": "tcp"}) as other:
        peer = agent.connect(other.metadata())
        until(agent, kvferry.PeerConnected)
        until(other, kvferry.PeerConnected)
        yield agent, other, peer


def until(agent: kvferry.Agent, kind: type[Any]) -> list[Any]:
    deadline = time.monotonic() + GENEROUS
    found: list[Any] = []
    while not found:
        assert time.monotonic() < deadline, kind
        found = [event for event in agent.wait(1.0) if isinstance(event, kind)]
    return found


def hello_to(agent: kvferry.Agent, other: kvferry.Agent) -> int:
    """The id under which `other` knows the agent."""
    return int(other.connect(agent.metadata()))


def waits(agent: kvferry.Agent, worker: kvferry.Worker, port: int) -> dict[str, Callable[[], object]]:
    return {
        "Agent.wait": lambda: agent.wait(LONG),
        "Worker.wait": lambda: worker.wait(LONG),
        "Worker.wait_encoded": lambda: worker.wait_encoded(LONG),
        "Worker.push_metadata": lambda: worker.push_metadata("127.0.0.1", port, 1, LONG),
    }


@pytest.mark.parametrize("name", ["Agent.wait", "Worker.wait", "Worker.wait_encoded", "Worker.push_metadata"])
def test_a_signal_ends_a_wait(name: str) -> None:
    cache = np.zeros(64 << 16, dtype=np.uint8)
    with socket.socket() as silent, kvferry.Agent({"transport": "tcp"}) as agent:
        # Whoever connects is never answered.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with worker_of("waits", cache.ctypes.data) as worker:
            begin = time.monotonic()
            with interrupted():
                wait = waits(agent, worker, silent.getsockname()[1])[name]
                # A worker may have a report of its start.
                while wait() is not None:
                    pass
            assert time.monotonic() - begin < GENEROUS


def test_a_signal_ends_a_wait_for_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, theirs = np.zeros(4096, dtype=np.uint8), np.arange(4096, dtype=np.uint16).astype(np.uint8)
    with agents() as (agent, other, peer):
        agent.register(memory)
        region = other.register(theirs)
        agent.add_region(peer, other.region_metadata(region))
        transfer = agent.read(peer, [Segment(0, 0, region.index, 0, 0, 4096, 4096, 4096)], [([0], [0])])
        with monkeypatch.context() as patch:
            # Its event stays away.
            patch.setattr(agent, "_take", lambda limit: time.sleep(limit / 1000))
            begin = time.monotonic()
            with interrupted():
                transfer.wait()
            assert time.monotonic() - begin < GENEROUS
        transfer.wait(GENEROUS)
        np.testing.assert_array_equal(memory, theirs)


def test_a_wait_that_ends_at_once_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents() as (agent, other, peer):
        agent.send(peer, b"first")
        deadline = time.monotonic() + GENEROUS
        while other.stats()["messages_received"] == 0:
            assert time.monotonic() < deadline
        calls = Calls(other._handle, "wait", monkeypatch)
        assert [event.data for event in other.wait(LONG) if isinstance(event, kvferry.Message)] == [b"first"]
        assert calls.count == 1


def test_turns_are_short_and_add_up() -> None:
    for limit, least, most in [(0.0, 1, 1), (0.05, 1, 1), (0.35, 3, 5)]:
        turns: list[int] = []

        def wait(turn: int, turns: list[int] = turns) -> None:
            turns.append(turn)
            time.sleep(turn / 1000)

        begin = time.monotonic()
        assert _lib.in_turns(limit, wait) is None
        assert time.monotonic() - begin >= limit
        assert max(turns) <= 100
        assert least <= len(turns) <= most
    assert _lib.in_turns(float("inf"), lambda turn: turn) == 100


def test_a_poll_does_not_wait_for_another_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    with kvferry.Agent({"transport": "tcp"}) as agent:
        calls = Calls(agent._handle, "wait", monkeypatch)

        def before() -> None:
            entered.set()
            leave.wait(LONG)

        calls.before = before
        waiter = threading.Thread(target=agent.wait, args=(0.01,))
        waiter.start()
        try:
            assert entered.wait(GENEROUS)
            begin = time.monotonic()
            assert agent.poll() == []
            assert agent.wait(0.2) == []
            assert time.monotonic() - begin < GENEROUS
        finally:
            leave.set()
            waiter.join()


def test_threads_that_wait_at_once_all_see_their_transfers() -> None:
    memory, theirs = np.zeros(64 << 10, dtype=np.uint8), np.arange(64 << 10, dtype=np.uint32).astype(np.uint8)
    with agents() as (agent, other, peer):
        agent.register(memory)
        region = other.register(theirs)
        agent.add_region(peer, other.region_metadata(region))
        segment = Segment(0, 0, region.index, 0, 0, 4096, 4096, 4096)
        ended: list[int] = []

        def read(first: int) -> None:
            for block in range(first, 16, 4):
                agent.read(peer, [segment], [([block], [block])]).wait(GENEROUS)
                ended.append(block)

        threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ended) == list(range(16))
        np.testing.assert_array_equal(memory, theirs)


def test_an_interrupted_wait_loses_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, theirs = np.zeros(4096, dtype=np.uint8), np.arange(4096, dtype=np.uint16).astype(np.uint8)
    with agents() as (agent, other, peer):
        agent.register(memory)
        region = other.register(theirs)
        agent.add_region(peer, other.region_metadata(region))
        calls = Calls(agent._handle, "wait", monkeypatch)
        calls.interrupts = lambda *arguments: arguments[-1][0] > 0
        transfer = agent.read(peer, [Segment(0, 0, region.index, 0, 0, 4096, 4096, 4096)], [([0], [0])])
        other.send(hello_to(agent, other), b"kept")
        with pytest.raises(Interrupted):
            agent.wait(LONG)
        transfer.wait(GENEROUS)
        np.testing.assert_array_equal(memory, theirs)
        assert [event.data for event in until(agent, kvferry.Message)] == [b"kept"]


def ended(buffer: Any) -> list[str]:
    report = bytes(_lib.load().ffi.buffer(buffer.data, buffer.len)) if buffer.len else b""
    return kvferry.decode_report(report)["finished_recving"] if report else []


@pytest.mark.parametrize("take", ["wait", "poll"])
def test_an_interrupted_wait_loses_no_report(take: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as both:
        calls = Calls(both.worker._handle, "wait", monkeypatch)
        request, params = both.grant()
        calls.interrupts = lambda _limit, buffer: request in ended(buffer)
        both.load(request, params)
        with pytest.raises(Interrupted):
            both.over(request)
        report = both.worker.wait_encoded(0.0) if take == "wait" else both.worker.poll_encoded()
        assert report is not None
        outcome = both.scheduler.report(report)
        assert outcome["finished_recving"] == [request]
        assert both.hand_over() is None


@pytest.mark.parametrize("noun", ["agent", "worker"])
def test_an_interrupted_registration_keeps_its_owner(noun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(1 << 16)
    made: Any
    with (
        kvferry.Agent({"transport": "tcp"})
        if noun == "agent"
        else kvferry.Worker({"engine_id": "waits", "transport": "tcp"})
    ) as made:
        calls = Calls(made._handle, "register", monkeypatch)
        calls.interrupts = lambda *_: True
        with pytest.raises(Interrupted):
            made.register(memory)
        with pytest.raises(BufferError):
            memory.clear()
    memory.clear()


def test_a_wait_ends_when_another_thread_shuts_down() -> None:
    for make in (
        lambda: kvferry.Agent({"transport": "tcp"}),
        lambda: kvferry.Worker({"engine_id": "waits", "transport": "tcp"}),
    ):
        ended: list[BaseException] = []
        waiting = make()

        def wait(waiting: Any = waiting, ended: list[BaseException] = ended) -> None:
            try:
                while True:
                    waiting.wait(LONG)
            except kvferry.ShutDownError as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.shutdown()
        thread.join(GENEROUS)
        assert len(ended) == 1


FORK = """
import os, sys, threading, kvferry
agent = kvferry.Agent({"transport": "tcp"})
threading.Thread(target=agent.wait, args=(3600,), daemon=True).start()
while not agent._is_polling:
    pass
pid = os.fork()
if pid == 0:
    for use in (agent.poll, lambda: agent.wait(3600), agent.stats, agent.shutdown):
        try:
            use()
        except kvferry.ShutDownError as error:
            if "fork" not in error.message:
                os._exit(1)
    os._exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
agent.shutdown()
sys.exit(status)
"""


def test_a_process_forked_beside_a_wait_is_answered() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, timeout=GENEROUS, check=False)
    assert done.returncode == 7, done.stderr.decode()
