"""Recurrent states: what they are made of, over tensor-parallel sizes that differ, and under vLLM's scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvferry.vllm import states
from kvferry.vllm.interior import FORMAT_BYTES
from kvferry.vllm.scheduler import _drop_last_token
from mini_config import FULL_LAYERS
from mini_ranks import BLOCK, Engine, Mixed, bytes_of, hand_over, held, model
from test_vllm_engines import Pair, prompt
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)

STATE_LAYERS = ("model.layers.1.mixer", "model.layers.3.mixer")
BLOCKS = 12
THERE = ([3, 1, 4], [7])
HERE = ([2, 10, 5], [9])
INPUTS = 3
"""That a convolution keeps."""


class Stateful(Mixed):
    """Full attention, and layers with a state whose channels are split as vLLM's loaders split them.

    Args:
        kind: Of the state, by vLLM's name.
        channels_first: The order of a convolution's state in memory.
        groups: Of a Mamba2 model.
        speculative: Tokens ahead, for which the state has more inputs and a request more blocks.
    """

    layers = (*FULL_LAYERS, *STATE_LAYERS)
    tokens = len(THERE[0]) * BLOCK
    held_back = 1

    def __init__(self, kind: str, channels_first: bool = False, groups: int = 2, speculative: int = 0) -> None:
        self.kind, self.channels_first, self.groups = kind, channels_first, groups
        self.inputs, self.speculative = INPUTS + speculative, speculative
        # Over all ranks: channels of each projection, and heads of the recurrent state with what each has.
        self.projections = {
            "SHORT_CONV": [16],
            "MAMBA1": [16],
            "MAMBA2": [32, groups * 4, groups * 4],
            "GDN_ATTN": [8, 8, 24],
            "LINEAR": [],
        }[kind]
        self.recurrent = {"MAMBA1": (16, 5), "MAMBA2": (8, 4, 4), "GDN_ATTN": (4, 6, 2), "LINEAR": (4, 6, 6)}.get(kind)

    def spec(self, tp_size: int, page: int) -> MambaSpec:
        shapes: list[tuple[int, ...]] = []
        if self.projections:
            channels = sum(len(self.own(part, 0, tp_size)) for part in range(len(self.projections)))
            shapes.append((channels, self.inputs) if self.channels_first else (self.inputs, channels))
        if self.recurrent:
            shapes.append((self.recurrent[0] // tp_size, *self.recurrent[1:]))
        return MambaSpec(
            block_size=1024,
            shapes=tuple(shapes),
            dtypes=(torch.bfloat16, torch.float32)[-len(shapes) :] if self.kind != "SHORT_CONV" else (torch.bfloat16,),
            mamba_type=MambaAttentionBackendEnum[self.kind],
            num_speculative_blocks=self.speculative,
            # All groups use the same memory.
            page_size_padded=page,
        )

    def own(self, part: int, rank: int, tp_size: int) -> list[int]:
        """The channels of a projection that a rank holds. A Mamba2 model's only group is on every rank."""
        count = self.projections[part]
        if self.kind == "MAMBA2" and part > 0 and self.groups == 1:
            return list(range(count))
        share = count // tp_size
        return list(range(rank * share, (rank + 1) * share))

    def cache_config(self, rank: int, tp_size: int) -> KVCacheConfig:
        heads = len(held(FULL_LAYERS[0], rank, tp_size))
        full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=32, dtype=torch.bfloat16)
        groups, tensors = [], []
        page = full.page_size_bytes
        for names, spec in ((FULL_LAYERS, full), (STATE_LAYERS, self.spec(tp_size, page))):
            groups.append(KVCacheGroupSpec(list(names), spec))
            size = page * BLOCKS * len(names)
            tensors.append(KVCacheTensor(layers=list(names), size=size, layer_stride=page * BLOCKS, block_stride=page))
        return KVCacheConfig(BLOCKS, tensors, groups)

    def blocks(self, layer: str, groups: tuple[list[int], ...]) -> list[int]:
        return groups[layer in STATE_LAYERS]

    def content(self, layer: str, rank: int, tp_size: int, blocks: int) -> np.ndarray:
        if layer not in STATE_LAYERS:
            return bytes_of(layer, held(layer, rank, tp_size), blocks)
        seed = np.random.default_rng(STATE_LAYERS.index(layer))
        pieces = []
        if self.projections:
            # (channel, input, byte) over all ranks. What is kept for speculative tokens differs by rank, and stays.
            whole = [seed.integers(1, 256, (count, INPUTS, 2), dtype=np.uint8) for count in self.projections]
            own = np.concatenate([each[self.own(part, rank, tp_size)] for part, each in enumerate(whole)])
            own = np.concatenate([own, np.zeros((len(own), self.speculative, 2), np.uint8)], axis=1)
            pieces.append((own if self.channels_first else own.transpose(1, 0, 2)).ravel())
        if self.recurrent:
            whole_state = seed.integers(1, 256, (*self.recurrent, 4), dtype=np.uint8)
            share = self.recurrent[0] // tp_size
            pieces.append(whole_state[rank * share : (rank + 1) * share].ravel())
        return np.broadcast_to(np.concatenate(pieces), (blocks, 1, 1, sum(map(len, pieces))))


