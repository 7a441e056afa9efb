"""What an engine is: what it is made from, its two sides, and what they measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from ..work import Work

Result = TypeVar("Result")
AGENT, WORKER = ".engines.agent", ".engines.worker"
"""The modules of kvferry's own engines."""


@dataclass(frozen=True)
class Setup:
    """What an engine is made from, in either process.

    `name` is for people. `engine` is the module that has its two sides, relative to `kvferry.bench` if it begins with a
    dot. `poll_s` is how long the starting side sleeps between two looks; 0 means that it waits or spins, whichever ends
    sooner for that engine. `options` are the engine's own. `pages` are the files whose pages are written and read.
    `library` is the libkvferry.so to load and `package` the folder of the Python package `kvferry`, where they are not
    this process's own. A round that takes longer than `limit_s` has failed.
    """

    name: str
    engine: str
    work: Work
    transport: str
    poll_s: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    pages: tuple[str, str] | None = None
    memory: Literal["host", "cuda"] = "host"
    library: str = ""
    package: str = ""
    limit_s: float = 120.0


def transport_of(setup: Setup) -> str:
    """kvferry's own name of the transport: for a GPU it is UCX's choice."""
    return "auto" if setup.transport == "cuda" else setup.transport


@dataclass
class Took:
    """A round as the starting side saw it: seconds, but for `done_at` (CLOCK_MONOTONIC) and `cpu` (seconds of
    processor time of both processes)."""

    seconds: float
    caller: float | None
    done_at: float
    cpu: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


class Starter(Protocol):
    """The side that starts transfers. `other` is the pid of the other side."""

    def meet(self, hello: Any) -> None:
        """Connects to the side that said hello."""

    def warm(self) -> None:
        """Moves one block, so that the round finds code and connection as warm as between busy engines. Checking
        every byte has driven them out of the caches."""

    def run(self, prepared: Any) -> Took:
        """Moves everything once. `prepared` is what the other side's `expect` returned."""

    def close(self) -> None:
        """Ends."""


class Other(Protocol):
    """The side that is read from or written to."""

    def hello(self) -> Any:
        """What the starting side needs to connect."""

    def expect(self) -> Any:
        """A round is to come: what the starting side needs for it."""

    def known(self, timeout: float) -> float | None:
        """When (CLOCK_MONOTONIC) this side knew that all is over; None for engines that do not tell it."""

    def close(self) -> None:
        """Ends."""


def cpu_of(pid: int) -> float:
    """Processor time that all threads of a process have used, in seconds: Linux's clock of that process."""
    return time.clock_gettime((~pid << 3) | 2)


class Stopwatch:
    """Times a round: construct, start what is to be timed, then `took`."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._pids = pids
        self._cpu = sum(map(cpu_of, pids))
        self.start = time.monotonic()

    def took(self, caller: CallerClock | None, done_at: float | None = None, **extra: float) -> Took:
        """The round's figures, ended now or at `done_at`."""
        now = time.monotonic() if done_at is None else done_at
        cpu = sum(map(cpu_of, self._pids)) - self._cpu
        if caller is None:
            return Took(now - self.start, None, now, cpu, extra)
        return Took(now - self.start, caller.seconds, now, cpu, {**extra, "caller_cpu": caller.cpu})


class CallerClock:
    """Adds up what calls take from the calling thread: by the clock, and as its processor time."""

    def __init__(self) -> None:
        self.seconds = self.cpu = 0.0

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Calls and counts it, and nothing else: after a pause each line of Python here would take microseconds."""
        clock = time.monotonic
        cpu_start = time.thread_time()
        # The clock's own code is not in the processor's caches either.
        clock()
        start = clock()
        result = function(*arguments)
        end = clock()
        self.cpu += time.thread_time() - cpu_start
        self.seconds += end - start
        return result

    def asleep(self, cpu: float) -> None:
        """A call that waits asleep takes only its processor time."""
        self.seconds += cpu
        self.cpu += cpu
