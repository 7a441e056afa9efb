"""The address map of vLLM's KV-cache tensors, byte by byte.

Every test fills the cache through vLLM's own views with bytes that differ per layer, block, head, token and offset, and
reads it back through the areas' address formula from the raw memory.
"""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvferry.vllm import geometry
from kvferry.vllm.geometry import LayoutError, Split, TokenShare, describe, transfer_groups, transfer_layers
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS = 5
ALONE = Split(tp_rank=0, tp_size=1, kv_heads=lambda layer, spec: 4)
WHOLE = TokenShare()


def attention(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 8, "num_kv_heads": 4, "head_size": 6, "dtype": torch.bfloat16, **changes})


class Cache:
    """A raw buffer with vLLM's views of `layers` layers on it."""

    def __init__(
        self, spec: Any, layout: KVCacheLayout, layers: int = 3, kernel_block: int | None = None, lead: int = 0
    ) -> None:
        strides = compute_layout_strides(spec, BLOCKS, layers, layout, kernel_block)
        ratio = spec.block_size // (kernel_block or spec.block_size)
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
        shape = (layers, *compute_layer_kv_cache_shape_bytes(spec, BLOCKS, kernel_block))
        size = lead + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        page = spec.page_size_bytes
        size = max(size, lead + layers * BLOCKS * page)
        self.raw = torch.zeros(size, dtype=torch.int8)
        tensor = KVCacheTensor(
            size=size, layers=self.names, layer_stride=strides[0], block_stride=strides[1] * ratio, offset=lead
        )
        views = create_kv_cache_views(self.raw, spec, BLOCKS, layout, tensor, kernel_block)
        self.views = dict(zip(self.names, views, strict=True))
        self.config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(self.names, spec)])

    def describe(self, kernel: str = "FLASH_ATTN", split: Split = ALONE) -> Any:
        layers = transfer_layers(self.config)
        return describe(self.config, layers, self.views, dict.fromkeys(self.names, kernel), split, WHOLE)


def bytes_of(view: torch.Tensor) -> torch.Tensor:
    return view.view(torch.uint8)


def fill(cache: Cache) -> dict[str, np.ndarray]:
    """Writes random bytes through the views; returns what each layer then holds, as (block, head, token, byte)."""
    random = np.random.default_rng(20)
    written = {}
    for name, view in cache.views.items():
        target = bytes_of(view)
        content = random.integers(0, 256, tuple(target.shape), dtype=np.uint8)
        target.copy_(torch.from_numpy(content))
        written[name] = content
    return written


