"""kvferry's agent, used directly."""

from __future__ import annotations

import os
import time
from typing import Any

from ... import Agent, Segment
from ...agent import Message, PeerLost, TransferDone
from ..errors import BenchError
from ..memory import Memory
from .engine import CallerClock, Setup, Stopwatch, Took, transport_of


def _agent(setup: Setup, memory: Memory) -> Agent:
    agent = Agent({"name": "bench", "transport": transport_of(setup), **setup.options})
    for layer in range(setup.work.layers):
        agent.register(memory.layer(layer), kind=memory.kind, device=0)
    return agent


class Starter:
    """See `engines.Starter`. It waits asleep for the end; with `poll_s` it looks at intervals."""

    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        self._agent = _agent(setup, memory)
        self._poll_s, self._limit_s = setup.poll_s, setup.limit_s
        self._pids: tuple[int, ...] = (os.getpid(), other)
        work = setup.work
        stride = work.block_bytes
        # A layer is a region of its own on both sides, and one list pair serves all of them.
        self._segments = [Segment(0, layer, layer, 0, 0, stride, stride, stride) for layer in range(work.layers)]
        read = work.direction == "read"
        # What is written is ours when we read, and theirs when we write.
        self._blocks = [[(w, r) if read else (r, w)] for w, r in work.ids()]
        self._start = self._agent.read if read else self._agent.write
        self._peer = -1

    def meet(self, hello: Any) -> None:
        self._peer = self._agent.connect(hello)

    def warm(self) -> None:
        for local, remote in self._blocks[0]:
            self._start(self._peer, self._segments[:1], [(local[:1], remote[:1])]).wait(self._limit_s)
        self._agent.poll()

    def run(self, prepared: Any) -> Took:
        agent, start, peer, segments = self._agent, self._start, self._peer, self._segments
        left, limit_s = len(self._blocks), self._limit_s
        caller = CallerClock()
        watch = Stopwatch(self._pids)

        def post() -> None:
            for blocks in self._blocks:
                start(peer, segments, blocks)

        caller.call(post)
        while left:
            if self._poll_s:
                time.sleep(self._poll_s)
                events = caller.call(agent.poll)
            else:
                # Asleep while waiting: what this thread is busy with is its processor time.
                before = time.thread_time()
                events = agent.wait(limit_s)
                caller.asleep(time.thread_time() - before)
            if not events and time.monotonic() - watch.start >= limit_s:
                raise BenchError(f"{left} of {len(self._blocks)} transfers have not ended within {limit_s:.0f} s")
            for event in events:
                if isinstance(event, TransferDone):
                    if event.error is not None:
                        raise event.error
                    left -= 1
                elif isinstance(event, PeerLost):
                    raise event.error
        took = watch.took(caller)
        self.tell()
        return took

    def tell(self) -> None:
        """Tells the other side that all is over."""
        self._agent.send(self._peer, b"done")

    def close(self) -> None:
        self._agent.shutdown()


class Other:
    """See `engines.Other`. An agent alone is not told when a transfer is over: the starting side sends a message."""

    def __init__(self, setup: Setup, memory: Memory) -> None:
        self._agent = _agent(setup, memory)

    def hello(self) -> Any:
        return self._agent.metadata()

    def expect(self) -> Any:
        return None

    def known(self, timeout: float) -> float | None:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            events = self._agent.wait(left)
            now = time.monotonic()
            if any(isinstance(event, Message) for event in events):
                return now
        raise TimeoutError(f"no message from the starting side within {timeout:.0f} s")

    def close(self) -> None:
        self._agent.shutdown()


starter, other = Starter, Other
