"""Checks what this release of the connector serves, and gathers the facts that two engines must share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from . import interior
from .config import multi_turn_refusal
from .log import logger

SERVED_SPECS: tuple[type[KVCacheSpec], ...] = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)
"""Caches that are served, by exact type: a subclass means another rule for which blocks hold what."""


TELLS_OF_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
"""Whether vLLM tells a connector that the KV cache is about to be unmapped, and that it is mapped again."""


class NotServedError(ValueError):
    """The engine is configured in a way that this release does not serve."""


def check_served(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises `NotServedError` for an engine whose cache would be transferred wrongly or not at all."""
    parallel = vllm_config.parallel_config
    pcp = parallel.prefill_context_parallel_size
    if pcp > 1:
        raise NotServedError(f"KvferryConnector does not serve --prefill-context-parallel-size {pcp}: set it to 1")
    if vllm_config.num_prefill_lookahead_tokens > 1:
        raise NotServedError(
            "KvferryConnector does not serve speculative decoding that looks "
            f"{vllm_config.num_prefill_lookahead_tokens} tokens ahead in the prefill (multi-module MTP): the decode "
            "engine would have to recompute the prompt's last tokens. Use a method that looks 1 token ahead, or none"
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not TELLS_OF_SLEEP:
        raise NotServedError(
            f"KvferryConnector does not serve --enable-sleep-mode with vLLM {vllm.__version__}: sleeping unmaps the "
            "registered KV cache, of which vLLM tells a connector from 0.33 on"
        )
    if has_host_buffer(vllm_config) and getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise NotServedError(
            "KvferryConnector does not serve --enable-sleep-mode with kv_buffer_device cpu: a load that has ended "
            "would be copied into unmapped memory. Leave out either"
        )
    for group in kv_cache_config.transfer_groups:
        if group.host_resident:
            raise NotServedError("KvferryConnector does not serve KV-cache groups that live in a host pool (HiSparse)")
        for spec in iter_layer_specs(group.kv_cache_spec):
            _check_spec(spec, group.layer_names)


def has_host_buffer(vllm_config: Any) -> bool:
    """Whether blocks go through a host buffer, because `kv_buffer_device` is `cpu` and the device is another.

    Raises `NotServedError` for a buffer on a third device."""
    device, buffer = vllm_config.device_config.device_type, vllm_config.kv_transfer_config.kv_buffer_device
    if buffer not in (device, "cpu"):
        raise NotServedError(
            f"KvferryConnector does not serve kv_buffer_device {buffer} on device {device}: leave it out to transfer "
            f"from the KV cache itself{'' if device == 'cpu' else ', or set it to cpu for a buffer in host memory'}"
        )
    return bool(buffer != device)


def check_multi_turn(vllm_config: Any, has_state: bool) -> None:
    """Raises `NotServedError` where conversations cannot go on between engines."""
    transfer = vllm_config.kv_transfer_config
    if has_host_buffer(vllm_config):
        raise NotServedError(
            "KvferryConnector does not serve multi_turn (bidirectional_kv_xfer) with kv_buffer_device cpu: a decode "
            "engine's answer has the blocks of a conversation before they are copied to the host. Leave out either"
        )
    if has_state:
        raise NotServedError(
            "KvferryConnector does not serve multi_turn (bidirectional_kv_xfer) with recurrent states: those of a "
            "decode engine may have gone on behind the end of its answer. Leave it out"
        )
    policy = transfer.kv_load_failure_policy
    if (why := multi_turn_refusal(transfer.is_kv_producer, transfer.is_kv_consumer, policy)) is not None:
        raise NotServedError(why)


def writes_late(vllm_config: Any, has_state: bool) -> bool:
    """Whether a finished prefill's answer can be out before all of its cache is where it is read.

    The attention of the model itself comes before the token that it samples. A drafter's comes after it, and so do
    copies of states: on a GPU, the token is on its way to the client while these are still to be computed. To a host
    buffer, blocks are copied with the step that grants the lease."""
    if has_host_buffer(vllm_config):
        return True
    if vllm_config.device_config.device_type == "cpu":
        return False
    speculative = vllm_config.speculative_config
    return has_state or (speculative is not None and bool(speculative.use_eagle()))


def _check_spec(spec: Any, layers: Iterable[str]) -> None:
    where = next(iter(layers), "no layer on this rank")
    if type(spec) not in SERVED_SPECS:
        names = ", ".join(served.__name__ for served in SERVED_SPECS)
        raise NotServedError(
            f"KvferryConnector does not serve caches of kind {type(spec).__name__} (layer {where}); it serves {names}"
        )
    if isinstance(spec, MambaSpec):
        # The engine that wrote the cache knows what is replayed, and from where; the cache does not.
        if len(spec.shapes) > 2:
            raise NotServedError(
                f"KvferryConnector does not serve states that are replayed from recent inputs (layer {where} keeps "
                f"{len(spec.shapes)} tensors): leave out use_replayssm"
            )
        return
    if spec.tokens_per_state != 1:
        raise NotServedError(
            f"KvferryConnector does not serve compressed caches ({spec.tokens_per_state} tokens per state, layer "
            f"{where})"
        )
    if spec.prefix_replay_tokens:
        raise NotServedError(f"KvferryConnector does not serve caches with bounded replay (layer {where})")


def align_interleave(vllm_config: Any, kv_cache_config: Any) -> None:
    """With decode context parallelism, deals tokens to the ranks by whole blocks, as vLLM does for its own connector at
    the same moment (`VllmConfig.adjust_dcp_kv_cache_interleave_size`), unless the user has chosen otherwise: a block's
    tokens are then neighbours in the prompt and travel as one run. Any other interleave works too, token by token."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size <= 1:
        return
    block = min(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
    found = parallel.cp_kv_cache_interleave_size
    if found == block:
        return
    if parallel._allow_auto_resolve_cp_interleave_size:
        parallel.cp_kv_cache_interleave_size = block
        logger.info_once("--cp-kv-cache-interleave-size is raised from %d to the block size, %d", found, block)
    else:
        logger.warning_once(
            "--cp-kv-cache-interleave-size is %d: tokens travel in such runs; leave it out to have blocks of %d",
            found,
            block,
        )


def attention_kernels(vllm_config: Any) -> dict[str, str]:
    """For every attention layer of this rank, who wrote its cache and how: the backend's name, and for the CPU backend
    also the instruction set, because that decides how a block is laid out inside (see `interior`)."""
    layers: Mapping[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    kernels = {}
    for name, layer in layers.items():
        kernel = str(layer.get_attn_backend().get_name())
        isa = getattr(layer, "isa", None)
        kernels[name] = f"{kernel}/{isa}" if kernel == "CPU_ATTN" and isa else kernel
    return kernels


INFORMATIVE = frozenset({"attention", "vllm"})
"""For readers of earlier releases, which compare them. What they stand for is in each layer's axes and format."""


def compat_fields(vllm_config: Any, kernels: Mapping[str, str]) -> list[list[Any]]:
    """The facts that two engines must share, as `[name, value]`; the handshake names the first that differs. A third
    entry, true, is there for those of `INFORMATIVE`.

    Block sizes, strides and the split over ranks are not among them: the geometry states those, and they may differ.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    fields: dict[str, object] = {
        "vllm": interior.RELEASE,
        "model": model.model,
        "model_revision": model.revision,
        "dtype": model.dtype,
        "kv_cache_dtype": cache.cache_dtype,
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "hidden_layers": model.get_total_num_hidden_layers(),
        "attention": ",".join(sorted({interior.family(kernel) for kernel in kernels.values()})),
        "hybrid_kv_cache_manager": not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        **_speculative_fields(vllm_config),
    }
    return [[name, str(value), *([True] if name in INFORMATIVE else [])] for name, value in fields.items()]


def _speculative_fields(vllm_config: Any) -> dict[str, object]:
    # Only drafters that read the target's hidden states keep cache of their own that has to travel.
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return {"speculative": "none"}
    draft = speculative.draft_model_config
    return {
        "speculative": speculative.method,
        "speculative_model": draft.model,
        "speculative_revision": draft.revision,
        "speculative_parallel": speculative.parallel_drafting,
        "speculative_kv_cache_dtype": speculative.kv_cache_dtype or vllm_config.cache_config.cache_dtype,
        "speculative_aux_layers": getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None),
    }
