"""Engines with different blocks and layouts under vLLM's real scheduler: two processes, every byte checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_vllm_engines import Pair, prompt

HEAD_MAJOR, TOKEN_MAJOR = "LBHNC", "LBNHC"


@pytest.fixture(
    scope="module",
    params=[
        # Blocks and layouts of the prefill and the decode engine, sliding window, prefix caching of the decode engine.
        (16, 64, HEAD_MAJOR, HEAD_MAJOR, False, True),
        (64, 16, HEAD_MAJOR, TOKEN_MAJOR, True, True),
        (48, 32, TOKEN_MAJOR, HEAD_MAJOR, False, True),
        (16, 64, HEAD_MAJOR, HEAD_MAJOR, True, False),
    ],
    ids=lambda p: f"{p[0]}-to-{p[1]}-{p[2]}-to-{p[3]}{'-window' if p[4] else ''}{'' if p[5] else '-no-prefix-caching'}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    p_block, d_block, p_layout, d_layout, hybrid, caching = request.param
    pair = Pair(
        tmp_path_factory.mktemp("model"),
        "fail",
        hybrid,
        False,
        {"block": p_block, "layout": p_layout},
        {"block": d_block, "layout": d_layout, "prefix_caching": caching},
    )
    yield pair
    pair.close()


@pytest.mark.parametrize("tokens", [5, 64, 103, 500])
def test_hand_over(pair: Pair, tokens: int) -> None:
    name = f"over-{tokens}"
    words = prompt(tokens, tokens)
    answer = pair.decoded(name, words, pair.prefilled(name, words))
    assert answer["reason"] == "length"
    _, d = pair.quiesce()
    assert d["starts"][name][0] == tokens - 1
    assert d["wrong_bytes"][name] == 0


def test_a_prefix_that_is_there_already(pair: Pair) -> None:
    shared = prompt(50, 150)
    for name, words in (("first", [*shared, *prompt(51, 60)]), ("second", [*shared, *prompt(52, 90)])):
        answer = pair.decoded(name, words, pair.prefilled(name, words))
        assert answer["reason"] == "length"
        assert pair.quiesce()[1]["wrong_bytes"][name] == 0


def test_a_window_that_larger_blocks_cut_needs_prefix_caching_off(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The prefill engine has dropped what the first block of the window holds in front of it. A decode engine that gave
    such a block to another request with the same prefix would answer from bytes that were never written."""
    blocks = {"block": 16}, {"block": 64}
    pair = Pair(tmp_path_factory.mktemp("model"), "fail", True, False, *blocks)
    try:
        words = prompt(60, 100)
        answer = pair.decoded("cut", words, pair.prefilled("cut", words))
        assert (answer["reason"], answer["tokens"]) == ("error", [])
        pair.quiesce()
    finally:
        pair.close()
