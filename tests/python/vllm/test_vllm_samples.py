"""Requests with `n` above 1 under vLLM's real scheduler: several samples load one prefill, every byte checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvferry.vllm.dialects import SAMPLE
from test_vllm_engines import Pair, prompt
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    # Without prefix caching each sample loads the whole prompt.
    pair = Pair(tmp_path_factory.mktemp("model"), "fail", True, False, decode={"prefix_caching": False})
    yield pair
    pair.close()


def names_of_samples(request: str, n: int) -> list[str]:
    """What vLLM's front end calls the samples of a request."""
    parent = ParentRequest(
        EngineCoreRequest(
            request_id=request,
            external_req_id=request,
            prompt_token_ids=[7],
            mm_features=None,
            sampling_params=SamplingParams(n=n),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
    return [parent.get_child_info(index)[0] for index in range(n)]


def test_samples_are_known_by_their_names() -> None:
    samples = names_of_samples("cmpl-5f1-0-1a2b3c4d", 12)
    assert all(SAMPLE.match(name) for name in samples)
    assert not any(SAMPLE.match(name) for name in ("cmpl-5f1-0-1a2b3c4d", "chatcmpl-0_x", "5f1-0", "req"))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("in_turn", [False, True], ids=["at-once", "in-turn"])
def test_all_samples_load_the_prefill_and_its_blocks_are_freed_once(pair: Pair, n: int, in_turn: bool) -> None:
    before = pair.quiesce()[0]["figures"]
    request = f"samples-{n}-{in_turn}"
    tokens = prompt(200 + n + 50 * in_turn, 103)
    params = pair.prefilled(request, tokens)
    names = names_of_samples(request, n)
    for name in names:
        if in_turn:
            pair.decoded(name, tokens, params)
        else:
            pair.decode.call("add", name, tokens, 4, params)
    pair.decode.call("run_until", f"all('reason' in e.answers.get(name, {{}}) for name in {names})")
    answers = [pair.decode.call("answer", name) for name in names]
    assert [(answer["reason"], len(answer["tokens"])) for answer in answers] == [("length", 4)] * n
    p, d = pair.quiesce()
    assert {name: d["wrong_bytes"][name] for name in names} == dict.fromkeys(names, 0)
    assert {name: d["starts"][name][0] for name in names} == dict.fromkeys(names, len(tokens) - 1)
    ended = {key: p["figures"].get(key, 0) - before.get(key, 0) for key in ("sends_read", "sends_expired")}
    assert ended == {"sends_read": 1, "sends_expired": 0}


def test_samples_that_are_aborted_leave_the_prefill_to_the_others(pair: Pair) -> None:
    before = pair.quiesce()[0]["figures"]
    tokens = prompt(300, 70)
    params = pair.prefilled("some", tokens)
    queued, loading, kept = names_of_samples("some", 3)
    for name in (queued, loading, kept):
        pair.decode.call("add", name, tokens, 4, params)
    pair.decode.call("abort", queued)
    pair.decode.call("step")
    pair.decode.call("abort", loading)
    pair.decode.call("run_until", f"'reason' in e.answers.get('{kept}', {{}})")
    assert pair.decode.call("answer", kept)["reason"] == "length"
    p, d = pair.quiesce()
    assert d["wrong_bytes"][kept] == 0
    assert p["figures"]["sends_read"] == before["sends_read"] + 1
