"""The demo's comparison of cache bytes: it must find what is wrong and accept what is right, for any split."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab.demo import cache_check
from lab.demo.cache_check import CacheCheck, Held, RankCache, block_sizes, check_prompt, compare

TOKENS = 20
WIDTH = 6
HEADS = 4
LAYERS = ("layer.0", "layer.1")


def content(layer: str, head: int, positions: np.ndarray) -> np.ndarray:
    """Bytes that differ per layer, head, position and offset; none is zero."""
    seed = LAYERS.index(layer) * HEADS + head
    return ((positions[:, None] * 31 + np.arange(WIDTH) * 7 + seed * 13) % 255 + 1).astype(np.uint8)


def rank(
    heads: Iterable[int], layers: Iterable[str] = LAYERS, first: int = 0, low: int = 0, window: int | None = None
) -> RankCache:
    """A rank that holds these heads of these layers from position `low` on."""
    rows = list(heads)
    positions = np.arange(low, TOKENS)
    return RankCache(
        first,
        TOKENS,
        {
            name: Held(positions, np.stack([content(name, head, positions) for head in rows]), rows[0], window, 4)
            for name in layers
        },
    )


def changed(source: RankCache, layer: str, row: int, index: int) -> RankCache:
    """The same with one byte changed, at the index-th position that is held."""
    held = source.layers[layer]
    cache = held.cache.copy()
    cache[row, index, WIDTH - 1] ^= 1
    return replace(source, layers={**source.layers, layer: replace(held, cache=cache)})


def test_equal_over_other_ranks_and_layers() -> None:
    sent = [rank((0, 1), LAYERS[:1]), rank((2, 3), LAYERS[:1]), rank((0, 1), LAYERS[1:]), rank((2, 3), LAYERS[1:])]
    found = compare(sent, [rank(range(HEADS))])
    assert found == CacheCheck(len(LAYERS) * HEADS * TOKENS * WIDTH, 0)
    assert found.equal


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("row", range(HEADS))
@pytest.mark.parametrize("index", [0, 7, TOKENS - 1])
def test_one_byte_is_found(layer: str, row: int, index: int) -> None:
    found = compare([rank((0, 1)), rank((2, 3))], [changed(rank(range(HEADS)), layer, row, index)])
    assert found.differing == 1
    assert not found.equal


def test_what_the_receiver_had_itself_is_left_out() -> None:
    received = changed(rank(range(HEADS), first=8), LAYERS[0], 0, 7)
    found = compare([rank(range(HEADS))], [received])
    assert found == CacheCheck(len(LAYERS) * HEADS * (TOKENS - 8) * WIDTH, 0)
    assert compare([rank(range(HEADS))], [changed(received, LAYERS[0], 0, 8)]).differing == 1


def test_a_window_needs_its_tail_and_nothing_before() -> None:
    # The next token, at position 20, looks at the 4 before it: 17, 18 and 19 and itself.
    wanted = LAYERS[:1]
    sent, received = rank((0,), wanted, low=16), rank((0,), wanted, low=17, window=4)
    assert compare([sent], [received]) == CacheCheck(3 * WIDTH, 0)
    assert "missing at the receiver" in str(compare([sent], [rank((0,), wanted, low=18, window=4)]).problem)
    assert "sender" in str(compare([rank((0,), wanted, low=18)], [received]).problem)


def test_every_copy_has_to_agree() -> None:
    copy = rank((0,))
    assert compare([copy, copy], [copy, copy]).compared == 4 * len(LAYERS) * TOKENS * WIDTH
    assert compare([copy, changed(copy, LAYERS[0], 0, 3)], [copy]).differing == 1
    assert compare([copy], [copy, changed(copy, LAYERS[0], 0, 3)]).differing == 1


def test_what_is_missing_is_told() -> None:
    whole = rank(range(HEADS))
    assert "layer.1 head 0" in str(compare([whole], [rank(range(HEADS), LAYERS[:1])]).problem)
    assert "layer.0 head 3" in str(compare([rank((0, 1, 2))], [whole]).problem)
    assert not compare([], []).equal
    blank = RankCache(
        0, TOKENS, {"layer.0": Held(np.arange(TOKENS), np.zeros((1, TOKENS, WIDTH), np.uint8), 0, None, 4)}
    )
    assert "zero" in str(compare([blank], [blank]).problem)


def write(folder: Path, name: str, cache: RankCache) -> None:
    """A rank's file, as `cache_dump.py` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = {
        layer: {"first_head": held.first_head, "window": held.window, "block_size": held.block_size}
        for layer, held in cache.layers.items()
    }
    arrays = {f"positions/{layer}": held.positions for layer, held in cache.layers.items()}
    arrays |= {f"cache/{layer}": held.cache for layer, held in cache.layers.items()}
    facts = json.dumps({"first": cache.first, "tokens": cache.tokens, "layers": layers})
    np.savez(folder / name, facts=np.array(facts), **arrays)


def test_files_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_check, "_FILES_LIMIT_S", 0.0)
    write(tmp_path / "sent" / "cmpl-p01-0-aaaa", "0-0.npz", rank((0, 1)))
    write(tmp_path / "received" / "cmpl-p01-0-bbbb", "0-0.npz", rank(range(HEADS)))
    missing = asyncio.run(check_prompt(tmp_path, "p01", "p01", 2, 1))
    assert "prefill" in str(missing.problem)
    write(tmp_path / "sent" / "cmpl-p01-0-aaaa", "0-1.npz", rank((2, 3)))
    assert asyncio.run(check_prompt(tmp_path, "p01", "p01", 2, 1)).equal
    # p1 is no prompt's name here, and p01 not that of p011.
    assert "prefill" in str(asyncio.run(check_prompt(tmp_path, "p1", "p01", 2, 1)).problem)
    assert "decode" in str(asyncio.run(check_prompt(tmp_path, "p01", "p02", 2, 1)).problem)
    assert block_sizes(tmp_path, "sent") == "4"
