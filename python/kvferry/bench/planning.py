"""What it takes to work out who reads what from whom, and how that grows with the blocks.

`kvferry.plan.describe` for one request from TP 4 to TP 1: the engines' shapes are matched once, and a plan is made for
every pair of ranks, whose operations are counted and not made. `scripts/bench-planning` times the parts alone.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from ..plan import describe
from .figures import Row, columns, number, percentile

BLOCK_TOKENS = 16


def deployment(layers: int, blocks: int) -> dict[str, Any]:
    """A request of `blocks` scattered blocks between engines of 8 heads."""
    parts = [{"name": name, "heads": 8, "bytes": 256} for name in ("k", "v")]
    engine = {"layout": "head_major", "parts": "packed", "block_size": [BLOCK_TOKENS]}
    return {
        "model": {"groups": [{"kind": "full", "layers": list(range(layers)), "parts": parts}]},
        "producer": {**engine, "tp": 4},
        "consumer": {**engine, "tp": 1},
        "tokens": blocks * BLOCK_TOKENS,
        "cached_tokens": 0,
        "reuses_blocks": True,
        "consecutive_blocks": False,
    }


Times = list[tuple[int, int, list[float]]]
"""Blocks, operations, milliseconds of every round."""


def measure(layers: int, blocks: int, steps: int, rounds: int) -> Times:
    """Twice as many blocks at each step; the steps take turns."""
    asked = [(blocks << step, deployment(layers, blocks << step)) for step in range(steps)]
    times: Times = []
    for count, one in asked:
        times.append((count, sum(link["operations"] for link in describe(one)["links"]), []))
    for _ in range(rounds):
        for (_, one), (_, _, taken) in zip(asked, times, strict=True):
            start = time.perf_counter()
            describe(one)
            taken.append((time.perf_counter() - start) * 1e3)
    return times


def summary(layers: int, times: Times) -> list[Row]:
    """A row per number of blocks."""
    return [
        {"work": f"plan {layers} layers x {count:,} blocks, TP 4 to 1", "transport": "-", "ours_ms": median(taken)}
        for count, _, taken in times
    ]


def table(layers: int, times: Times) -> str:
    """A line per number of blocks."""
    lines = [
        (
            f"{count:,}",
            f"{operations:,}",
            number(median(taken)),
            number(percentile(taken, 0.99)),
            number(median(taken) / operations * 1e6),
        )
        for count, operations, taken in times
    ]
    head = ("blocks", "operations", "median ms", "p99 ms", "ns per operation")
    return f"plans of {layers} layers from TP 4 to TP 1, {len(times[0][2])} rounds\n{columns(head, lines)}"
