"""What a vLLM engine without a model is made of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mini_runner import RunnerName

BLOCK = 16
HEADS = 2
HEAD_SIZE = 32
FULL_LAYERS = ("model.layers.0.self_attn.attn", "model.layers.2.self_attn.attn")
WINDOW_LAYERS = ("model.layers.1.self_attn.attn", "model.layers.3.self_attn.attn")
WINDOW = 40
STATE_LAYERS = ("model.layers.1.mixer", "model.layers.3.mixer")
LONGEST = 1024
"""Tokens of a request."""
DEVICE = "elsewhere"
"""Where the cache is of an engine with a host buffer."""
HostBuffer = Literal["copied", "not saved", "not filled"]
LIMIT = 240.0
"""Seconds after which a wait has failed; a working wait takes a small part of it even on a crowded machine."""


@dataclass(frozen=True)
class Settings:
    """What an engine is made of."""

    role: str
    model: str
    salt: int
    policy: str = "fail"
    hybrid: bool = False
    child: bool = False
    beside: str = "ExampleConnector"
    """The other connector of a child."""
    blocks: int = 96
    block: int = BLOCK
    layout: str = "LBHNC"
    prefix_caching: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    runner: RunnerName = "mixin"
    chunk: int = 0
    """Tokens of a chunk, for a model with chunked local attention in place of windows."""
    states: str = ""
    """vLLM's `mamba_cache_mode`, for a model that has states in place of windows."""
    speculative: int = 0
    """Tokens ahead, for which states have more inputs and requests more blocks."""
    host_buffer: HostBuffer | None = None
    """The cache is a device's, with a buffer in host memory. Which of the copies are made."""
    ahead: int = 0
    """Steps that begin before a step's output is taken in, as with vLLM's batch queue."""


def write_model(folder: Path, layers: int = 4) -> str:
    """A model's configuration, which is all of the model that is read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def register_model() -> None:
    """Tells vLLM what the model's class is. Else every engine that starts before an earlier one's answer has been kept
    asks a process of its own, which imports all of vLLM once more."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)


def vllm_config(settings: Settings) -> Any:
    """The engine's configuration, as of vLLM's command line."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    register_model()
    connector: dict[str, Any] = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": settings.role,
        "kv_connector_extra_config": {"host": "127.0.0.1", "port": 0, **settings.extra},
        "kv_buffer_device": "cpu",
    }
    if settings.child:
        # vLLM's ExampleConnector needs nothing but a folder.
        other = {
            "kv_connector": settings.beside,
            "kv_role": settings.role,
            "kv_connector_extra_config": {"shared_storage_path": settings.model},
        }
        if settings.beside == "KvferryConnector":
            other = connector
        connector = {
            "kv_connector": "MultiConnector",
            "kv_role": settings.role,
            "kv_connector_extra_config": {
                "connectors": [{**connector, "kv_load_failure_policy": settings.policy}, other]
            },
        }
    config = EngineArgs(
        model=settings.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        block_size=settings.block,
        enable_prefix_caching=settings.prefix_caching,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 24,
        disable_hybrid_kv_cache_manager=settings.child,
        kv_transfer_config=KVTransferConfig(**connector, kv_load_failure_policy=settings.policy),
    ).create_engine_config()
    if settings.host_buffer:
        config.device_config.device_type = DEVICE
    if settings.ahead:
        config.scheduler_config.async_scheduling = True
        assert config.max_concurrent_batches == 1 + settings.ahead
    return config


def kv_cache_config(settings: Settings) -> Any:
    """Groups and tensors of its KV cache."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        SlidingWindowSpec,
    )

    shape: dict[str, Any] = {
        "block_size": settings.block,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    full: Any = FullAttentionSpec(**shape)
    window: Any = SlidingWindowSpec(**shape, sliding_window=WINDOW)
    if settings.chunk:
        window = ChunkedLocalAttentionSpec(**shape, attention_chunk_size=settings.chunk)
    page, layers = full.page_size_bytes, len(FULL_LAYERS)
    placement: dict[str, Any] = {
        "size": page * settings.blocks * layers,
        "layer_stride": page * settings.blocks,
        "block_stride": page,
    }
    groups = [KVCacheGroupSpec(list(FULL_LAYERS), full)]
    if settings.hybrid:
        groups.append(KVCacheGroupSpec(list(WINDOW_LAYERS), window))
    if settings.states:
        state = MambaSpec(
            block_size=LONGEST if settings.states == "none" else settings.block,
            shapes=((3 + settings.speculative, 64), (4, 8, 8)),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode=settings.states,
            num_speculative_blocks=settings.speculative,
            page_size_padded=page,
        )
        groups.append(KVCacheGroupSpec(list(STATE_LAYERS), state))
    # The groups overlay each other, as vLLM lays them out: a block belongs to one group at a time.
    tensors = [KVCacheTensor(layers=list(group.layer_names), **placement) for group in groups]
    return KVCacheConfig(settings.blocks, tensors, groups)
