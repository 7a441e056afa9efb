"""A decode engine loads its own prompt's cache, or none: what each engine makes of requests that may be another's."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvferry.vllm import history, scheduler
from lone_scheduler import LoneScheduler
from mini_config import write_model
from test_vllm_digests import NUMBERED, adapter, make, media, rows
from vllm.v1.request import Request, RequestStatus

Params = dict[str, Any]
Schedulers = tuple[LoneScheduler, LoneScheduler]

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
PLACE = ("remote_engine_id", "remote_host", "remote_port")
TOKENS = 36
PROMPTS: dict[str, tuple[Params, Params]] = {
    "ids": ({"ids": [7] * TOKENS}, {"ids": [8] * TOKENS}),
    "embeddings": ({"prompt_embeds": rows(1, TOKENS)}, {"prompt_embeds": rows(2, TOKENS)}),
    "mixed": tuple(
        {"ids": [7] * TOKENS, "prompt_embeds": rows(at, TOKENS), "prompt_is_token_ids": [True] * 30 + [False] * 6}
        for at in (1, 2)
    ),
    "adapters": tuple({"ids": [7] * TOKENS, "lora_request": adapter("a", path)} for path in ("/a", "/b")),
}
"""Two prompts of a kind."""


def asked(engines: Schedulers, request: str, params: Params | None = None, **prompt: Any) -> Params:
    """The prefill engine's answer, as JSON brings it."""
    connector = engines[0].connector
    made = make(name=request, params={**ASKED, **(params or {})}, **prompt)
    connector.on_new_request(made)
    made.status, made.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, made.num_prompt_tokens
    keep, answer = connector.request_finished(made, [1, 2, 3])
    assert keep == bool(answer)
    loaded: Params = json.loads(json.dumps(answer))
    return loaded


def given(engines: Schedulers, request: str, params: Params, **prompt: Any) -> Request:
    """A request that has come to the decode engine."""
    made = make(name=request, params=params, **prompt)
    engines[1].connector.on_new_request(made)
    return made


def outcome(engines: Schedulers, request: Request) -> str:
    """What the decode engine does with it: "loaded", "computed", or why it is refused."""
    connector = engines[1].connector
    tokens, is_loaded = connector.get_num_new_matched_tokens(request, 0)
    if (refusal := connector._scheduler._requests.get(request.request_id).refusal) is not None:
        return str(refusal)
    assert (tokens, is_loaded) in ((TOKENS, True), (0, False))
    return "loaded" if is_loaded else "computed"


def awaited(engines: Schedulers, request: Request) -> str:
    """By which name the decode engine awaits its prefill."""
    name: str = engines[1].connector._scheduler._requests.get(request.request_id).load["transfer_id"]
    return name


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_of_one_name_are_told_apart(engines: Schedulers, kind: str) -> None:
    """Both engines are asked at once, with one `transfer_id` for two prompts."""
    name = {"transfer_id": f"x-{kind}"}
    known = asked(engines, f"place-{kind}", ids=[1])
    loads = {**{key: known[key] for key in PLACE}, **name, "do_remote_prefill": True}
    names = []
    for at, prompt in enumerate(PROMPTS[kind]):
        answer = asked(engines, f"p-{kind}-{at}", name, **prompt)
        request = given(engines, f"d-{kind}-{at}", loads, **prompt)
        assert awaited(engines, request) == answer["remote_request_id"]
        assert outcome(engines, request) == "loaded"
        names.append(answer["remote_request_id"])
    assert names[0] != names[1]
    assert [each.split("#")[0] for each in names] == [f"x-{kind}"] * 2


@pytest.mark.parametrize("kind", PROMPTS)
def test_an_answer_is_to_one_prompt(engines: Schedulers, kind: str) -> None:
    """The prefill engine is asked first. vLLM gives the params of a completion's first prompt to all of them."""
    first, second = PROMPTS[kind]
    answer = asked(engines, f"cmpl-{kind}-0-00000000", **first)
    assert outcome(engines, given(engines, f"cmpl-{kind}-0-11111111", answer, **first)) == "loaded"
    for at in (1, 20):
        assert outcome(engines, given(engines, f"cmpl-{kind}-{at}-11111111", answer, **second)) == "computed"
        assert outcome(engines, given(engines, f"1_cmpl-{kind}-{at}-11111111", answer, **second)) == "computed"
    for other in (f"cmpl-1-{kind}-0-11111111", f"chatcmpl-{kind}-1-11111111", f"{kind}-1"):
        assert "is to another prompt" in outcome(engines, given(engines, other, answer, **second))