Make = Any


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(p_size: int, d_size: int, p_holds: Stateful, d_holds: Stateful) -> tuple[Engine, Engine]:
            path = model(tmp_path / "model")
            stated = json.loads((tmp_path / "model/config.json").read_text()) | {"mamba_n_groups": p_holds.groups}
            (tmp_path / "model/config.json").write_text(json.dumps(stated))
            made = []
            for name, size, holds in (("p", p_size, p_holds), ("d", d_size, d_holds)):
                monkeypatch.setattr(states, "is_conv_state_dim_first", lambda first=holds.channels_first: first)
                made.append(engine := Engine(name, path, size, monkeypatch, holds=holds))
                stack.callback(engine.close)
            return made[0], made[1]

        yield make


@pytest.mark.parametrize(("p_size", "d_size"), [(1, 1), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["SHORT_CONV", "MAMBA1", "MAMBA2", "GDN_ATTN"])
def test_states_over_ranks(engines: Make, kind: str, p_size: int, d_size: int) -> None:
    groups = max(p_size, d_size)
    p, d = engines(p_size, d_size, Stateful(kind, groups=groups), Stateful(kind, groups=groups))
    assert hand_over(p, d, THERE, HERE) is None


@pytest.mark.parametrize(("p_size", "d_size"), [(1, 2), (2, 1)])
def test_a_mamba2_model_s_only_group_is_on_every_rank(engines: Make, p_size: int, d_size: int) -> None:
    p, d = engines(p_size, d_size, Stateful("MAMBA2", groups=1), Stateful("MAMBA2", groups=1))
    assert hand_over(p, d, THERE, HERE) is None


@pytest.mark.parametrize("p_first", [False, True])
def test_the_order_of_channels_and_inputs_may_differ(engines: Make, p_first: bool) -> None:
    p, d = engines(2, 1, Stateful("GDN_ATTN", p_first), Stateful("GDN_ATTN", not p_first))
    assert hand_over(p, d, THERE, HERE) is None


def test_speculative_inputs_on_one_side(engines: Make) -> None:
    p, d = engines(1, 2, Stateful("MAMBA2"), Stateful("MAMBA2", speculative=2))
    assert hand_over(p, d, THERE, HERE) is None


def test_a_state_that_is_not_understood_needs_equal_tensor_parallel_sizes(engines: Make) -> None:
    p, d = engines(2, 1, Stateful("LINEAR"), Stateful("LINEAR"))
    failure = hand_over(p, d, THERE, HERE)
    assert failure is not None
    assert failure.startswith("incompatible: ")
    assert STATE_LAYERS[0] in failure
    assert "--tensor-parallel-size" in failure


def test_a_state_that_is_not_understood_moves_whole_between_equal_sizes(engines: Make) -> None:
    p, d = engines(2, 2, Stateful("LINEAR"), Stateful("LINEAR"))
    assert hand_over(p, d, THERE, HERE) is None


def test_a_state_on_another_kind_of_device_is_another_format() -> None:
    spec = Stateful("GDN_ATTN").spec(1, 1 << 16)
    on_cpu, on_gpu = (
        [part.format for part in states.state_parts("a", spec, 1, None, kind)] for kind in ("cpu", "cuda")
    )
    assert not set(on_cpu) & set(on_gpu)
    assert all(len(text.encode()) <= FORMAT_BYTES for text in on_gpu)


def test_mamba_s_convolution_keeps_nothing_for_speculation() -> None:
    spec = MambaSpec(**{**vars(Stateful("MAMBA1").spec(1, 1 << 16)), "num_speculative_blocks": 2})
    part = next(iter(states.state_parts("a", spec, 1, None, "cpu")))
    assert (part.name, part.axes["tokens"]) == ("conv", INPUTS)


def test_the_last_token_goes_from_everything_that_is_as_long_as_the_prompt() -> None:
    ids, kinds, every = [5, 0, 7], [True, False, True], [5, 0, 7]
    request = SimpleNamespace(
        num_prompt_tokens=3,
        get_skip_reading_prefix_cache=lambda: False,
        prompt_token_ids=ids,
        prompt_embeds=torch.zeros(3, 8),
        prompt_is_token_ids=kinds,
        _all_token_ids=every,
        max_tokens=9,
    )
    _drop_last_token(request)  # type: ignore[arg-type]
    assert (request.prompt_token_ids, request.prompt_is_token_ids, every) == ([5, 0], [True, False], [5, 0])
    assert (len(request.prompt_embeds), request.num_prompt_tokens, request.max_tokens) == (2, 2, 1)
    assert (len(ids), len(kinds)) == (3, 3), "they may be somebody else's"


def test_groups_that_nobody_states_are_not_guessed() -> None:
    for config, known in (({}, None), ({"n_groups": 1}, 1), ({"mamba_n_groups": 4}, 4), ({"n_groups": 3}, None)):
        model_config = SimpleNamespace(hf_text_config=SimpleNamespace(**config))
        assert states._group_shards(1, 4, model_config) == known
        assert states._group_shards(2, 4, model_config) == 4


@pytest.fixture(
    scope="module",
    # vLLM's `mamba_cache_mode`: `none` goes without prefix caching, `align` with; and tokens of speculation.
    params=[
        (("none", 0), ("none", 0)),
        (("align", 0), ("align", 2)),
        (("none", 2), ("align", 2)),
        (("align", 2), ("none", 0)),
    ],
    ids=lambda engines: "-".join(f"{mode}{ahead or ''}" for mode, ahead in engines),
)
def stateful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    prefill, decode = (
        {"states": mode, "prefix_caching": mode != "none", "speculative": ahead} for mode, ahead in request.param
    )
    pair = Pair(tmp_path_factory.mktemp("model"), "fail", False, False, prefill, decode, "active")
    yield pair
    pair.close()


@pytest.mark.parametrize("tokens", [2, BLOCK, BLOCK + 1, BLOCK + 2, 100])
def test_the_state_before_the_last_token_is_handed_over(stateful: Pair, tokens: int) -> None:
    name, text = f"length-{tokens}", prompt(40 + tokens, tokens)
    answer = stateful.decoded(name, text, stateful.prefilled(name, text))
    assert len(answer["tokens"]) == 4
    _, decode = stateful.quiesce()
    assert (decode["starts"][name][0], decode["wrong_bytes"][name]) == (tokens - 1, 0)


def test_a_prompt_of_one_token_is_computed_and_its_lease_given_back(stateful: Pair) -> None:
    answer = stateful.decoded("single", [7], stateful.prefilled("single", [7]))
    assert len(answer["tokens"]) == 4
    prefill, decode = stateful.quiesce()
    assert decode["starts"]["single"][0] == 0
    assert prefill["figures"]["sends_released"] > 0


def test_a_prompt_of_one_token_with_both_engines_asked_at_once(stateful: Pair) -> None:
    first = stateful.prefilled("place", [7])
    place = {key: first[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    before = stateful.prefill.call("state")["figures"].get("sends_released", 0)
    stateful.decode.call("add", "at-once", [7], 4, {**place, "do_remote_prefill": True, "transfer_id": "x"})
    stateful.decode.call("run_until", "'reason' in e.answers.get('at-once', {})")
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}
    stateful.prefill.call("add", "p-at-once", [7], 1, params)
    stateful.prefill.call("run_until", "'p-at-once' in e.answers and 'p-at-once' not in e.scheduler.requests")
    assert stateful.prefill.call("state")["figures"]["sends_released"] == before + 1
    # The first prefill was for nobody.
    stateful.decode.call("add", "given-back", [7], 4, first)
    _, decode = stateful.quiesce()
    assert (decode["starts"]["at-once"][0], decode["failed"]) == (0, {})


def test_chunks_and_prefixes_that_both_engines_know(stateful: Pair) -> None:
    prefix = prompt(3, 5 * BLOCK)
    stateful.prefill.call("chunk", 2 * BLOCK)
    for index in range(3):
        name, text = f"prefix-{index}", prefix + prompt(60 + index, BLOCK // 2 + index * BLOCK)
        answer = stateful.decoded(name, text, stateful.prefilled(name, text))
        assert len(answer["tokens"]) == 4
        _, decode = stateful.quiesce()
        assert (decode["starts"][name][0], decode["wrong_bytes"][name]) == (len(text) - 1, 0)
    stateful.prefill.call("chunk", 0)


def test_log_probabilities_of_the_prompt_take_all_of_it(stateful: Pair) -> None:
    text = prompt(70, 3 * BLOCK)
    # Of both engines: nothing is handed over.
    stateful.prefill.call("add", "whole", text, 1, {"do_remote_decode": True, "do_remote_prefill": False}, 1)
    stateful.prefill.call("run_until", "'reason' in e.answers.get('whole', {})")
    assert stateful.prefill.call("answer", "whole")["params"] == {}
    # Of the decode engine: the lease is given back at once, and the request computes its prompt.
    before = stateful.quiesce()[0]["figures"].get("sends_released", 0)
    params = stateful.prefilled("logprobs", text)
    stateful.decode.call("add", "logprobs", text, 4, params, 1)
    stateful.decode.call("run_until", "'logprobs' in e.sources")
    stateful.prefill.call("run_while_needed")
    assert stateful.prefill.call("state")["figures"]["sends_released"] == before + 1
    stateful.decode.call("run_until", "'reason' in e.answers.get('logprobs', {})")
    _, decode = stateful.quiesce()
    assert (decode["starts"]["logprobs"][0], "logprobs" in decode["failed"]) == (0, False)


def test_another_engine_s_state_is_noticed(stateful: Pair) -> None:
    """The check of bytes can fail."""
    stateful.decode.call("loaded_from", 3)
    text = prompt(90, 2 * BLOCK)
    stateful.decoded("foreign", text, stateful.prefilled("foreign", text))
    stateful.decode.call("loaded_from", 1)
    _, decode = stateful.quiesce()
    assert decode["wrong_bytes"]["foreign"] > 1000
