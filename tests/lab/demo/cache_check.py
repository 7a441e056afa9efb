"""Compares the KV cache that arrived at the decode engine with the prefill engine's, byte for byte.

It reads the files that the engines' workers wrote (`cache_dump.py`): one per request and rank, in a form that does not
depend on block size, ranks and layout.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Names the folder to the engines' workers.
DUMP_FOLDER = "KVFERRY_DEMO_DUMP"
# A prefill's cache is written in the engine step after its answer.
_FILES_LIMIT_S = 60.0


@dataclass(frozen=True)
class CacheCheck:
    """What came of one request's comparison."""

    compared: int = 0
    differing: int = 0
    # Why it could not be (wholly) made.
    problem: str | None = None

    @property
    def equal(self) -> bool:
        """Whether all that had to arrive is there and is right."""
        return self.problem is None and self.compared > 0 and self.differing == 0


@dataclass(frozen=True)
class Held:
    """One layer's cache on one rank: bytes of the shape (heads, positions, bytes of one head and token)."""

    positions: np.ndarray
    cache: np.ndarray
    first_head: int
    window: int | None
    block_size: int


@dataclass(frozen=True)
class RankCache:
    """What one rank wrote for one request."""

    first: int
    tokens: int
    layers: Mapping[str, Held]


def read_rank(path: Path) -> RankCache:
    """One file."""
    with np.load(path) as file:
        facts: dict[str, Any] = json.loads(str(file["facts"]))
        layers = {
            name: Held(
                file[f"positions/{name}"], file[f"cache/{name}"], fact["first_head"], fact["window"], fact["block_size"]
            )
            for name, fact in facts["layers"].items()
        }
    return RankCache(facts["first"], facts["tokens"], layers)


def find_request(folder: Path, name: str) -> Path | None:
    """The folder of the prompt `name`: vLLM's request id is the given one between a prefix, an index and a suffix."""
    return next(iter(sorted(folder.glob(f"cmpl-{name}-*"))), None)


async def read_request(folder: Path, name: str, ranks: int) -> list[RankCache] | None:
    """All ranks' files of a prompt; waits for them, and gives None where they do not come."""
    deadline = time.monotonic() + _FILES_LIMIT_S
    while True:
        request = find_request(folder, name)
        files = sorted(request.glob("[0-9]*.npz")) if request is not None else []
        if len(files) >= ranks:
            return [read_rank(file) for file in files]
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(0.2)


def compare(sent: Iterable[RankCache], received: Iterable[RankCache]) -> CacheCheck:
    """Compares every head of every layer at every position that had to be transferred, on each receiving rank.

    With a sliding window these are the positions that the next token looks at, otherwise all that the decode engine did
    not have itself. Where several sending ranks hold the same head (MLA, more ranks than heads), each has to agree.
    """
    source: dict[tuple[str, int], list[tuple[Held, np.ndarray]]] = {}
    for rank in sent:
        for name, held in rank.layers.items():
            for row, cache in enumerate(held.cache):
                source.setdefault((name, held.first_head + row), []).append((held, cache))
    compared = differing = 0
    blank = True
    seen = set()
    for rank in received:
        for name, held in rank.layers.items():
            lowest = rank.first
            if held.window is not None:
                lowest = max(lowest, rank.tokens - held.window + 1)
            wanted = np.arange(lowest, rank.tokens)
            for row, cache in enumerate(held.cache):
                head = held.first_head + row
                seen.add((name, head))
                here = _at(held.positions, cache, wanted)
                if here is None:
                    return CacheCheck(compared, differing, f"{name} head {head}: positions are missing at the receiver")
                blank = blank and not here.any()
                for other, theirs in source.get((name, head), ()):
                    there = _at(other.positions, theirs, wanted)
                    if there is None or there.shape != here.shape:
                        return CacheCheck(compared, differing, f"{name} head {head}: the sender holds something else")
                    compared += here.size
                    differing += int(np.count_nonzero(here != there))
    if seen != set(source):
        missing = ", ".join(f"{name} head {head}" for name, head in sorted(seen ^ set(source))[:3])
        return CacheCheck(compared, differing, f"only one side holds {missing}")
    if blank:
        return CacheCheck(compared, differing, "every byte is zero, which proves nothing")
    return CacheCheck(compared, differing)


def _at(positions: np.ndarray, cache: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """The bytes at the positions `wanted`, None where one is missing; positions ascend."""
    if not wanted.size:
        return cache[:0]
    if not positions.size:
        return None
    place = np.searchsorted(positions, wanted).clip(max=len(positions) - 1)
    return cache[place] if np.array_equal(positions[place], wanted) else None


async def check_prompt(folder: Path, sent_name: str, received_name: str, prefill: int, decode: int) -> CacheCheck:
    """Compares what the prompt `received_name` got with what `sent_name` left.

    `prefill` and `decode` are how many ranks the engines have.
    """
    sent = await read_request(folder / "sent", sent_name, prefill)
    if sent is None:
        return CacheCheck(problem="not all ranks of the prefill engine wrote their cache")
    received = await read_request(folder / "received", received_name, decode)
    if received is None:
        return CacheCheck(problem="not all ranks of the decode engine wrote what they received")
    return compare(sent, received)


def block_sizes(folder: Path, side: str) -> str:
    """The block sizes that an engine really had, which may not be those that were asked for."""
    for file in sorted((folder / side).glob("*/[0-9]*.npz")):
        return ", ".join(str(size) for size in sorted({held.block_size for held in read_rank(file).layers.values()}))
    return "unknown"
