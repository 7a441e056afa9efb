"""What a transfer should do to the bytes of both sides, and how it has gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import cuda
import kvferry
import numpy as np
from kvferry import Segment

SIZES = [6 * 64 * 1024, 64 * 4096]
"""Bytes of the regions that `rich_plan` is for."""
GENEROUS = 120.0
"""Seconds that any wait may take before it is a failure."""


def until(what: str, enough: Callable[[], bool]) -> None:
    """Waits for a condition; `what` says what is wrong if it does not come."""
    deadline = time.monotonic() + GENEROUS
    while not enough():
        if time.monotonic() > deadline:
            raise AssertionError(what)
        time.sleep(0.01)


def rich_plan(random: np.random.Generator) -> tuple[list[Segment], list[tuple[list[int], list[int]]]]:
    """Layers that merge and layers that do not, odd lengths and offsets, random and consecutive blocks."""
    segments = []
    for layer in range(6):
        segments.append(Segment(0, 0, 0, layer * 65536, layer * 65536, 1024, 1024, 1024))
        segments.append(Segment(1, 1, 1, layer * 517 + 3, layer * 600, 4001, 4096, 517))
    count = int(random.integers(10, 40))
    scattered = (random.permutation(64)[:count].tolist(), random.permutation(64)[:count].tolist())
    consecutive = list(range(7, 7 + count))
    return segments, [scattered, (consecutive, consecutive)]


def model(
    direction: str,
    segments: list[Segment],
    blocks: list[tuple[list[int], list[int]]],
    here: list[cuda.Bytes],
    there: list[cuda.Bytes],
) -> None:
    """Does to copies of both sides' bytes what the transfer should do."""
    for s in segments:
        for ours, theirs in zip(*blocks[s.list], strict=True):
            a = s.local_offset + ours * s.local_stride
            b = s.remote_offset + theirs * s.remote_stride
            local, remote = here[s.local_region][a : a + s.length], there[s.remote_region][b : b + s.length]
            if direction == "read":
                local[:] = remote
            else:
                remote[:] = local


def same(what: str, actual: list[cuda.Bytes], expected: list[cuda.Bytes]) -> None:
    """Every byte must be as expected."""
    for region, (a, e) in enumerate(zip(actual, expected, strict=True)):
        wrong = np.flatnonzero(a != e)
        if len(wrong):
            raise AssertionError(
                f"{what}: {len(wrong)} wrong bytes in region {region}, the first at {wrong[0]}: "
                f"{a[wrong[0]]:#x}, expected {e[wrong[0]]:#x}"
            )


def ways_of(agent: kvferry.Agent) -> str:
    """How an agent's bytes have gone."""
    counts = agent.stats()
    ways = {
        "copied by the device": "device_copied_bytes",
        "one-sided": "one_sided_bytes",
        "by messages": "served_bytes",
        "copied by the kernel": "copied_bytes",
    }
    return ", ".join(f"{counts[key]} bytes {way}" for way, key in ways.items() if counts[key])
