"""Measures head-of-line blocking: how long one block waits behind a large request to the same peer.

Both are requested back to back. `extra["own"]` is the time from the second call to the end of the one block, and
`extra["large"]` is the time from the start to the end of the large one.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from ...agent import PeerLost, TransferDone
from ..errors import BenchError
from ..memory import Memory
from ..work import Ids, Work
from . import agent
from .engine import CallerClock, Setup, Stopwatch, Took


def small_ids(work: Work) -> tuple[Ids, Ids]:
    """A block that the large request leaves alone, in the memory that is written and in the one that is read."""
    (written, read), *_ = work.ids()
    free = [np.setdiff1d(np.arange(work.pool_blocks, dtype=np.uint32), ids)[:1] for ids in (written, read)]
    return free[0], free[1]


class Starter(agent.Starter):
    """See `engines.Starter`."""

    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        super().__init__(setup, memory, other)
        self._small = small_ids(setup.work)
        self.pairs = [*setup.work.ids(), self._small]

    def run(self, prepared: Any) -> Took:
        caller = CallerClock()
        watch = Stopwatch((os.getpid(),))
        large = caller.call(self._start, self._peer, self._segments, self._blocks[0])
        own = time.monotonic()
        small = caller.call(self._start, self._peer, self._segments, [self._small])
        ended: dict[int, float] = {}
        while len(ended) < 2:
            events = self._agent.wait(self._limit_s)
            now = time.monotonic()
            if not events:
                raise BenchError(f"the transfers have not ended within {self._limit_s:.0f} s")
            for event in events:
                if isinstance(event, TransferDone):
                    if event.error is not None:
                        raise event.error
                    ended[event.transfer] = now
                elif isinstance(event, PeerLost):
                    raise event.error
        took = watch.took(caller, ended[small.id], large=ended[large.id] - watch.start, own=ended[small.id] - own)
        self.tell()
        return took


starter, other = Starter, agent.Other
