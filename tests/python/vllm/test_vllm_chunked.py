"""Chunked local attention beside full attention, under vLLM's own manager of such caches, every byte checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mini_config import BLOCK
from test_vllm_engines import Pair, prompt

CHUNKS = {"whole-blocks": 3 * BLOCK, "within-blocks": 2 * BLOCK + BLOCK // 2}
"""Chunks that begin with a block, and others."""


@pytest.fixture(scope="module", params=CHUNKS)
def chunked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, int]]:
    chunk = CHUNKS[request.param]
    pair = Pair(
        tmp_path_factory.mktemp("model"), "fail", True, False, prefill={"chunk": chunk}, decode={"chunk": chunk}
    )
    yield pair, chunk
    pair.close()


@pytest.mark.parametrize("more", [-1, 0, 1, 2, 7])
@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_hand_over(chunked: tuple[Pair, int], chunks: int, more: int) -> None:
    """Prompts that end around the end of a chunk: behind it the next token begins one, and looks at nothing before."""
    pair, chunk = chunked
    tokens = chunks * chunk + more
    name = f"over-{tokens}"
    words = prompt(tokens, tokens)
    answer = pair.decoded(name, words, pair.prefilled(name, words))
    assert (answer["reason"], len(answer["tokens"])) == ("length", 4)
    decode = pair.quiesce()[1]
    assert (decode["starts"][name][0], decode["wrong_bytes"][name]) == (tokens - 1, 0)


def test_a_prefix_that_both_engines_have(chunked: tuple[Pair, int]) -> None:
    pair, chunk = chunked
    first = prompt(900, 3 * chunk + 9)
    for name, words in (("first", first), ("longer", [*first, *prompt(901, 2 * chunk)])):
        answer = pair.decoded(name, words, pair.prefilled(name, words))
        assert answer["reason"] == "length"
        decode = pair.quiesce()[1]
        assert (decode["starts"][name][0], decode["wrong_bytes"][name]) == (len(words) - 1, 0)


@pytest.mark.parametrize(("prefill", "decode"), [(16, 32), (32, 16)])
def test_unequal_blocks(tmp_path_factory: pytest.TempPathFactory, prefill: int, decode: int) -> None:
    """Larger blocks in the decode engine need prefix caching off there, as windows do."""
    chunk = CHUNKS["whole-blocks"]
    pair = Pair(
        tmp_path_factory.mktemp("model"),
        "fail",
        True,
        False,
        prefill={"chunk": chunk, "block": prefill},
        decode={"chunk": chunk, "block": decode, "prefix_caching": decode <= prefill},
    )
    try:
        for tokens in (chunk - 3, 2 * chunk, 2 * chunk + 1, 5 * chunk + 30):
            name = f"over-{tokens}"
            words = prompt(tokens, tokens)
            assert pair.decoded(name, words, pair.prefilled(name, words))["reason"] == "length"
            state = pair.quiesce()[1]
            assert (state["starts"][name][0], state["wrong_bytes"][name]) == (tokens - 1, 0)
    finally:
        pair.close()
