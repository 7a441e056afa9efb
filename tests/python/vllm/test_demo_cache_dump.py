"""The demo's normal form of a KV cache, against vLLM's own CPU kernels that write it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab.probes.cache_dump import normalise
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

HEADS = 3
HEAD_SIZE = 32
BLOCKS = 9
TOKENS = 150


def written_by_vllm(keys: torch.Tensor, values: torch.Tensor, block_size: int, blocks: list[int]) -> torch.Tensor:
    """A cache of vLLM's shape (block, head, token, content) into which its kernel wrote keys and values."""
    cache = torch.zeros(BLOCKS, HEADS, block_size, 2 * HEAD_SIZE)
    key_cache, value_cache = cache.view(BLOCKS, HEADS, 2 * block_size, HEAD_SIZE).chunk(2, dim=2)
    slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(len(keys))])
    isa = _get_attn_isa(torch.float32, block_size, HEAD_SIZE)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    return cache


@pytest.mark.parametrize(("block_size", "blocks"), [(32, [8, 3, 5, 1, 7]), (64, [4, 2, 6]), (128, [3, 1])])
def test_attention_on_cpu_at_any_block_size(block_size: int, blocks: list[int]) -> None:
    random = torch.Generator().manual_seed(5)
    keys = torch.randn(TOKENS, HEADS, HEAD_SIZE, generator=random)
    values = torch.randn(TOKENS, HEADS, HEAD_SIZE, generator=random)
    cache = written_by_vllm(keys, values, block_size, blocks)

    positions, raw = normalise(cache, BLOCKS, blocks, TOKENS, "CPU_ATTN")

    expected = torch.cat([keys, values], dim=2).permute(1, 0, 2).contiguous()
    assert np.array_equal(positions, np.arange(TOKENS))
    assert np.array_equal(raw, expected.view(torch.uint8).numpy())


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_latents_also_where_a_block_is_several_of_the_kernels(parts: int) -> None:
    block_size, width = 16, 10
    blocks = [5, 2, 7]
    cache = torch.zeros(BLOCKS * parts, 1, block_size // parts, width)
    tokens = torch.arange(40 * width, dtype=torch.float32).reshape(40, width) + 1
    flat = cache.view(-1, width)
    for i, token in enumerate(tokens):
        flat[blocks[i // block_size] * block_size + i % block_size] = token

    positions, raw = normalise(cache, BLOCKS, blocks, 40, "CPU_MLA")

    assert np.array_equal(positions, np.arange(40))
    assert np.array_equal(raw[0], tokens.view(torch.uint8).numpy())


def test_positions_without_a_block_are_left_out() -> None:
    cache = torch.arange(BLOCKS * 4, dtype=torch.float32).reshape(BLOCKS, 1, 4, 1)
    positions, raw = normalise(cache, BLOCKS, [0, 0, 3, 6], 15, "CPU_MLA")
    assert positions.tolist() == [8, 9, 10, 11, 12, 13, 14]
    assert raw.reshape(-1).view(np.float32).tolist() == [12, 13, 14, 15, 24, 25, 26]
    positions, raw = normalise(cache, BLOCKS, [0, 0], 8, "CPU_MLA")
    assert (positions.size, raw.shape) == (0, (1, 0, 4))
