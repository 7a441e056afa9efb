"""Finds the number of KV heads of a layer over all tensor-parallel ranks.

vLLM tells a worker how many heads of a layer it holds itself. Where that is more than one, no rank holds a copy and the
number over all ranks follows. Where it is one, several ranks may hold the same head, and which do depends on the
model's configuration: some models have layers with different numbers, and a draft model has its own. An uncertain
number is not guessed: the layer then moves between equal tensor-parallel sizes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_HEADS = re.compile(r"kv_heads?$|kv_n_heads|key_value_heads?|head_kv|n_heads_in_group|attention_groups|query_group")
_OTHER_MODALITIES = re.compile(r"vision|visual|image|audio|speech")
_WHOLE_MODEL = frozenset(
    {"n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups", "kv_n_heads"}
)
"""Keys from which vLLM takes the model's number (`ModelArchConfigConvertorBase.get_total_num_kv_heads`)."""


class KvHeads:
    """The KV heads of each layer of an engine's model and its draft model."""

    def __init__(self, vllm_config: Any) -> None:
        self._target = vllm_config.model_config
        self._draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
        self._one_stage = vllm_config.parallel_config.pipeline_parallel_size == 1

    def __call__(self, layer: str, spec: Any) -> int | None:
        """KV heads of `layer` over all ranks, None if that is not certain.

        Args:
            layer: vLLM's name of the attention layer.
            spec: Its KV-cache spec.
        """
        index = _index(layer)
        target = _stated(self._target, index, spec)
        if self._draft is None:
            return target
        layers = self._target.get_total_num_hidden_layers()
        # Drafts that are numbered on from the target's layers have theirs counted from there.
        own = index - layers if index is not None and index >= layers else index
        draft = _stated(self._draft, own, spec)
        if target == draft:
            return target
        if any(part.startswith(("draft", "mtp")) for part in layer.split(".")):
            return draft
        if index is None:
            return None
        if index >= layers:
            return draft
        # Behind the first stage, vLLM counts a draft's layers from those of the stage.
        return target if self._one_stage else None


def _index(layer: str) -> int | None:
    numbers = [part for part in layer.split(".") if part.isdecimal()]
    return int(numbers[0]) if len(numbers) == 1 else None


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _stated(model: Any, index: int | None, spec: Any) -> int | None:
    """Returns what the configuration of one model states about layer `index`, None if that is not clear."""
    overrides = model.model_arch_config.per_layer_overrides
    if overrides is not None:
        known = index is not None and index < len(overrides)
        return int(model.model_arch_config[index].total_num_kv_heads) if known else None
    config, base = model.hf_text_config, model.get_total_num_kv_heads()
    if not isinstance(base, int):
        return None
    total = base
    understood = set()
    # MiMo-V2 and Inkling: the layers with a window have a number of their own.
    window = _get(config, "swa_num_key_value_heads")
    if window is not None:
        understood.add("swa_num_key_value_heads")
        total = int(window) if getattr(spec, "sliding_window", None) is not None else total
    # Step-3.5: the layers of one type.
    other = _get(config, "attention_other_setting")
    if other:
        understood.add("attention_other_setting")
        kinds = _get(config, "layer_types") or ()
        if index is None or index >= len(kinds):
            return None
        if kinds[index] == other["attention_type"]:
            total = int(other["num_attention_groups"])
    # Nemotron-NAS: query heads per KV head, layer by layer.
    blocks = _get(config, "block_configs")
    if blocks and any(_get(_get(block, "attention"), "n_heads_in_group") for block in blocks):
        understood.add("block_configs")
        group = _get(_get(blocks[index], "attention"), "n_heads_in_group") if _within(index, blocks) else None
        if not group:
            return None
        total = int(config.num_attention_heads) // int(group)
    for key, value in _items(config):
        if key not in understood and any(number != base for number in _numbers(key, value, key in _WHOLE_MODEL)):
            return None
    return total


def _within(index: int | None, values: Any) -> bool:
    return index is not None and index < len(values)


def _items(config: Any) -> Iterator[tuple[str, Any]]:
    stated = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return iter(stated.items())


def _numbers(key: str, value: Any, known: bool = False) -> Iterator[int]:
    """Finds all numbers of KV heads under a key, at any depth. `known`: vLLM takes a plain number from it."""
    if _OTHER_MODALITIES.search(key):
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(str(name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(key, inner)
    elif isinstance(value, int) and not isinstance(value, bool) and not known and _HEADS.search(key):
        yield value
