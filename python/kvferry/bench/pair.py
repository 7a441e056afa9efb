"""Two processes with an engine between them, seen from the process that takes the measurements."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from . import child
from .cli import BenchError
from .engines import Setup, Took

ANSWER_S = 300.0
"""How long an answer may take before the measurement is given up."""


class Round(NamedTuple):
    """One round's figures; `notify_s` is None for engines that do not tell the other side."""

    took: Took
    notify_s: float | None


class Pair:
    """An engine's two processes, stopped between `resume` and `pause`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._context = multiprocessing.get_context("spawn")
        self._children: list[tuple[Any, Connection]] = []
        try:
            other = self._start(False, 0)
            self._start(True, other)
            self.ask(1, "meet", self.ask(0, "hello"))
        except BaseException:
            self.close()
            raise
        self._round = 0

    def _start(self, starts: bool, other: int) -> int:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=child.main, args=(theirs, self.setup, starts, other), daemon=True)
        process.start()
        theirs.close()
        self._children.append((process, ours))
        pid: int = self._answer(len(self._children) - 1, "start")
        return pid

    def _tell(self, index: int, name: str, *arguments: Any) -> None:
        self._children[index][1].send((name, arguments))

    def _answer(self, index: int, name: str) -> Any:
        process, pipe = self._children[index]
        what = f"{self.setup.engine}, {'starting' if index else 'other'} side, {name}"
        if not pipe.poll(ANSWER_S):
            raise BenchError(f"{what}: no answer within {ANSWER_S:.0f} s")
        try:
            value, error = pipe.recv()
        except EOFError:
            process.join(5)
            raise BenchError(f"{what}: the process ended with {process.exitcode}") from None
        if error is not None:
            raise BenchError(f"{what}:\n{error}")
        return value

    def ask(self, index: int, name: str, *arguments: Any) -> Any:
        """What a process answers to a command. 0 is the other side, 1 the starting one."""
        self._tell(index, name, *arguments)
        return self._answer(index, name)

    def round(self, watch: bool = False) -> Round:
        """Wipes, moves everything, and compares every byte. With `watch`, also when the last byte came."""
        self._round += 1
        for index in (0, 1):
            self.ask(index, "wipe", self._round)
        ticket = self.ask(0, "expect")
        self._tell(0, "known")
        took: Took = self.ask(1, "run", ticket, watch)
        known = self._answer(0, "known")
        wrong = self.ask(0, "check") + self.ask(1, "check")
        if wrong:
            raise BenchError(f"{self.setup.engine}: {wrong} words of 8 bytes are wrong after round {self._round}")
        # A worker's own end comes after the producer's word, so that without a watcher nothing tells its last byte.
        last = took.extra.get("last_byte_at", None if self.setup.engine == "worker" else took.done_at)
        return Round(took, None if known is None or last is None else known - last)

    def pause(self) -> None:
        """Stops both processes with all their threads."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets both go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process, _ in self._children:
            if process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        """Ends both processes."""
        self._signal(signal.SIGCONT)
        for process, pipe in reversed(self._children):
            try:
                pipe.send(("end", ()))
                if pipe.poll(15):
                    pipe.recv()
            except (OSError, EOFError):
                pass
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._children.clear()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
