"""Describes the parts of a layer's recurrent state, and their split over tensor-parallel ranks.

Where a layer keeps a state, a block is one state and not a run of tokens: the layer's states behind each other, in the
order of the spec's shapes (`MambaBase.bind_kv_cache`). Mamba2 and gated delta nets have two, a convolution's last
inputs and the recurrent one; a short convolution has the former alone.

A rank holds some channels of a convolution's inputs, and with several projections some of each, one after the other:
x, B and C of Mamba2, queries, keys and values of a gated delta net. So each projection is a part of its own, whose
heads are channels; unequal tensor-parallel sizes then need no special case. The order of channels and inputs in memory
is vLLM's `VLLM_SSM_CONV_STATE_LAYOUT`, and may differ between two engines. Behind the inputs that a convolution needs
are some for speculative tokens, in use during a step only: they stay behind.

A state of any other kind moves whole, between equal tensor-parallel sizes.

The kernel decides how a head of a recurrent state looks inside: on a CPU a gated delta net keeps keys by values, on a
GPU values by keys. So the format of a state names the release and the kind of device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from .interior import RELEASE, LayoutError

GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
"""Keys of Mamba2 models for the number of groups that share B and C."""


@dataclass(frozen=True)
class StatePart:
    """A part of a layer's state, as the axes of a kvferry area.

    Attributes:
        name: Its name.
        offset: Its first byte in a block.
        heads: Pieces on this rank: channels, or heads of a recurrent state.
        shards: Distinct pieces into which it is split over the ranks; None if unknown.
        axes: As `interior.CachePart.axes`.
        format: The meaning of its bytes.
    """

    name: str
    offset: int
    heads: int
    shards: int | None
    axes: dict[str, int]
    format: str


def state_parts(name: str, spec: Any, tp_size: int, model_config: Any, device: str) -> Iterator[StatePart]:
    """Yields the parts of the state of layer `name`.

    Args:
        name: vLLM's name of the layer, for errors.
        spec: Its `MambaSpec`.
        tp_size: Ranks over which the state is split.
        model_config: vLLM's `ModelConfig`, which knows how many groups a Mamba2 model has.
        device: The kind of device that it is on, such as `cuda`.

    Raises `LayoutError` that names the layer and what was expected.
    """
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type)).lower()
    ranks = 1 if spec.tp_replicated else tp_size
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    offsets = list(accumulate(sizes, initial=0))
    formats = [f"{kind} {str(dtype).removeprefix('torch.')} on {device}, vLLM {RELEASE}" for dtype in spec.dtypes]
    projections = _projections(kind, spec, ranks, model_config)
    if projections is None:
        types = " ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        stated = f"{kind} {types} on {device}, vLLM {RELEASE}"
        yield StatePart("state", 0, 1, 1 if ranks == 1 else None, _run(offsets[-1]), stated)
        return
    yield from _convolution(name, kind, spec, projections, formats[0])
    if len(spec.shapes) > 1:
        heads = spec.shapes[1][0]
        yield StatePart("recurrent", offsets[1], heads, ranks, _run(sizes[1] // heads), formats[1])


def _convolution(
    name: str, kind: str, spec: Any, projections: Mapping[str, tuple[int, int | None]], stated: str
) -> Iterator[StatePart]:
    item = spec.dtypes[0].itemsize
    channels, inputs = spec.shapes[0] if is_conv_state_dim_first() else reversed(spec.shapes[0])
    channel, step = (inputs * item, item) if is_conv_state_dim_first() else (item, channels * item)
    # Mamba's keeps no more for speculative tokens (`MambaStateShapeCalculator`).
    speculative = 0 if kind == "mamba1" else spec.num_speculative_blocks
    kept = inputs - speculative
    if sum(own for own, _ in projections.values()) != channels or kept < 1:
        raise LayoutError(
            f"the convolution state of {name} has {channels} channels of {inputs} inputs, "
            f"{speculative} of them for speculative tokens, expected {dict(projections)} channels"
        )
    starts = accumulate((own for own, _ in projections.values()), initial=0)
    for (part, (own, shards)), (start, _) in zip(projections.items(), pairwise(starts), strict=True):
        axes = {
            "head_stride": channel,
            "pages": 1,
            "page_stride": 0,
            "tokens": kept,
            "token_stride": step,
            "units": 1,
            "unit_stride": 0,
            "content": item,
        }
        yield StatePart(part, start * channel, own, shards, axes, stated)


def _projections(kind: str, spec: Any, ranks: int, model_config: Any) -> dict[str, tuple[int, int | None]] | None:
    """Returns this rank's channels by projection, each with the number of shards; None for an unknown kind of state."""
    channels = spec.shapes[0][0 if is_conv_state_dim_first() else -1]
    shapes = [len(shape) for shape in spec.shapes]
    if kind == "short_conv" and shapes == [2]:
        return {"conv": (channels, ranks)}
    if kind == "mamba1" and shapes == [2, 2] and spec.shapes[1][0] == channels:
        return {"conv": (channels, ranks)}
    if kind == "mamba2" and shapes == [2, 3]:
        heads, width, size = spec.shapes[1]
        shared = (channels - heads * width) // 2
        shards = _group_shards(shared // size, ranks, model_config)
        return {"conv_x": (heads * width, ranks), "conv_b": (shared, shards), "conv_c": (shared, shards)}
    if kind == "gdn_attn" and shapes == [2, 3]:
        values = spec.shapes[1][0] * spec.shapes[1][1]
        keys = (channels - values) // 2
        return {"conv_q": (keys, ranks), "conv_k": (keys, ranks), "conv_v": (values, ranks)}
    return None


def _group_shards(groups: int, ranks: int, model_config: Any) -> int | None:
    """Returns the number of pieces of B and C, of which a rank holds `groups` groups. A model's only group is on every
    rank; where there are more, as many ranks share them out as divide their number (`MambaMixer2`)."""
    if groups != 1 or ranks == 1:
        return ranks
    stated = {value for key in GROUPS if isinstance(value := getattr(model_config.hf_text_config, key, None), int)}
    return {1: 1, ranks: ranks}.get(stated.pop()) if len(stated) == 1 else None


def _run(content: int) -> dict[str, int]:
    return {
        "head_stride": content,
        "pages": 1,
        "page_stride": 0,
        "tokens": 1,
        "token_stride": content,
        "units": 1,
        "unit_stride": 0,
        "content": content,
    }