def test_an_answer_without_blocks_is_to_one_prompt(engines: Schedulers) -> None:
    """That of a prefill engine which gives a name in their place."""
    first, second = PROMPTS["ids"]
    answer = asked(engines, "cmpl-late-0-00000000", **first)
    name = f"cmpl-late-0#{answer['remote_prompt_digest']}"
    late = {**answer, "remote_block_ids": None, "remote_request_id": None, "transfer_id": name}
    request = given(engines, "cmpl-late-0-11111111", late, **first)
    assert (outcome(engines, request), awaited(engines, request)) == ("loaded", name)
    assert outcome(engines, given(engines, "cmpl-late-1-11111111", late, **second)) == "computed"
    assert "is to another prompt" in outcome(engines, given(engines, "chatcmpl-late-11111111", late, **second))


def test_late_samples_have_names_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill engine computes several samples of a prompt, and answers with a name in place of blocks."""
    monkeypatch.setattr(scheduler, "writes_late", lambda *_: True)
    write_model(tmp_path)
    with ExitStack() as stack:
        engines = LoneScheduler(stack, "kv_producer", tmp_path), LoneScheduler(stack, "kv_consumer", tmp_path)
        answers = [asked(engines, f"{at}_cmpl-n-0-00000000", ids=[7] * TOKENS) for at in (0, 1)]
        names = [answer["transfer_id"] for answer in answers]
        assert len(set(names)) == 2
        for at, answer in enumerate(answers):
            request = given(engines, f"{at}_cmpl-n-0-11111111", answer, ids=[7] * TOKENS)
            assert (outcome(engines, request), awaited(engines, request)) == ("loaded", names[at])


@pytest.mark.parametrize("kind", PROMPTS)
def test_an_answer_that_names_no_prompt(engines: Schedulers, kind: str) -> None:
    """Of a prefill engine of an earlier release, which has no digest of embeddings."""
    prompt = PROMPTS[kind][0]
    answer = {**asked(engines, f"cmpl-old-{kind}-0-00000000", **prompt), "remote_prompt_digest": None}
    later = given(engines, f"cmpl-old-{kind}-1-11111111", answer, **prompt)
    first = given(engines, f"cmpl-old-{kind}-0-11111111", answer, **prompt)
    assert outcome(engines, later) == "computed"
    expected = "does not say to which prompt embeddings it is" if "prompt_embeds" in prompt else "loaded"
    assert expected in outcome(engines, first)


@pytest.mark.parametrize("identifier", NUMBERED)
@pytest.mark.parametrize("name", [{}, {"transfer_id": "x"}], ids=["in turn", "at once"])
def test_a_prompt_without_a_digest_is_handed_over_to_nobody(engines: Schedulers, identifier: str, name: Params) -> None:
    prompt: Params = {"ids": [7] * TOKENS, "mm_features": media((identifier, 20, 9))}
    request = f"chatcmpl-{identifier}-{len(name)}"
    assert asked(engines, request, name, **prompt) == {}
    # As an earlier release answers.
    answer = asked(engines, f"{request}-old", ids=[7] * TOKENS)
    answer = {**answer, "remote_prompt_digest": None}
    loads = {**{key: answer[key] for key in PLACE}, **name, "do_remote_prefill": True} if name else answer
    assert "--mm-processor-cache-gb" in outcome(engines, given(engines, request, loads, **prompt))


def rejected(engines: Schedulers, request: str, params: Params) -> None:
    """A request of this id, that vLLM has rejected."""
    decode = engines[1].connector
    made = make([0], request, params=params, abort_immediately=True)
    decode.on_new_request(made)
    made.status = RequestStatus.FINISHED_ABORTED
    assert decode.request_finished(made, []) == (False, None)


def test_a_rejected_request_is_given_back(engines: Schedulers, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM tells of it by an id that no client knows, with a placeholder for its prompt."""
    stats = engines[1].connector._scheduler._scheduler.stats
    before = stats()["releases"]
    answer = asked(engines, "cmpl-rejected-0-00000000", ids=[7] * TOKENS)
    rejected(engines, "0b5a", answer)
    assert stats()["releases"] - before == 1
    name = f"cmpl-rejected-0#{answer['remote_prompt_digest']}"
    late = {**answer, "remote_block_ids": None, "remote_request_id": None, "transfer_id": name}
    rejected(engines, "0b5b", {**late, "transfer_mode": "push"})
    assert stats()["releases"] - before == 2
    # Nobody knows what the others are called.
    place = {key: answer[key] for key in PLACE}
    rejected(engines, "0b5c", {**place, "transfer_id": "x-rejected", "do_remote_prefill": True})
    rejected(engines, "0b5d", {**answer, "remote_port": "many"})
    assert stats()["releases"] - before == 2
    assert caplog.records == []


def test_the_words_of_a_name_come_from_the_digest(engines: Schedulers) -> None:
    answer = asked(engines, "p-words", {"transfer_id": "x-words"}, ids=[7] * TOKENS)
    digest = history.fingerprint(make([7] * TOKENS))
    assert (answer["remote_request_id"], answer["remote_prompt_digest"]) == (f"x-words#{digest}", digest)
