"""What vLLM's CPU backends keep where inside a block.

Written through their own cache-write operations, read back through the areas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kvferry.vllm.interior import CPU_TOKENWISE, TOKENWISE, family
from test_vllm_geometry import BLOCKS, Cache, attention, covered_once, read
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

if not current_platform.is_cpu():
    pytest.skip("vLLM's CPU kernels are in its CPU build only", allow_module_level=True)

HEADS, SIZE = 2, 32


def write(cache: Cache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, isa: str, dtype: str = "auto") -> None:
    """Writes K and V, each (token, head, element), to the first layer as vLLM's CPU backend does."""
    from vllm import _custom_ops as ops

    current_platform.import_kernels()
    view = cache.views[cache.names[0]]
    halves = view.view(view.shape[0], HEADS, 2 * view.shape[2], SIZE).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=dtype)


def values(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `tokens` tokens, each value exact in the dtypes that are used here (e4m3 too)."""
    random = np.random.default_rng(7)
    return tuple(
        torch.from_numpy(random.choice([-1, 1], (tokens, HEADS, SIZE)) * random.integers(8, 16, (tokens, HEADS, SIZE)))
        .mul(0.125)
        .to(dtype)
        for _ in range(2)
    )


def rows(values: torch.Tensor) -> np.ndarray:
    """(token, head, element) as (head, token, byte)."""
    return values.transpose(0, 1).contiguous().view(torch.uint8).numpy().reshape(HEADS, values.shape[0], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("isa", "block", "kernel_block"),
    [("vec", 32, 32), ("vec", 64, 64), ("vec", 96, 32), ("vec16", 16, 16), ("vec16", 48, 48), ("vec16", 48, 16)],
)
def test_tokens_of_the_cpu_backend(isa: str, block: int, kernel_block: int, dtype: torch.dtype) -> None:
    spec = attention(block_size=block, num_kv_heads=HEADS, head_size=SIZE, dtype=dtype)
    cache = Cache(spec, KVCacheLayout.LBHNC, layers=1, kernel_block=kernel_block)
    described = cache.describe(f"CPU_ATTN/{isa}")
    covered_once(described, cache)
    # From the middle of block 1 to the middle of block 3; block 2 lies last, so that blocks are told apart.
    table, first, end = {1: 1, 2: BLOCKS - 1, 3: 2}, block + 5, 3 * block + 7
    k, v = values(end - first, dtype)
    slots = torch.tensor([table[at // block] * block + at % block for at in range(first, end)])
    write(cache, k, v, slots, isa)
    for area in described.geometry["areas"]:
        found = read(described, area)[0]
        expected = np.zeros_like(found)
        source = rows({"k": k, "v": v}[area["part"]])
        for index, at in enumerate(range(first, end)):
            expected[table[at // block], :, at % block] = source[:, index]
        assert (found == expected).all()
        assert area["pages"] * area["tokens"] == block


def test_tokens_of_the_cpu_backend_with_fp8() -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's FP8 cache on CPU needs AVX-512")
    block = 64
    spec = attention(block_size=block, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.uint8)
    cache = Cache(spec, KVCacheLayout.LBHNC, layers=1)
    k, v = values(block, torch.bfloat16)
    write(cache, k, v, torch.arange(block) + 3 * block, "vec", "fp8_e4m3")
    described = cache.describe("CPU_ATTN/vec")
    for area in described.geometry["areas"]:
        found = read(described, area)[0]
        assert (found[3] == rows({"k": k, "v": v}[area["part"]].to(torch.float8_e4m3fn))).all()
        assert not np.delete(found, 3, axis=0).any()
    covered_once(described, cache)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_halves_whose_order_is_not_known(isa: str) -> None:
    """Stated as tiles, each head's half holds that head's values, whatever their order."""
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    block = 64
    spec = attention(block_size=block, num_kv_heads=HEADS, head_size=SIZE)
    cache = Cache(spec, KVCacheLayout.LBHNC, layers=1)
    k, v = values(block, torch.bfloat16)
    write(cache, k, v, torch.arange(block) + 3 * block, isa)
    described = cache.describe("CPU_ATTN/amx")
    for area in described.geometry["areas"]:
        assert (area["heads"], area["tokens"], area["units"]) == (HEADS, 1, 1)
        found = read(described, area)[0]
        for head in range(HEADS):
            expected = {"k": k, "v": v}[area["part"]][:, head].contiguous().view(torch.int16).numpy().ravel()
            assert (np.sort(found[3, head].reshape(-1).view(np.int16)) == np.sort(expected)).all()
        assert not np.delete(found, 3, axis=0).any()
    covered_once(described, cache)


def test_latents_of_the_cpu_backend() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    assert CPUMLABackend.get_name() in TOKENWISE
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=SIZE + 8, dtype=torch.bfloat16, max_tp_shards=1)
    cache = Cache(spec, KVCacheLayout.LBHNC, layers=1)
    latent, rope = (torch.randn(20, size, dtype=torch.bfloat16) for size in (SIZE, 8))
    slots = torch.tensor([3 * 16 + at if at < 9 else 16 + at - 9 for at in range(20)])
    view = cache.views[cache.names[0]].squeeze(1)
    impl: Any = CPUMLAImpl.__new__(CPUMLAImpl)
    impl.do_kv_cache_update(latent, rope.unsqueeze(1), view, slots, "auto", torch.ones(1))
    described = cache.describe("CPU_MLA")
    found = read(described, described.geometry["areas"][0])[0]
    expected = np.zeros_like(found)
    source = torch.cat([latent, rope], dim=1).view(torch.uint8).numpy()
    for row, slot in zip(source, slots.tolist(), strict=True):
        expected[slot // 16, 0, slot % 16] = row
    assert (found == expected).all()


def test_which_instruction_set_vllm_takes() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    if current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        pytest.skip("the instruction sets checked here are those of x86")
    # Blocks that 32 does not divide get another name, but the same order, so that the two fit each other.
    chosen = {_get_attn_isa(torch.float32, block, 128) for block in (16, 32, 48, 64)}
    kernels = {f"{CPUAttentionBackend.get_name()}/{isa}" for isa in chosen}
    assert kernels == CPU_TOKENWISE
    assert {family(kernel) for kernel in kernels} == {"CPU_ATTN"}
    assert family("CPU_ATTN/amx") == "CPU_ATTN/amx"
