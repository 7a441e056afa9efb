"""Makes the tiny models of the demo: configuration, tokenizer and random weights from a fixed seed.

A random model proves something only if its output depends on its whole context. With the small weights usual for
training it repeats one token whatever it reads, and would hide every wrong KV block. So the gains here are raised:
queries and keys until each head picks a few positions out of a thousand, values and outputs until what it picked
outweighs the residual stream. The demo measures the outcome on every run (see `probes` in workload.py): a changed
first token of a long prompt must change the greedy output, and so must foreign KV blocks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from lab.servers import state_models

VOCAB = 512
HIDDEN = 256
LAYERS = 4
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 32
INTERMEDIATE = 512
MAX_POSITIONS = 4096
ADAPTER_RANK = 8
SEED = 20_240_607

# Standard deviation of the attention scores at random inputs: at 4 a head puts most of its weight on a few of
# 1500 positions, at 1 it averages over all of them and one token's share is lost in the rounding.
SCORE_STD = 4.0
# Gain of what attention and MLP add to the residual stream, relative to the stream at the first layer.
BRANCH_GAIN = 1.5
# The same for Gemma, which normalizes what a branch adds. Its tied embedding makes the token just read the likeliest
# next one unless the branches clearly outweigh it.
POST_NORM_GAIN = 3.0


# MLA: bytes of a token's latent in float32 are (rank + rope) * 4. vLLM's CPU kernel exists for 512 + 64 only.
KV_LORA_RANK = 512
ROPE_HEAD_DIM = 64


@dataclass(frozen=True)
class ModelKind:
    """One selectable model."""

    name: str
    config: dict[str, Any]
    qk_norm: bool = False
    extra_norms: bool = False
    mla: bool = False
    mlp: str = "mlp"
    """What the weights call the part of a layer behind its attention."""
    states: bool = False


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "use_cache": True,
    }


LLAMA = ModelKind(
    name="llama",
    config={
        **_common(),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "mlp_bias": False,
    },
)

HYBRID = ModelKind(
    name="hybrid",
    config={
        **_common(),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    qk_norm=True,
    extra_norms=True,
)

CHUNKED = ModelKind(
    name="chunked",
    config={
        **_common(),
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        # Layers with rotary embeddings look at their chunk, the others at everything.
        "attention_chunk_size": 256,
        "no_rope_layers": [1, 0] * (LAYERS // 2),
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "intermediate_size_mlp": INTERMEDIATE,
        # No layer has experts.
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
    },
    mlp="feed_forward",
)

MLA = ModelKind(
    name="mla",
    config={
        **_common(),
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_HEAD_DIM,
        "v_head_dim": HEAD_DIM,
        # No layer has experts.
        "first_k_dense_replace": LAYERS,
    },
    mla=True,
)

STATES = [ModelKind(name, config, states=True) for name, config in state_models.state_configs(_common()).items()]

KINDS = {kind.name: kind for kind in (LLAMA, HYBRID, CHUNKED, MLA, *STATES)}


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float) -> np.ndarray:
    """A weight whose output has the standard deviation `gain` for inputs of standard deviation 1."""
    return (rng.standard_normal((rows, columns)) * (gain / math.sqrt(columns))).astype(np.float32)


def _weights(kind: ModelKind) -> dict[str, np.ndarray]:
    if kind.states:
        return state_models.state_weights(kind.config, SEED, math.sqrt(SCORE_STD), BRANCH_GAIN)
    rng = np.random.default_rng(SEED)
    # Gemma's norms multiply by (1 + weight), Llama's by weight.
    unit = 0.0 if kind.extra_norms else 1.0
    embedding = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    if kind.config["tie_word_embeddings"]:
        # Gemma scales embeddings by sqrt(hidden) on the way in; the same matrix makes the logits on the way out.
        embedding /= math.sqrt(HIDDEN)
    tensors: dict[str, np.ndarray] = {"model.embed_tokens.weight": embedding}
    if not kind.config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _matrix(rng, VOCAB, HIDDEN, 2.0)
    tensors["model.norm.weight"] = np.full(HIDDEN, unit, np.float32)
    # A score is a dot product over the head divided by sqrt(head): its deviation is the product of q's and k's.
    score_gain = math.sqrt(SCORE_STD)
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        qk_gain = 1.0 if kind.qk_norm else score_gain
        if kind.mla:
            tensors.update(_latent_projections(rng, prefix, score_gain))
        else:
            tensors[prefix + "self_attn.q_proj.weight"] = _matrix(rng, HEADS * HEAD_DIM, HIDDEN, qk_gain)
            tensors[prefix + "self_attn.k_proj.weight"] = _matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN, qk_gain)
            tensors[prefix + "self_attn.v_proj.weight"] = _matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN, BRANCH_GAIN)
        tensors[prefix + "self_attn.o_proj.weight"] = _matrix(rng, HIDDEN, HEADS * HEAD_DIM, BRANCH_GAIN)
        tensors[prefix + f"{kind.mlp}.gate_proj.weight"] = _matrix(rng, INTERMEDIATE, HIDDEN, BRANCH_GAIN)
        tensors[prefix + f"{kind.mlp}.up_proj.weight"] = _matrix(rng, INTERMEDIATE, HIDDEN, BRANCH_GAIN)
        tensors[prefix + f"{kind.mlp}.down_proj.weight"] = _matrix(rng, HIDDEN, INTERMEDIATE, BRANCH_GAIN)
        tensors[prefix + "input_layernorm.weight"] = np.full(HIDDEN, unit, np.float32)
        if kind.extra_norms:
            added = np.full(HIDDEN, POST_NORM_GAIN - 1.0, np.float32)
            tensors[prefix + "post_attention_layernorm.weight"] = added
            tensors[prefix + "pre_feedforward_layernorm.weight"] = np.full(HIDDEN, unit, np.float32)
            tensors[prefix + "post_feedforward_layernorm.weight"] = added.copy()
        else:
            tensors[prefix + "post_attention_layernorm.weight"] = np.full(HIDDEN, unit, np.float32)
        if kind.qk_norm:
            gain = np.full(HEAD_DIM, score_gain + unit - 1.0, np.float32)
            tensors[prefix + "self_attn.q_norm.weight"] = gain
            tensors[prefix + "self_attn.k_norm.weight"] = gain.copy()
    return tensors


def _latent_projections(rng: np.random.Generator, prefix: str, score_gain: float) -> dict[str, np.ndarray]:
    """MLA's weights in place of k_proj and v_proj: tokens to latents, latents to the keys and values of each head."""
    head = np.concatenate([np.full(HEAD_DIM, score_gain), np.full(HEAD_DIM, BRANCH_GAIN)])
    token = np.concatenate([np.ones(KV_LORA_RANK), np.full(ROPE_HEAD_DIM, score_gain)])
    latent_to_heads = _matrix(rng, HEADS * 2 * HEAD_DIM, KV_LORA_RANK, 1.0) * np.tile(head, HEADS)[:, None]
    token_to_latent = _matrix(rng, KV_LORA_RANK + ROPE_HEAD_DIM, HIDDEN, 1.0) * token[:, None]
    return {
        prefix + "self_attn.q_proj.weight": _matrix(rng, HEADS * (HEAD_DIM + ROPE_HEAD_DIM), HIDDEN, score_gain),
        prefix + "self_attn.kv_a_proj_with_mqa.weight": token_to_latent.astype(np.float32),
        prefix + "self_attn.kv_a_layernorm.weight": np.ones(KV_LORA_RANK, np.float32),
        prefix + "self_attn.kv_b_proj.weight": latent_to_heads.astype(np.float32),
    }


