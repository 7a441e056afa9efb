"""One side of an engine with its memory, as the object of a process of its own."""

from __future__ import annotations

import os
import threading
import time
from importlib import import_module
from typing import Any

from .engines.engine import Other, Setup, Starter, Took
from .memory import Memory

_WATCH_S = 0.0001
"""How often the watcher looks: a tenth of what is asked of the notification."""
KNOWN_TIMEOUT_S = 120.0
_SETTLE_S = 0.005


def memory_of(setup: Setup, is_written: bool) -> Memory:
    """Memory of the kind that is moved."""
    if setup.memory == "host":
        return Memory(setup.work, setup.pages and setup.pages[0 if is_written else 1])
    from .cuda import CudaMemory

    return CudaMemory(setup.work)


def make(setup: Setup, memory: Memory, starts: bool, other: int) -> Starter | Other:
    """The engine's starting or other side."""
    if setup.library:
        os.environ["KVFERRY_LIBRARY"] = setup.library
    module = import_module(setup.engine, __package__)
    side: Starter | Other = module.starter(setup, memory, other) if starts else module.other(setup, memory)
    return side


class Process:
    """One side of an engine; `pair.Pair` says when each method is called."""

    def __init__(self, setup: Setup, starts: bool, other: int) -> None:
        self.setup = setup
        # What is written is the starting side's when it reads, else the other's.
        self.is_written = starts == (setup.work.direction == "read")
        self.memory = memory_of(setup, self.is_written)
        if not self.is_written:
            self.memory.fill()
        self.side: Any = make(setup, self.memory, starts, other)
        self.pairs = getattr(self.side, "pairs", setup.work.ids())

    def hello(self) -> Any:
        """Of the other side."""
        return self.side.hello()

    def meet(self, hello: Any) -> None:
        """Of the starting side."""
        self.side.meet(hello)

    def expect(self) -> Any:
        """Of the other side."""
        return self.side.expect()

    def known(self) -> float | None:
        """Of the other side."""
        when: float | None = self.side.known(KNOWN_TIMEOUT_S)
        return when

    def wipe(self, number: int) -> None:
        """Before a round."""
        if self.is_written:
            self.memory.wipe(number)

    def run(self, prepared: Any, watch: bool) -> Took:
        """A round. With `watch` a thread looks when the last byte has come, which costs some processor time."""
        self.side.warm()
        # Until the process that gave the order and the other side sleep: on few cores, the thread that this round
        # wakes would else be put on this thread's core, and stay there for a tick of the scheduler.
        time.sleep(_SETTLE_S)
        if not (watch and self.is_written):
            took: Took = self.side.run(prepared)
            return took
        seen: list[float] = []
        stop = threading.Event()

        waiting = self.memory.last_words(self.pairs)

        def look() -> None:
            while not stop.is_set():
                if waiting.over():
                    seen.append(time.monotonic())
                    return
                time.sleep(_WATCH_S)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            took = self.side.run(prepared)
        finally:
            stop.set()
            thread.join()
        took.extra["last_byte_at"] = seen[0] if seen else took.done_at
        return took

    def check(self) -> int:
        """Wrong words after a round."""
        return self.memory.wrong_words(self.pairs) if self.is_written and self.pairs is not None else 0

    def close(self) -> None:
        """Before the process ends."""
        self.side.close()
