"""The demo's models with recurrent states: configurations, and weights by the shapes that transformers gives them.

As in `model.py` the gains are raised, until the output depends on the whole context. States forget slowly, so that a
wrong one changes what follows.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

Config = dict[str, Any]

_LAYERS = 4
_MIXED = {"hidden_size": 256, "num_hidden_layers": _LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4}

_OF_ALL = ("vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")
"""Keys of `common` that a model without attention has too."""


def state_configs(common: Config) -> dict[str, Config]:
    """Configurations by name: `lfm2` has short convolutions, `mamba2` Mamba2 layers, `gdn` gated delta nets, each with
    full attention in other layers; `states` has Mamba2 layers alone. `common`: what all of the demo's models share."""
    return {
        "lfm2": {
            **common,
            **_MIXED,
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "norm_eps": 1e-6,
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": _MIXED["hidden_size"],
            "block_dim": _MIXED["hidden_size"],
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * (_LAYERS // 2),
        },
        "mamba2": {
            **common,
            **_MIXED,
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "hidden_act": "silu",
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": common["intermediate_size"],
            "position_embedding_type": "rope",
            "attention_multiplier": 1 / math.sqrt(32),
            "layer_types": ["mamba", "attention"] * (_LAYERS // 2),
            "mamba_n_heads": 16,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        "states": {
            **{key: common[key] for key in _OF_ALL},
            "hidden_size": _MIXED["hidden_size"],
            "num_hidden_layers": 2 * _LAYERS,
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "hidden_act": "silu",
            "layer_norm_epsilon": 1e-6,
            "expand": 2,
            "num_heads": 16,
            "head_dim": 32,
            "n_groups": 2,
            "state_size": 64,
            "conv_kernel": 4,
            "chunk_size": 256,
        },
        "gdn": {
            **common,
            **_MIXED,
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_act": "silu",
            "head_dim": 64,
            "partial_rotary_factor": 0.5,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            # vLLM wants one layer with experts.
            "mlp_only_layers": list(range(_LAYERS - 1)),
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "layer_types": ["linear_attention", "full_attention"] * (_LAYERS // 2),
        },
    }


def _value(name: str, shape: tuple[int, ...], rng: np.random.Generator, score_gain: float, gain: float) -> np.ndarray:
    """A weight by its name. `score_gain`: of queries and keys; `gain`: of what layers add to the residual stream."""
    # Without attention beside them, states must remember a thousand tokens, each of which is a small part of them.
    alone = name.startswith("backbone.")
    if re.search(r"\.[qk]_layernorm\.", name):
        return np.full(shape, score_gain, np.float32)
    if re.search(r"\.[qk]_norm\.", name):
        # This model's norms multiply by one more than their weight.
        return np.full(shape, 1.5, np.float32)
    if name.endswith(("norm.weight", "layernorm.weight")) or "norm" in name.split(".")[-2]:
        return np.ones(shape, np.float32)
    if name.endswith("A_log"):
        return np.linspace(0.0, -8.0 if alone else 0.0, shape[0], dtype=np.float32)
    if name.endswith("dt_bias"):
        return np.full(shape, -4.0, np.float32)
    if name.endswith(".D"):
        return np.ones(shape, np.float32)
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    scale = 2.0 * gain if alone else gain
    if name.endswith(("embed_tokens.weight", "embeddings.weight")):
        return rng.standard_normal(shape).astype(np.float32)
    if name.endswith("lm_head.weight"):
        scale = 2.0
    elif re.search(r"\.[qk]_proj\.", name):
        scale = score_gain
    inputs = math.prod(shape[1:]) if len(shape) > 1 else 1
    return (rng.standard_normal(shape) * (scale / math.sqrt(inputs))).astype(np.float32)


def state_weights(config: Config, seed: int, score_gain: float, gain: float) -> dict[str, np.ndarray]:
    """Weights of a model, by the names and shapes that transformers gives them."""
    # Seconds to import, for nothing if the model is there.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    stated = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **stated))
    rng = np.random.default_rng(seed)
    return {
        name: _value(name, shape, rng, score_gain, gain)
        for packed, tensor in model.state_dict().items()
        for name, shape in _stored(packed, tuple(tensor.shape))
    }


def _stored(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """How a weight is kept in files: of experts, one matrix of each."""
    match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if match is None:
        return [(name, shape)]
    experts, rows, columns = shape
    if match[2] == "down_proj":
        return [(f"{match[1]}.{index}.down_proj.weight", (rows, columns)) for index in range(experts)]
    halves = ("gate_proj", "up_proj")
    return [(f"{match[1]}.{index}.{half}.weight", (rows // 2, columns)) for index in range(experts) for half in halves]