def _write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer: token i is the word `ti`. The demo sends token ids; vLLM wants one all the same."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words.update({f"t{index}": index for index in range(4, VOCAB)})
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": MAX_POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_adapter(folder: Path) -> Path:
    """A LoRA adapter of the llama model, strong enough to change every answer."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED + 1)
    tensors = {}
    for index in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            prefix = f"base_model.model.model.layers.{index}.self_attn.{name}."
            tensors[prefix + "lora_A.weight"] = _matrix(rng, ADAPTER_RANK, HIDDEN, 1.0)
            tensors[prefix + "lora_B.weight"] = _matrix(rng, rows, ADAPTER_RANK, BRANCH_GAIN)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK}
    config |= {"target_modules": ["q_proj", "v_proj"], "bias": "none", "base_model_name_or_path": "llama"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def make_model(name: str, root: Path) -> Path:
    """Makes the model `name` under `root` unless it is there, and returns its folder.

    The folder's name holds a hash of the recipes' files, so a changed one makes a new model. It appears complete or not
    at all: two runs at once do not disturb each other.
    """
    if name not in KINDS:
        raise ValueError(f"unknown model {name!r}: expected one of {', '.join(sorted(KINDS))}")
    kind = KINDS[name]
    recipes = (Path(__file__), Path(state_models.__file__))
    recipe = hashlib.sha256(b"".join(path.read_bytes() for path in recipes)).hexdigest()[:12]
    folder = root / f"{name}-{recipe}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        (scratch / "config.json").write_text(json.dumps(kind.config, indent=1))
        (scratch / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
        _write_tokenizer(scratch)
        save_file(_weights(kind), scratch / "model.safetensors", metadata={"format": "pt"})
        try:
            os.rename(scratch, folder)
        except OSError:
            # Another run was faster; the recipe is the same, so is its result.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
