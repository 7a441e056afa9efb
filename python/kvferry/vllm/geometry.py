"""Turns vLLM's KV-cache tensors into the address map that kvferry transfers by.

Since 0.32 vLLM gives each layer a view with the logical axes (block, head, token, content), whatever the physical
order (the layout's name, such as LBHNC, is the physical order of layer, block, head, token, content). So shape and
strides say where everything is, except inside the content, which `interior` describes.

When a kernel's blocks are smaller than the blocks that the scheduler counts, a block is a row of kernel blocks, each
with all of its heads: the areas' pages.

A layer with a recurrent state has one state per block; `states` describes its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from .interior import LayoutError, View, format_of, parts
from .states import state_parts

__all__ = ["Layer", "Layout", "LayoutError", "Region", "Split", "TokenShare", "describe", "transfer_groups"]

Area = dict[str, Any]


class Region(NamedTuple):
    """One stretch of memory to register."""

    addr: int
    nbytes: int
    kind: Literal["host", "cuda"]
    device: int


@dataclass(frozen=True)
class Split:
    """The split of KV heads over the tensor-parallel ranks.

    Attributes:
        tp_rank: This rank.
        tp_size: Ranks in all.
        kv_heads: KV heads of a layer over all ranks by its name and spec, None if unknown: see `heads.KvHeads`.
        model_config: vLLM's `ModelConfig`, for layers with a state.
    """

    tp_rank: int
    tp_size: int
    kv_heads: Callable[[str, Any], int | None]
    model_config: Any = None

    def shards(self, name: str, spec: Any) -> tuple[int, bool]:
        """Returns the number of distinct pieces of layer `name` over all ranks, and whether it is known.

        Only a rank with a single head can share it with others, so only then the number over all ranks matters. Where
        it is unknown, or would give a rank more than a head, each rank counts as a piece.
        """
        if spec.max_tp_shards is not None:
            return min(self.tp_size, spec.max_tp_shards), True
        if spec.num_kv_heads > 1 or self.tp_size == 1:
            return self.tp_size, True
        total = self.kv_heads(name, spec)
        return (total, True) if total and self.tp_size % total == 0 else (self.tp_size, False)

    def place(self, name: str, spec: Any, heads: int) -> dict[str, Any]:
        """Places `heads` heads of this rank among all of layer `name`, as the axes of an area.

        With fewer shards than ranks, neighbouring ranks hold copies: of 8 ranks and 2 heads, ranks 0 to 3 hold head 0.
        """
        shards, known = self.shards(name, spec)
        return self.among(heads, shards if known else None)

    def among(self, heads: int, shards: int | None) -> dict[str, Any]:
        """Places heads as `place` does, for `shards` distinct pieces; with None, each rank counts as one."""
        pieces = self.tp_size if shards is None else shards
        return {
            "heads": heads,
            "first_head": self.tp_rank * pieces // self.tp_size * heads,
            "total_heads": heads * pieces,
            "heads_by_rank": shards is None,
        }


@dataclass(frozen=True)
class TokenShare:
    """A rank's share of the tokens in a decode context parallel group.

    Attributes:
        ranks: Ranks in the group; 1 without decode context parallelism.
        rank: This one.
        interleave: Consecutive tokens that go to the same rank.
    """

    ranks: int = 1
    rank: int = 0
    interleave: int = 1


@dataclass(frozen=True)
class Layout:
    """The regions that a worker registers, and the geometry that it states."""

    regions: list[Region]
    geometry: dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """A layer's group and spec, taken from the KV-cache config when the connector is made."""

    group: int
    spec: Any


def transfer_layers(kv_cache_config: Any) -> dict[str, Layer]:
    """Returns the layers whose cache is transferred. Layers that share another's cache are not among them."""
    layers = {}
    for index, group in enumerate(kv_cache_config.transfer_groups):
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            layers[name] = Layer(index, per_layer.get(name, group.kv_cache_spec))
    return layers


def transfer_groups(kv_cache_config: Any, share: TokenShare) -> list[dict[str, Any]]:
    """Returns the KV-cache groups that are transferred, in vLLM's order, as kvferry states them.

    With decode context parallelism vLLM deals out the tokens of the groups that it marks as such; the others are whole
    on every rank. The order of tokens in a block is that of vLLM's `_compute_slot_mappings_kernel`.
    """
    groups = []
    for group in kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        kind = _kind(spec)
        # A state has no tokens; vLLM's block size says how often one is kept.
        stated = {"kind": kind, "block_size": 1 if kind == "state" else spec.block_size}
        if share.ranks > 1 and spec.dcp_sharded:
            stated |= {"token_ranks": share.ranks, "token_rank": share.rank, "token_interleave": share.interleave}
        groups.append(stated)
    return groups


def _kind(group_spec: Any) -> Any:
    specs = list(iter_layer_specs(group_spec))
    if any(isinstance(spec, MambaSpec) for spec in specs):
        return "state"
    reaches = {_reach(spec) for spec in specs}
    if len(reaches) > 1:
        raise LayoutError(f"layers of one KV-cache group look back differently far: {sorted(reaches, key=str)}")
    if reaches and (reach := reaches.pop()) is not None:
        name, tokens = reach
        return {name: {"window" if name == "sliding_window" else "chunk": tokens}}
    return "latent" if specs and all(isinstance(spec, MLAAttentionSpec) for spec in specs) else "full"


