"""Takes a worker's reports to the engine's thread without a call of the library.

That thread's caches hold other things: it pays microseconds for every look-up, and more for a call. So the library
leaves reports in memory of ours (`kvf_outbox`), and most polls are one look at it.
"""

from __future__ import annotations

import platform
import time
from functools import partial

from . import _lib
from ._errors import ShutDownError

_NEWS = b"\1"
_BYTES = 64 << 10
_LAST_TURN_SECONDS = 10.0
_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""True if other processors see loads, and stores, in their order. An outbox needs that, for Python has no atomics;
elsewhere a worker's has no room for a report, and only tells that a poll has one."""


class Outbox:
    """Where a worker leaves reports, with what a look needs at hand."""

    def __init__(self, capacity: int) -> None:
        ffi = _lib.load().ffi
        head = ffi.sizeof("kvf_outbox")
        # Words, for their alignment.
        self.memory = ffi.new("uint64_t[]", -(-capacity // 8))
        raw = memoryview(ffi.buffer(self.memory))
        self.news = raw[:2].cast("H")
        """`news[0]`: both flags in one look, `full` in the lower byte."""
        self.full = raw[:1]
        self.length = raw[8:16].cast("Q")
        # Not a memoryview: a piece of it is bytes at once.
        self.reports = ffi.buffer(ffi.cast("uint8_t *", self.memory) + head, capacity - head)
        self.turns: list[None] = [None]
        """Empty while a thread reads here or takes reports by a call. A list, because to take its item needs no lock,
        and on a thread whose caches hold other things costs a third of what one does."""


class WorkerHandle(_lib.Handle):
    """A worker with its outbox."""

    def __init__(self, config: bytes) -> None:
        self.news: memoryview | bytes = _NEWS
        """`news[0]` is not 0 when a poll has something to tell, also that the worker is shut down."""
        self.outbox: Outbox | None = None
        """None once the worker is shut down."""
        self.kept: list[bytes] = []
        """Reports that an interrupted wait had taken."""
        super().__init__("worker", config)
        self.set_outbox(_BYTES if _IN_ORDER else _lib.load().ffi.sizeof("kvf_outbox"))
        self._submit = partial(_lib.load().functions.kvf_worker_submit, self.get())

    def set_outbox(self, capacity: int) -> None:
        """Before anybody polls."""
        outbox = Outbox(capacity)
        self.call("set_outbox", _lib.load().ffi.cast("kvf_outbox *", outbox.memory), capacity)
        self.outbox, self.news = outbox, outbox.news
        # The library writes there until it is through with this worker.
        self.owners["outbox"] = outbox

    def leave_outbox(self) -> None:
        """From now on polls ask the library."""
        self.outbox, self.news = None, _NEWS

    def leave(self) -> None:
        # Nobody fills this process's copy of the outbox.
        self.leave_outbox()
        super().leave()

    def free(self) -> None:
        self.leave_outbox()
        super().free()

    def suspend(self, timeout: float) -> bytes | None:
        """Shuts the worker down for another one to follow, and frees it. The last report."""
        limit = _lib.milliseconds(timeout)
        try:
            self.end("suspend", limit)
            # Another thread may be polling just now.
            return self.wait(_LAST_TURN_SECONDS)
        except ShutDownError:
            # There is none.
            return None
        finally:
            self.free()

    def submit(self, step: bytes) -> None:
        if self.pointer is None:
            self.get()
        status = self._submit(step, len(step))
        if status != 0:
            raise _lib.last_error(status)

    def poll(self) -> bytes | None:
        outbox = self.outbox
        if outbox is None:
            return self.ask("poll") or None
        try:
            turn = outbox.turns.pop()
        except IndexError:
            # Another thread takes what there is.
            return None
        try:
            if self.kept:
                return self.take_kept(outbox)
            if outbox.news[0] == 1:
                report: bytes = outbox.reports[: outbox.length[0]]
                outbox.full[0] = 0
                return report
            return self.ask("poll") or None
        finally:
            outbox.turns.append(turn)

    def wait(self, timeout: float) -> bytes | None:
        return _lib.in_turns(_lib.milliseconds(timeout) / 1000, self.take_turn)

    def take_turn(self, limit: int) -> bytes | None:
        """Waits up to `limit` milliseconds for a report."""
        outbox = self.outbox
        if outbox is None:
            return self.ask("wait", 0) or None
        buffer = _lib.new("kvf_buffer *")
        try:
            turn = outbox.turns.pop()
        except IndexError:
            # Another thread polls, which is over at once, or waits.
            self.get()
            if limit > 0:
                time.sleep(0.001)
            return None
        # Nothing comes between taking the turn and the block that gives it back: an interrupt there would lose it.
        try:
            if self.kept:
                return self.take_kept(outbox)
            self.call("wait", limit, buffer)
            return _lib.take(buffer) or None
        except BaseException:
            if buffer.len:
                # An interrupt came after the call: the next poll gets it.
                self.kept.append(_lib.take(buffer))
                self.news = _NEWS
            raise
        finally:
            outbox.turns.append(turn)

    def take_kept(self, outbox: Outbox) -> bytes:
        report = self.kept.pop(0)
        if not self.kept:
            self.news = outbox.news
        return report