def read(layout: Any, area: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of an area as (block, head, token, byte), and their offsets in the region.

    A token's bytes are its units one after the other.
    """
    axes = [
        (area["num_blocks"], area["block_stride"]),
        (area["heads"], area["head_stride"]),
        (area["pages"], area["page_stride"]),
        (area["tokens"], area["token_stride"]),
        (area["units"], area["unit_stride"]),
        (area["content"], 1),
    ]
    offsets = np.array(area["offset"])
    for count, stride in axes:
        offsets = offsets[..., None] + np.arange(count) * stride
    offsets = offsets.reshape(area["num_blocks"], area["heads"], area["pages"] * area["tokens"], -1)
    region = layout.regions[area["region"]]
    assert offsets.max() < region.nbytes
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.addr))
    return memory[offsets], offsets


def covered_once(layout: Any, cache: Cache) -> None:
    """Every byte of the views belongs to exactly one area, and no other byte to any."""
    counts = np.zeros(cache.raw.nbytes, dtype=np.int64)
    for area in layout.geometry["areas"]:
        np.add.at(counts, read(layout, area)[1].ravel(), 1)
    expected = np.zeros_like(counts)
    for view in cache.views.values():
        view8 = bytes_of(view)
        start = view8.data_ptr() - cache.raw.data_ptr()
        index = np.zeros(tuple(view8.shape), dtype=np.int64)
        for axis, (size, stride) in enumerate(zip(view8.shape, view8.stride(), strict=True)):
            index += (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(4)])
        expected[start + index] += 1
    assert (counts == expected).all()


@pytest.mark.parametrize("lead", [0, 4096])
@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_every_layout_of_vllm(layout: KVCacheLayout, lead: int) -> None:
    cache = Cache(attention(), layout, lead=lead)
    described = cache.describe()
    written = fill(cache)
    assert len(described.regions) == 1
    assert described.regions[0][:3] == (cache.raw.data_ptr(), cache.raw.nbytes, "host")
    areas = described.geometry["areas"]
    assert [(area["layer"], area["part"]) for area in areas] == [(name, "kv") for name in cache.names]
    for area in areas:
        assert (area["heads"], area["first_head"], area["total_heads"], area["tokens"]) == (4, 0, 4, 8)
        assert (read(described, area)[0] == written[area["layer"]]).all()
    covered_once(described, cache)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_kernel_blocks_smaller_than_blocks(layout: KVCacheLayout) -> None:
    cache = Cache(attention(block_size=24), layout, kernel_block=8)
    described = cache.describe()
    written = fill(cache)
    for area in described.geometry["areas"]:
        assert (area["part"], area["pages"], area["tokens"]) == ("kv", 3, 8)
        # (kernel blocks, heads, tokens, bytes) to (blocks, heads, tokens of the block, bytes).
        rows = written[area["layer"]].reshape(BLOCKS, 3, 4, 8, -1).transpose(0, 2, 1, 3, 4)
        assert (read(described, area)[0] == rows.reshape(BLOCKS, 4, 24, -1)).all()
    covered_once(described, cache)


def test_padded_pages_leave_the_padding_out() -> None:
    spec = attention(page_size_padded=1024)
    cache = Cache(spec, KVCacheLayout.LBHNC)
    described = cache.describe()
    written = fill(cache)
    for area in described.geometry["areas"]:
        assert area["block_stride"] == 1024
        assert (read(described, area)[0] == written[area["layer"]]).all()
    covered_once(described, cache)


def test_latents_are_the_same_on_every_rank() -> None:
    spec = MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=40, dtype=torch.bfloat16, max_tp_shards=1)
    cache = Cache(spec, KVCacheLayout.LBHNC)
    described = cache.describe("FLASHMLA", Split(tp_rank=3, tp_size=4, kv_heads=lambda layer, spec: 128))
    written = fill(cache)
    assert described.geometry["groups"] == [{"kind": "latent", "block_size": 8}]
    for area in described.geometry["areas"]:
        assert (area["part"], area["heads"], area["first_head"], area["total_heads"]) == ("latent", 1, 0, 1)
        assert (read(described, area)[0] == written[area["layer"]]).all()
    covered_once(described, cache)


def test_heads_that_a_backend_mixes_move_with_their_block() -> None:
    # NVFP4: data of all heads, then their scales.
    spec = attention(num_head_slots=8, state_content_bytes=16, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4)
    cache = Cache(spec, KVCacheLayout.LBHNC)
    described = cache.describe("FLASHINFER", Split(tp_rank=1, tp_size=2, kv_heads=lambda layer, spec: 8))
    written = fill(cache)
    for area in described.geometry["areas"]:
        assert (area["part"], area["heads"], area["first_head"], area["total_heads"]) == ("packed", 1, 1, 2)
        assert (area["tokens"], area["units"]) == (1, 1)
        assert (read(described, area)[0].reshape(BLOCKS, -1) == written[area["layer"]].reshape(BLOCKS, -1)).all()
    covered_once(described, cache)


@pytest.mark.parametrize("kernel", ["DEEPSEEK_V32_INDEXER", "", "SOMEBODYS_OWN"])
def test_a_backend_that_is_not_known_moves_whole_blocks(kernel: str) -> None:
    latent = MLAAttentionSpec(block_size=24, num_kv_heads=1, head_size=33, dtype=torch.uint8, max_tp_shards=1)
    cache = Cache(latent, KVCacheLayout.LBHNC, kernel_block=8)
    described = cache.describe(kernel, Split(tp_rank=3, tp_size=4, kv_heads=lambda layer, spec: 128))
    written = fill(cache)
    for area in described.geometry["areas"]:
        assert (area["part"], area["first_head"], area["total_heads"]) == ("packed", 0, 1)
        assert (area["pages"], area["tokens"], area["units"]) == (1, 1, 3)
        assert (read(described, area)[0].reshape(BLOCKS, -1) == written[area["layer"]].reshape(BLOCKS, -1)).all()
    covered_once(described, cache)


def test_a_backend_that_is_not_known_needs_blocks_of_one_run() -> None:
    with pytest.raises(LayoutError, match=r"not one run of bytes per block .* SOMEBODYS_OWN"):
        Cache(attention(), KVCacheLayout.LHBNC).describe("SOMEBODYS_OWN")


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "heads", "firsts", "total"),
    [
        (8, 1, 8, [0], 8),
        (8, 2, 4, [0, 4], 8),
        (2, 8, 1, [0, 0, 0, 0, 1, 1, 1, 1], 2),
        (1, 4, 1, [0, 0, 0, 0], 1),
        # A layer with more heads than the model's figure, and one with fewer.
        (2, 4, 4, [0, 4, 8, 12], 16),
        (8, 4, 1, [0, 1, 2, 3], 4),
        (3, 4, 1, [0, 1, 2, 3], 4),
        (None, 4, 1, [0, 1, 2, 3], 4),
        (None, 4, 2, [0, 2, 4, 6], 8),
        (None, 1, 1, [0], 1),
    ],
)
def test_heads_over_ranks(kv_heads: int | None, tp_size: int, heads: int, firsts: list[int], total: int) -> None:
    for rank, first in enumerate(firsts):
        placed = Split(rank, tp_size, lambda layer, spec: kv_heads).place("a", attention(num_kv_heads=heads), heads)
        # A number of which a rank would not have a single head is not the layer's.
        unknown = heads == 1 and tp_size > 1 and (kv_heads is None or tp_size % kv_heads != 0)
        expected = {"heads": heads, "first_head": first, "total_heads": total, "heads_by_rank": unknown}
        assert placed == expected


def test_groups_in_vllms_order_and_layers_that_share_a_cache_once() -> None:
    window = SlidingWindowSpec(block_size=8, num_kv_heads=4, head_size=6, dtype=torch.bfloat16, sliding_window=20)
    full = Cache(attention(), KVCacheLayout.LBHNC, layers=2)
    groups = [KVCacheGroupSpec([full.names[1]], window), KVCacheGroupSpec([full.names[0]], attention())]
    config = KVCacheConfig(BLOCKS, full.config.kv_cache_tensors, groups)
    layers = transfer_layers(config)
    views = {**full.views, "model.layers.9.self_attn.attn": full.views[full.names[0]]}
    described = describe(config, layers, views, dict.fromkeys(views, "FLASH_ATTN"), ALONE, WHOLE)
    assert described.geometry["groups"] == [
        {"kind": {"sliding_window": {"window": 20}}, "block_size": 8},
        {"kind": "full", "block_size": 8},
    ]
    assert [(a["layer"], a["group"], a["region"]) for a in described.geometry["areas"]] == [
        (full.names[1], 0, 0),
        (full.names[0], 1, 0),
    ]


def test_dealt_tokens_by_group() -> None:
    dealt, whole = attention(block_size=16), attention(block_size=16, dcp_sharded=False)
    groups = [KVCacheGroupSpec(["a"], dealt), KVCacheGroupSpec(["b"], whole)]
    config = KVCacheConfig(BLOCKS, [], groups)
    share = {"token_ranks": 2, "token_rank": 1, "token_interleave": 8}
    assert transfer_groups(config, TokenShare(2, 1, 8)) == [
        {"kind": "full", "block_size": 16, **share},
        {"kind": "full", "block_size": 16},
    ]


def test_pipeline_stages_number_the_groups_alike() -> None:
    # A stage without layers of a group keeps the group's place.
    try:
        from vllm.v1.core.kv_cache_planning import _project_kv_cache_groups_to_worker
    except ImportError:  # vLLM 0.32
        from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker

    window = SlidingWindowSpec(block_size=8, num_kv_heads=4, head_size=6, dtype=torch.bfloat16, sliding_window=20)
    specs = {"0.attn": window, "1.attn": window, "2.attn": attention(), "3.attn": window}
    groups = [KVCacheGroupSpec(["2.attn"], attention()), KVCacheGroupSpec(["0.attn", "1.attn", "3.attn"], window)]
    stages = [
        KVCacheConfig(BLOCKS, [], _project_kv_cache_groups_to_worker(groups, {name: specs[name] for name in names}))
        for names in (["0.attn", "1.attn"], ["2.attn", "3.attn"])
    ]
    assert transfer_groups(stages[0], WHOLE) == transfer_groups(stages[1], WHOLE)
    assert [{name: layer.group for name, layer in transfer_layers(stage).items()} for stage in stages] == [
        {"0.attn": 1, "1.attn": 1},
        {"2.attn": 0, "3.attn": 1},
    ]


def test_each_storage_is_registered_once() -> None:
    first, second = Cache(attention(), KVCacheLayout.LBHNC, layers=2), Cache(attention(), KVCacheLayout.LBHNC, layers=1)
    other = "model.layers.7.self_attn.attn"
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([*first.names, other], attention())])
    views = {**first.views, other: second.views[second.names[0]]}
    described = describe(config, transfer_layers(config), views, dict.fromkeys(views, "FLASH_ATTN"), ALONE, WHOLE)
    assert [region.addr for region in described.regions] == [first.raw.data_ptr(), second.raw.data_ptr()]
    assert [area["region"] for area in described.geometry["areas"]] == [0, 0, 1]


def test_specs_per_layer() -> None:
    wide, narrow = attention(), attention(head_size=3)
    a, b = Cache(wide, KVCacheLayout.LBHNC, layers=1), Cache(narrow, KVCacheLayout.LBHNC, layers=1)
    spec = UniformTypeKVCacheSpecs(block_size=8, kv_cache_specs={"a": wide, "b": narrow})
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["a", "b"], spec)])
    views = {"a": a.views[a.names[0]], "b": b.views[b.names[0]]}
    described = describe(config, transfer_layers(config), views, dict.fromkeys(views, "FLASH_ATTN"), ALONE, WHOLE)
    assert transfer_groups(config, WHOLE) == [{"kind": "full", "block_size": 8}]
    assert [area["content"] for area in described.geometry["areas"]] == [24, 12]


def test_a_layer_without_a_cache_is_named() -> None:
    cache = Cache(attention(), KVCacheLayout.LBHNC)
    del cache.views[cache.names[1]]
    with pytest.raises(LayoutError, match=r"no KV cache for 1 layers, the first is model\.layers\.1"):
        cache.describe()


def test_state_tensors_are_refused_by_name() -> None:
    cache = Cache(attention(), KVCacheLayout.LBHNC)
    cache.views[cache.names[0]] = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.self_attn\.attn is a list, expected one tensor"):
        cache.describe()


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda view: view[:, :, :, ::2], "contiguous content"),
        (lambda view: view[:4], "a multiple of 5 blocks"),
        (lambda view: view[:, :3], "4 heads"),
        (lambda view: view.flatten(2), "expected (a multiple"),
        (lambda view: view[:, :, :4], "1 times 4 tokens per block, expected 8"),
        (lambda view: view.to("meta"), "on device meta, expected cpu or cuda"),
    ],
)
def test_another_shape_is_refused_with_what_was_expected(spoil: Any, expected: str) -> None:
    cache = Cache(attention(), KVCacheLayout.LBHNC)
    cache.views[cache.names[2]] = spoil(cache.views[cache.names[2]])
    with pytest.raises(LayoutError) as caught:
        cache.describe()
    assert cache.names[2] in str(caught.value)
    assert expected in str(caught.value)


def test_a_device_that_the_library_has_no_path_to_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for ROCm calls its devices cuda; there is none here."""
    cache: Any = SimpleNamespace(device=torch.device("cuda", 1), get_device=lambda: 1)
    storage: Any = SimpleNamespace(data_ptr=lambda: 4096, nbytes=lambda: 64)
    assert geometry._region("a", cache, storage) == (4096, 64, "cuda", 1)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(LayoutError, match=r"of a is on device cuda:1 of ROCm, .* set kv_buffer_device to cpu"):
        geometry._region("a", cache, storage)
    monkeypatch.setattr(torch.version, "hip", None)
    cache.device = torch.device("xpu", 0)
    with pytest.raises(LayoutError, match="of a is on device xpu:0, expected cpu or cuda: set kv_buffer_device to cpu"):
        geometry._region("a", cache, storage)


def test_heads_packed_into_fewer_slots_are_refused() -> None:
    spec = attention(num_head_slots=2, state_content_bytes=4 * 12)
    with pytest.raises(LayoutError, match=r"ROCM_ATTN of .* packs 4 heads into 2 slots"):
        Cache(spec, KVCacheLayout.LBHNC).describe("ROCM_ATTN")


def test_the_cpu_backend_needs_contiguous_blocks() -> None:
    with pytest.raises(LayoutError, match="not contiguous inside a block"):
        Cache(attention(), KVCacheLayout.LBNHC).describe("CPU_ATTN/vec")


def test_metadata_does_not_grow_with_blocks() -> None:
    small, large = attention(), attention()
    assert math.prod(compute_layer_kv_cache_shape_bytes(small, 1)) > 0
    few = Cache(small, KVCacheLayout.LBHNC).describe().geometry
    config = KVCacheConfig(10 * BLOCKS, [], [KVCacheGroupSpec(["x"], large)])
    view = torch.zeros(10 * BLOCKS, 4, 8, 12, dtype=torch.bfloat16)
    many = describe(config, transfer_layers(config), {"x": view}, {"x": "FLASH_ATTN"}, ALONE, WHOLE).geometry
    assert len(many["areas"]) == 1
    assert many["areas"][0].keys() == few["areas"][0].keys()
