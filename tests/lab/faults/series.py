"""The parent's view of engines in processes of their own, and what is counted over a series."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lab.engines.engine import Done, Setup, main

LONG = 60.0
"""Seconds that anything may take on a busy machine; more is a failure."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lab.engines.engine"])


class Stuck(Exception):
    """Something that must come did not come."""


class Child:
    """An engine in a process of its own."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=main, args=(theirs, setup), daemon=True)
        self.process.start()
        theirs.close()
        self.done: list[Done] = []
        self.up = False

    @property
    def pid(self) -> int:
        """The process."""
        assert self.process.pid is not None
        return self.process.pid

    def _receive(self, timeout: float) -> tuple[str, Any] | None:
        if not self.pipe.poll(timeout):
            return None
        name, value = self.pipe.recv()
        if name == "done":
            self.done += value
        elif name == "up":
            self.up = True
        return name, value

    def wait_up(self) -> None:
        """Until it serves."""
        deadline = time.monotonic() + LONG
        while not self.up:
            try:
                self._receive(1.0)
            except (EOFError, ConnectionError) as problem:
                raise Stuck(f"engine {self.setup.name} ended while it started") from problem
            if time.monotonic() > deadline:
                raise Stuck(f"engine {self.setup.name} did not come up")

    def tell(self, name: str, *arguments: Any) -> None:
        """Sends a command without waiting for its answer, which is dropped when it comes."""
        self.pipe.send((name, arguments))

    def ask(self, name: str, *arguments: Any) -> Any:
        """A command's answer."""
        self.wait_up()
        self.pipe.send((name, arguments))
        deadline = time.monotonic() + LONG
        while time.monotonic() < deadline:
            answer = self._receive(1.0)
            if answer is not None and answer[0] == name:
                return answer[1]
        raise Stuck(f"engine {self.setup.name} does not answer {name}")

    def take_done(self, timeout: float = 0.0) -> list[Done]:
        """Loads that ended since the last call, waiting up to `timeout` seconds for one."""
        if not self.done:
            self._receive(timeout)
        while self.pipe.poll(0):
            self._receive(0)
        done, self.done = self.done, []
        return done

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.process.kill()
        self.process.join(LONG)
        self.pipe.close()

    def close(self) -> None:
        """In order; by force if that does not work."""
        if self.process.is_alive():
            try:
                self.signal(signal.SIGCONT)
                self.tell("end")
            except OSError:
                pass
            self.process.join(LONG)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(LONG)
        self.pipe.close()


@contextmanager
def engines(*setups: Setup) -> Iterator[list[Child]]:
    """Engines until the end of the block."""
    children: list[Child] = []
    try:
        for setup in setups:
            children.append(Child(setup))
        yield children
    finally:
        for child in children:
            child.close()


@dataclass
class Tally:
    """What a series counts. The first group must be zero."""

    wrong: int = 0
    unreported: int = 0
    pinned: int = 0
    unexpected: int = 0
    good: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, done: Done, may_fail: bool = True) -> None:
        """Counts one load's end."""
        if done.cause is None:
            self.good += 1
            self.seconds.append(done.seconds)
            if done.wrong_bytes:
                self.wrong += 1
                self.note(f"{done.request}: reported good with {done.wrong_bytes} wrong bytes")
            return
        self.causes[done.cause] += 1
        if not may_fail or done.cause == "reported twice":
            self.unexpected += 1
            self.note(f"{done.request}: {done.cause}: {done.message}")

    def note(self, text: str) -> None:
        """Keeps the first few complaints."""
        if len(self.notes) < 20:
            self.notes.append(text)


class Requests:
    """Makes requests of random sizes, and hands them from a producer to a consumer."""

    def __init__(self, seed: int, most: int = 48) -> None:
        self.random = random.Random(seed)
        self.most = most
        self.count = 0

    def make(self, number: int) -> list[tuple[str, int, int]]:
        """`(request, key, blocks)`; sizes from 1 to `most` blocks, small ones more often."""
        made = []
        for _ in range(number):
            self.count += 1
            size = max(1, int(self.most ** self.random.random()))
            made.append((f"r{self.count}", self.count, size))
        return made


def start_loads(
    consumer: Child, wanted: list[tuple[str, int, int]], params: dict[str, dict[str, Any] | None]
) -> set[str]:
    """Starts to load what was prefilled; the requests whose loads were started."""
    loads = [(name, key, size, found, 0.0) for name, key, size in wanted if (found := params[name]) is not None]
    refused = set(consumer.ask("load", loads))
    return {name for name, *_ in loads} - refused


def hand_over(producer: Child, consumer: Child, wanted: list[tuple[str, int, int]]) -> set[str]:
    """Prefills and starts to load; the requests whose loads were started."""
    return start_loads(consumer, wanted, dict(producer.ask("prefill", wanted)))


def settle(consumer: Child, open_requests: set[str], tally: Tally, limit: float = LONG, may_fail: bool = True) -> None:
    """Waits for the end of all loads; those that do not end are counted."""
    deadline = time.monotonic() + limit
    while open_requests and time.monotonic() < deadline:
        for done in consumer.take_done(0.05):
            if done.request in open_requests:
                open_requests.discard(done.request)
                tally.take(done, may_fail)
            else:
                tally.unexpected += 1
                tally.note(f"{done.request}: an end that nobody waits for ({done.cause})")
    if open_requests:
        tally.unreported += len(open_requests)
        tally.note(f"no report within {limit:.0f} s: {sorted(open_requests)[:5]}")
        open_requests.clear()


def until_good(producer: Child, consumer: Child, requests: Requests, tally: Tally, fault: str) -> None:
    """Requests, one after the other, until one has arrived."""
    deadline, good = time.monotonic() + LONG, tally.good
    while tally.good == good:
        if time.monotonic() > deadline:
            tally.unexpected += 1
            tally.note(f"no request works within {LONG:.0f} s of {fault}")
            break
        settle(consumer, hand_over(producer, consumer, requests.make(1)), tally)


def wait_unpinned(producer: Child, tally: Tally, limit: float) -> float:
    """Waits until the producer holds no blocks; counts those that are pinned longer than `limit` seconds."""
    start = time.monotonic()
    while True:
        held = producer.ask("state")["held"]
        took = time.monotonic() - start
        if held == 0:
            return took
        if took > limit:
            tally.pinned += held
            tally.note(f"{held} requests' blocks are still held after {took:.1f} s")
            return took
        time.sleep(0.05)


KEYS = ("fds", "threads", "peers", "regions", "rss")


def resources(child: Child) -> dict[str, int]:
    """File descriptors, threads, endpoints, registrations and resident memory of an engine."""
    state = child.ask("state")
    return {
        "fds": state["fds"],
        "threads": state["threads"],
        "peers": state["agent"]["peers"],
        "regions": state["agent"]["regions"],
        "rss": state["rss"],
        "heap": state["heap"],
    }


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """By how much each is above the start's level; memory within 1% counts as level."""
    over = {key: max(0, after[key] - before[key]) for key in KEYS}
    if over["rss"] * 100 <= before["rss"]:
        over["rss"] = 0
    return over


def wait_level(child: Child, before: dict[str, int], limit: float = LONG) -> tuple[dict[str, int], dict[str, int]]:
    """Waits until the engine's resources are back at the start's level; its last state and what is still above."""
    deadline = time.monotonic() + limit
    while True:
        after = resources(child)
        over = grown(before, after)
        if not any(over.values()) or time.monotonic() > deadline:
            return after, over
        time.sleep(0.5)
