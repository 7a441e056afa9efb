"""The body of a measuring process: it makes its side of an engine and does what the pipe says."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from .engines import Setup, Took, make
from .memory import Memory

_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.0001
"""How often the watcher looks: a tenth of what is asked of the notification."""
KNOWN_TIMEOUT_S = 120.0
_SETTLE_S = 0.005


class Process:
    """Commands are methods. The answer to each is `(value, None)` or `(None, text of the error)`."""

    def __init__(self, setup: Setup, starts: bool, other: int) -> None:
        self.setup = setup
        self.memory = Memory(setup.work)
        # What is written is the starting side's when it reads, else the other's.
        self.is_written = starts == (setup.work.direction == "read")
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

    def run(self, ticket: Any, watch: bool) -> Took:
        """A round. With `watch` a thread looks when the last byte has come, which costs some processor time."""
        self.side.warm()
        # Until the process that gave the order and the other side sleep: on few cores, the thread that this round
        # wakes would else be put on this thread's core, and stay there for a tick of the scheduler.
        time.sleep(_SETTLE_S)
        if not (watch and self.is_written):
            took: Took = self.side.run(ticket)
            return took
        seen: list[float] = []
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                if self.memory.arrived(self.pairs):
                    seen.append(time.monotonic())
                    return
                time.sleep(_WATCH_S)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            took = self.side.run(ticket)
        finally:
            stop.set()
            thread.join()
        took.extra["last_byte_at"] = seen[0] if seen else took.done_at
        return took

    def check(self) -> int:
        """Wrong words after a round."""
        return self.memory.wrong_words(self.pairs) if self.is_written and self.pairs is not None else 0

    def end(self) -> None:
        """Before the process ends."""
        self.side.close()


def main(pipe: Connection, setup: Setup, starts: bool, other: int) -> None:
    """The process's own function."""
    # A stopped process would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = Process(setup, starts, other)
        pipe.send((os.getpid(), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        return
    try:
        while True:
            name, arguments = pipe.recv()
            try:
                answer = (getattr(process, name)(*arguments), None)
            except Exception:
                answer = (None, traceback.format_exc())
            pipe.send(answer)
            if name == "end":
                return
    except (EOFError, BrokenPipeError):
        # The parent is gone, or has given up.
        return
