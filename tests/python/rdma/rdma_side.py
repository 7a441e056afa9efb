"""One agent with patterned memory, as the object of a process of its own (`lab.process.Remote`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from kvferry import Agent, KvferryError, Segment
from kvferry.agent import PeerLost
from numpy.typing import NDArray

LIMIT_S = 100.0
"""For what must end by itself."""
PATHS = ("copied_bytes", "one_sided_bytes", "served_bytes")


def pattern(seed: int, length: int) -> NDArray[np.uint8]:
    """Bytes that differ by seed and place."""
    words = np.arange((length + 7) // 8, dtype=np.uint64) + np.uint64(seed << 40)
    words *= np.uint64(0x9E37_79B9_7F4A_7C15)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[:length].copy()


def copied(
    target: NDArray[np.uint8], source: NDArray[np.uint8], segment: Segment, written: list[int], read: list[int]
) -> NDArray[np.uint8]:
    """What `target` is after blocks `read` of `source` have gone to its blocks `written`: the copy's own model."""
    expected = target.copy()
    for to, at in zip(written, read, strict=True):
        local = segment.local_offset + to * segment.local_stride
        remote = segment.remote_offset + at * segment.remote_stride
        expected[local : local + segment.length] = source[remote : remote + segment.length]
    return expected


class Side:
    """An agent with one registered region of `length` bytes."""

    def __init__(self, config: Mapping[str, object], seed: int, length: int) -> None:
        self._memory = pattern(seed, length)
        self._agent = Agent(dict(config))
        self._region = self._agent.register(self._memory)
        self._lost: list[tuple[float, int, str]] = []

    def metadata(self) -> bytes:
        return self._agent.metadata()

    def connect(self, metadata: bytes) -> int:
        return self._agent.connect(metadata)

    def move(self, direction: str, peer: int, segment: Segment, ours: list[int], theirs: list[int]) -> dict[str, Any]:
        """Moves blocks and waits: seconds by the clock and as told, and the bytes by path. An error is a result."""
        before = self._agent.stats()
        begin = time.monotonic()
        try:
            transfer = getattr(self._agent, direction)(peer, [segment], [(ours, theirs)])
            done = transfer.wait(LIMIT_S)
        except KvferryError as error:
            return {"error": error.name, "message": error.message, "at": time.monotonic()}
        after = self._agent.stats()
        paths = {path: int(str(after[path])) - int(str(before[path])) for path in PATHS}
        return {"seconds": time.monotonic() - begin, "told": done.duration, **{k: v for k, v in paths.items() if v}}

    def route(self, peer: int) -> tuple[str, str]:
        """The lanes, and how host memory goes, as soon as the peer has answered."""
        until = time.monotonic() + LIMIT_S
        while (route := self._agent.route(peer)) is None:
            assert time.monotonic() < until, f"no answer within {LIMIT_S} s"
            time.sleep(0.01)
        return route.lanes, route.host

    def fill(self, seed: int) -> None:
        self._memory[:] = pattern(seed, len(self._memory))

    def bytes(self) -> NDArray[np.uint8]:
        return self._memory

    def deregister(self) -> None:
        self._agent.deregister(self._region)

    def lost(self, limit: float) -> tuple[float, str] | None:
        """When a peer was lost, and why; None if none was within the limit."""
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            for event in self._agent.wait(min(left, 1.0)):
                if isinstance(event, PeerLost):
                    return time.monotonic(), str(event.error)
        return None

    def read_until_it_fails(
        self, peer: int, segment: Segment, blocks: list[int], limit: float
    ) -> tuple[float, str] | None:
        """Reads again and again; when one failed, and why."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            outcome = self.move("read", peer, segment, blocks, blocks)
            if "error" in outcome:
                return outcome["at"], outcome["error"]
        return None

    def close(self) -> None:
        self._agent.shutdown()


def sent_packets() -> dict[str, int]:
    """Packets that each soft-RoCE device has sent."""
    counters = Path("/sys/class/infiniband").glob("*/ports/1/hw_counters/sent_pkts")
    return {path.parts[4]: int(path.read_text()) for path in counters}
