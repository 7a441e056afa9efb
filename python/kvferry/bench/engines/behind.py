"""One block behind a large request to the same peer: what the small one has to wait for.

Both are asked for one right after the other. Timed is from before the first call to the end of the one block, because
a thread that is held up by the first call cannot make the second; `extra["own"]` is from the second call.
`extra["large"]` is when the large one ended.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from ...agent import PeerLost, TransferDone
from ..memory import Memory
from ..work import Ids, Work
from . import agent, nixl
from .engine import CallerClock, Setup, Stopwatch, Took

_LIMIT_S = 120.0


def small_ids(work: Work) -> tuple[Ids, Ids]:
    """A block that the large request leaves alone, in the memory that is written and in the one that is read."""
    (written, read), *_ = work.ids()
    free = [np.setdiff1d(np.arange(work.pool_blocks, dtype=np.uint32), ids)[:1] for ids in (written, read)]
    return free[0], free[1]


class _Agent(agent.Starter):
    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        super().__init__(setup, memory, other)
        self._small = small_ids(setup.work)
        self.pairs = [*setup.work.ids(), self._small]

    def run(self, ticket: Any) -> Took:
        caller = CallerClock()
        watch = Stopwatch((os.getpid(),))
        large = caller.call(self._start, self._peer, self._segments, self._blocks[0])
        own = time.monotonic()
        small = caller.call(self._start, self._peer, self._segments, [self._small])
        ended: dict[int, float] = {}
        while len(ended) < 2:
            events = self._agent.wait(_LIMIT_S)
            now = time.monotonic()
            if not events:
                raise TimeoutError(f"the transfers have not ended within {_LIMIT_S:.0f} s")
            for event in events:
                if isinstance(event, TransferDone):
                    if event.error is not None:
                        raise event.error
                    ended[event.transfer] = now
                elif isinstance(event, PeerLost):
                    raise event.error
        took = watch.took(caller, ended[small.id], large=ended[large.id] - watch.start, own=ended[small.id] - own)
        self._agent.send(self._peer, b"done")
        return took


class _Nixl(nixl.Starter):
    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        super().__init__(setup, memory, other)
        small = small_ids(setup.work)
        self.pairs = [*setup.work.ids(), small]
        written, read = (ids.astype(np.int32) for ids in small)
        self._small = (written, read) if setup.work.direction == "read" else (read, written)

    def run(self, ticket: Any) -> Took:
        nixl_agent = self._agent
        caller = CallerClock()
        watch = Stopwatch((os.getpid(),))

        def post(ours: Any, theirs: Any) -> Any:
            handle = nixl_agent.make_prepped_xfer(self._op, self._local, ours, self._remote, theirs, b"done")
            if nixl_agent.transfer(handle) == "ERR":
                raise RuntimeError("NIXL refused the transfer")
            return handle

        large = caller.call(post, *self._numbers[0])
        own = time.monotonic()
        handles = [large, caller.call(post, *self._small)]
        ended: dict[int, float] = {}
        while len(ended) < 2:
            # The small one first: it is what is timed.
            for index in (1, 0):
                if index not in ended and nixl_agent.check_xfer_state(handles[index]) == "DONE":
                    ended[index] = time.monotonic()
            if time.monotonic() - watch.start > _LIMIT_S:
                raise TimeoutError(f"the NIXL transfers have not ended within {_LIMIT_S:.0f} s")
        took = watch.took(caller, ended[1], large=ended[0] - watch.start, own=ended[1] - own)
        for handle in handles:
            nixl_agent.release_xfer_handle(handle)
        return took


def starter(setup: Setup, memory: Memory, other: int) -> Any:
    return (_Nixl if "num_threads" in setup.options else _Agent)(setup, memory, other)


def other(setup: Setup, memory: Memory) -> Any:
    if "num_threads" not in setup.options:
        return agent.other(setup, memory)
    made = nixl.other(setup, memory)
    made.expected = 2
    return made