def _reach(spec: Any) -> tuple[str, int] | None:
    """Returns how far back a layer attends: a window, or the chunk's length; None for the whole prompt."""
    if isinstance(spec, SlidingWindowSpec):
        return "sliding_window", int(spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked", int(spec.attention_chunk_size)
    return None


def describe(
    kv_cache_config: Any,
    layers: Mapping[str, Layer],
    kv_caches: Mapping[str, torch.Tensor],
    kernels: Mapping[str, str],
    split: Split,
    share: TokenShare,
    device: str | None = None,
) -> Layout:
    """Describes the regions to register and the geometry.

    Args:
        kv_cache_config: vLLM's KV-cache config of this rank.
        layers: From `transfer_layers`.
        kv_caches: vLLM's tensors by layer name, each with the axes (block, head, token, content).
        kernels: Attention backend by layer name, from `support.attention_kernels`.
        split: Heads over ranks.
        share: Tokens over ranks.
        device: The kind of device that computes with the cache, where `kv_caches` are a host buffer for it; None: the
            one that they are on.

    Raises `LayoutError` that names the layer and what was expected.
    """
    missing = sorted(set(layers) - set(kv_caches))
    if missing:
        raise LayoutError(f"vLLM gave no KV cache for {len(missing)} layers, the first is {missing[0]}")
    regions: list[Region] = []
    region_index: dict[int, int] = {}
    areas: list[Area] = []
    for name, layer in layers.items():
        cache = kv_caches[name]
        if not isinstance(cache, torch.Tensor):
            raise LayoutError(f"the KV cache of {name} is a {type(cache).__name__}, expected one tensor")
        storage = cache.untyped_storage()
        if storage.data_ptr() not in region_index:
            region_index[storage.data_ptr()] = len(regions)
            regions.append(_region(name, cache, storage))
        base = {
            "layer": name,
            "group": layer.group,
            "region": region_index[storage.data_ptr()],
            "num_blocks": kv_cache_config.num_blocks,
        }
        start = cache.data_ptr() - storage.data_ptr()
        if isinstance(layer.spec, MambaSpec):
            found = _states(name, layer.spec, cache, start, base["num_blocks"], split, device or cache.device.type)
        else:
            found = _areas(name, layer.spec, cache, start, base["num_blocks"], kernels, split)
        areas.extend(base | area for area in found)
    return Layout(regions, {"groups": transfer_groups(kv_cache_config, share), "areas": areas})


def _region(name: str, cache: torch.Tensor, storage: Any) -> Region:
    if cache.device.type == "cpu":
        return Region(storage.data_ptr(), storage.nbytes(), "host", 0)
    # PyTorch for ROCm calls its devices cuda.
    if cache.device.type == "cuda" and torch.version.hip is None:
        return Region(storage.data_ptr(), storage.nbytes(), "cuda", cache.get_device())
    raise LayoutError(
        f"the KV cache of {name} is on device {cache.device}{' of ROCm' if torch.version.hip else ''}, expected cpu or "
        "cuda: set kv_buffer_device to cpu (within MultiConnector, in the map of this connector)"
    )


def _states(
    name: str, spec: Any, cache: torch.Tensor, start: int, num_blocks: int, split: Split, device: str
) -> Iterable[Area]:
    if cache.ndim != 4 or tuple(cache.shape[:3]) != (num_blocks, 1, 1) or cache.stride(3) != 1:
        raise LayoutError(
            f"the state cache of {name} has shape {tuple(cache.shape)} and strides {cache.stride()}, expected "
            f"({num_blocks} blocks, 1, 1, content) with contiguous content"
        )
    for part in state_parts(name, spec, split.tp_size, split.model_config, device):
        yield {
            "part": part.name,
            "offset": start + part.offset,
            "block_stride": cache.stride(0) * cache.element_size(),
            **split.among(part.heads, part.shards),
            **part.axes,
            "format": part.format,
        }


def _areas(
    name: str,
    spec: Any,
    cache: torch.Tensor,
    start: int,
    num_blocks: int,
    kernels: Mapping[str, str],
    split: Split,
) -> Iterable[Area]:
    itemsize = cache.element_size()
    if cache.ndim != 4 or cache.shape[0] % num_blocks or cache.shape[1] != spec.num_heads or cache.stride(3) != 1:
        raise LayoutError(
            f"the KV cache of {name} has shape {tuple(cache.shape)} and strides {cache.stride()}, expected (a multiple "
            f"of {num_blocks} blocks, {spec.num_heads} heads, tokens, content) with contiguous content"
        )
    pages = cache.shape[0] // num_blocks
    tokens = cache.shape[2]
    if pages * tokens != spec.block_size:
        raise LayoutError(
            f"the KV cache of {name} holds {pages} times {tokens} tokens per block, expected {spec.block_size}"
        )
    page, head, token = (cache.stride(axis) * itemsize for axis in range(3))
    view = View(pages, page, cache.shape[1], head, tokens, token, cache.shape[3] * itemsize, itemsize)
    kernel = kernels.get(name, "")
    for part in parts(name, spec, kernel, view):
        yield {
            "part": part.name,
            "offset": start + part.offset,
            "block_stride": pages * page,
            # Heads that can't be told apart travel as one.
            **split.place(name, spec, 1 if part.heads is None else part.heads),
            **part.axes,
            "format": format_of(spec, kernel, part),
        }
