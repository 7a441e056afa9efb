"""Two processes with an engine between them, seen from the process that takes the measurements."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from .child import Process
from .engines.engine import WORKER, Setup, Took
from .errors import BenchError
from .remote import Remote


class Round(NamedTuple):
    """One round's figures; `notify_s` is None for engines that do not tell the other side."""

    took: Took
    notify_s: float | None


class Pair(AbstractContextManager["Pair"]):
    """An engine's two processes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._round = 0
        with ExitStack() as stack:

            def start(side: str, *arguments: object) -> Remote:
                made = Remote(f"{setup.name}, {side} side", Process, setup, *arguments, package=setup.package)
                return stack.enter_context(made)

            self._other = start("other", False, 0)
            self._starter = start("starting", True, self._other.pid)
            self._starter.ask("meet", self._other.ask("hello"))
            self._stack = stack.pop_all()

    def round(self, watch: bool = False) -> Round:
        """Wipes, moves everything, and compares every byte. With `watch`, also when the last byte came."""
        self._round += 1
        for side in (self._other, self._starter):
            side.ask("wipe", self._round)
        prepared = self._other.ask("expect")
        self._other.tell("known")
        took: Took = self._starter.ask("run", prepared, watch)
        known = self._other.answer("known")
        wrong = self._other.ask("check") + self._starter.ask("check")
        if wrong:
            raise BenchError(f"{self.setup.name}: {wrong} words of 8 bytes are wrong after round {self._round}")
        # Where the end is only looked for at intervals, or comes after the producer's word as a worker's does, nothing
        # but a watcher tells when the last byte came.
        late = self.setup.poll_s > 0 or self.setup.engine == WORKER
        last = took.extra.get("last_byte_at", None if late else took.done_at)
        return Round(took, None if known is None or last is None else known - last)

    def pause(self) -> None:
        """Stops both processes with all their threads."""
        self._starter.pause()
        self._other.pause()

    def resume(self) -> None:
        """Lets both go on."""
        self._other.resume()
        self._starter.resume()

    def close(self) -> None:
        """Ends both processes."""
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()
