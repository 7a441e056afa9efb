"""What prefills are called, and what becomes of the params of proxies for other connectors, without engines."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
import torch
from kvferry.vllm import dialects
from kvferry.vllm.request_ids import library_id

Params = dict[str, Any]

LOAD = {"do_remote_prefill": True, "do_remote_decode": False}
PLACE = ("remote_engine_id", "remote_host", "remote_port")
PROMPT = "remote_prompt_digest"
AT: Params = dict(zip(PLACE, ("e", "h", 1), strict=True))
DIGEST = "8fa2d816795bf6f1d3c7752f025f6dad"
OTHER = "0123456789abcdef" * 2


def request(request_id: str, **more: Any) -> Any:
    """As much of a request as names are made of."""
    plain: Params = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None}
    plain |= {"all_token_ids": [7, 8, 9], "num_prompt_tokens": 3, "abort_immediately": False}
    plain |= {"prompt_token_ids": [7, 8, 9]}
    return SimpleNamespace(**{"request_id": request_id, **plain, **more})


def understood(request_id: str, params: Params, **more: Any) -> Params:
    return dict(dialects.understood(request(request_id, **more), params))


@pytest.mark.parametrize(
    ("request_id", "base"),
    [
        ("cmpl-5f-0-0a1b2c3d", "cmpl-5f-0"),
        ("11_cmpl-5f-0-0a1b2c3d", "cmpl-5f-0"),
        ("chatcmpl-12_5f-0a1b2c3d", "chatcmpl-12_5f"),
        ("cmpl-0a1b2c3d-0", "cmpl-0a1b2c3d-0"),
        ("cmpl-0a1b2c3", "cmpl-0a1b2c3"),
        ("cmpl-0a1b2c3de", "cmpl-0a1b2c3de"),
        ("cmpl-0a1b2c3g", "cmpl-0a1b2c3g"),
    ],
)
def test_names_that_two_engines_share(request_id: str, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dialects.base_name(request_id) == base
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert dialects.base_name(request_id) == request_id.removeprefix("11_")


def test_names_are_made_once_and_fit() -> None:
    name = dialects.name_of("x", DIGEST)
    assert name == f"x#{DIGEST}" == dialects.name_of(name, DIGEST)
    assert dialects.name_of(name, OTHER) == f"x#{DIGEST}#{OTHER}"
    assert dialects.name_of("x", None) == "x"
    # The limit is one of bytes, for what a proxy gives and for what is made of it.
    for base in ("x" * 479, "\u00e4" * 239 + "x"):
        assert dialects.name_of(base, DIGEST) == f"{base}#{DIGEST}"
    for base in ("x" * 480, "x" * 512, "\u00e4" * 240, "\u00e4" * 256):
        assert dialects.name_of(base, DIGEST) == f"{hashlib.sha256(base.encode()).hexdigest()}#{DIGEST}"
    # Nor need what a proxy gives, or what its header became, be a text that the library takes.
    for base in ("x" * 513, "\u00e4" * 257, f"{'x' * 513}#{DIGEST}", "\ud800"):
        hashed = hashlib.sha256(base.encode("utf-8", "surrogatepass")).hexdigest()
        assert dialects.name_of(base, DIGEST) == f"{hashed}#{DIGEST}"
        assert dialects.name_of(base, None) == hashed
    assert dialects.name_of("x" * 513, DIGEST) != dialects.name_of("x" * 513 + "y", DIGEST)
    # What `kvferry.Scheduler` refuses by name.
    assert dialects.name_of("", DIGEST) == ""


@pytest.mark.parametrize("late", [False, True])
def test_a_prefill_is_called(late: bool) -> None:
    def name(params: Params, digest: str | None = DIGEST) -> str | None:
        return dialects.name_of_prefill(request("0_cmpl-5f-0-ffeeddcc"), params, digest, late)

    history = {"remote_block_ids": [[1]]}
    assert name({"transfer_id": "x"}) == name({"transfer_id": "x", **history}) == f"x#{DIGEST}"
    assert name({"transfer_id": "x"}, None) == "x"
    assert name({"transfer_id": 7}) is None
    assert name({}) == name({"transfer_id": None, "remote_block_ids": None}) == f"cmpl-5f-0#{DIGEST}"
    assert name({}, None) is None
    assert name(history) == (f"0_cmpl-5f-0-ffeeddcc#{DIGEST}" if late else None)


@pytest.mark.parametrize(
    ("request_id", "header"),
    [
        ("cmpl-5f-0-ffeeddcc", "5f"),
        ("chatcmpl-5f-ffeeddcc", "5f"),
        ("chatcmpl-5f_1-ffeeddcc", "5f"),
        ("0_cmpl-5f-0-ffeeddcc", "5f"),
        ("generate-tokens-5f-ffeeddcc", "5f"),
        ("cmpl-x-0-y-3-0-ffeeddcc", "x-0-y-3"),
        ("chatcmpl-5f-12-ffeeddcc", "5f-12"),
        ("cmpl-5f-12-ffeeddcc", "5f"),
    ],
)
def test_a_request_is_named_by_its_header(request_id: str, header: str) -> None:
    assert dialects.is_named_by(request_id, header) is True
    params = {**LOAD, **AT, "remote_request_id": header}
    name = f"{dialects.base_name(request_id)}#{DIGEST}"
    assert understood(request_id, params) == {**params, "remote_request_id": None, "transfer_id": name}


@pytest.mark.parametrize(
    "header",
    [
        *("cmpl-5f-0-0a1b2c3d", "cmpl-5f-0", "5", "f-0", "0", "5f-", "5f-1", "", None, 7, ["5f"], ".*"),
        "a" * 10_000_000,
    ],
)
def test_an_answer_that_lost_its_blocks_is_not_taken_for_a_push(header: Any) -> None:
    params = {**LOAD, **AT, "remote_request_id": header}
    assert understood("cmpl-5f-0-ffeeddcc", params) == params


@pytest.mark.parametrize(
    ("request_id", "header"),
    [("5f-ffeeddcc", "5f"), ("c2-5f-ffeeddcc", "5f"), ("-5f", "5f"), ("cmpl5f", "5f"), ("cmpl-", "5f"), ("cmpl-", "")],
)
def test_a_request_without_a_word_in_front_is_not_named_by_a_header(request_id: str, header: str) -> None:
    assert dialects.is_named_by(request_id, header) is False


@pytest.mark.parametrize("mode", [None, "pull", "push"])
def test_what_was_given_by_name_is_awaited(mode: str | None) -> None:
    params = {**LOAD, **AT, "transfer_id": "x", "remote_request_id": "5f", "transfer_mode": mode}
    own = {**params, "transfer_id": f"x#{DIGEST}", "remote_request_id": None}
    assert understood("r", params) == {**own, "transfer_mode": None if mode == "push" else mode}
    assert understood("r", {**LOAD, **AT, "transfer_id": "x"}) == {
        **LOAD,
        **AT,
        "transfer_id": f"x#{DIGEST}",
        "remote_request_id": None,
    }
    # What `kvferry.Scheduler` refuses by name.
    assert understood("r", {**params, "transfer_id": 7})["transfer_id"] == 7


def test_an_answer_that_was_pushed_is_loaded() -> None:
    answer = {**LOAD, **AT, "remote_block_ids": [[1]], PROMPT: DIGEST, "remote_incarnation": "0" * 15 + "1"}
    assert understood("r", {**answer, "transfer_mode": "push"}) == {**answer, "transfer_mode": None}
    # Of another connector, or as it is.
    for params in (
        {**answer, "transfer_mode": "push", "remote_incarnation": None},
        {**answer, "transfer_mode": "pull"},
    ):
        assert understood("r", params) == params


@pytest.mark.parametrize("blocks", [[[1]], None], ids=["blocks", "a name"])
def test_an_answer_is_to_its_prompt_only(blocks: Any) -> None:
    name = None if blocks else f"x#{OTHER}"
    answer = {**LOAD, **AT, "remote_block_ids": blocks, "transfer_id": name, PROMPT: OTHER}
    for request_id in ("cmpl-5f-1-ffeeddcc", "cmpl-5f-12-ffeeddcc", "3_cmpl-5f-1-ffeeddcc", "cmpl-5-0-9"):
        assert understood(request_id, answer) == {}
        assert understood(request_id, {**answer, PROMPT: DIGEST}) != {}
    for request_id in ("cmpl-5f-0-ffeeddcc", "cmpl-5-1-0", "chatcmpl-5f-1-ffeeddcc", "cmpl-1", "x-cmpl-5f-1", "r"):
        for stated in (OTHER, 7):
            with pytest.raises(kvferry.InvalidArgumentError, match="is to another prompt"):
                understood(request_id, {**answer, PROMPT: stated})


def test_an_answer_that_names_no_prompt_is_the_first_prompts() -> None:
    answer = {**LOAD, **AT, "remote_block_ids": [[1]]}
    assert understood("cmpl-5f-0-ffeeddcc", answer) == answer
    assert understood("cmpl-5f-1-ffeeddcc", answer) == {}
    # An earlier release has no digest of embeddings, whatever their prompt is.
    embeds = {"prompt_embeds": torch.zeros(3, 4), "prompt_is_token_ids": None}
    assert understood("cmpl-5f-1-ffeeddcc", answer, **embeds) == {}
    with pytest.raises(kvferry.InvalidArgumentError, match="does not say to which prompt embeddings it is"):
        understood("cmpl-5f-0-ffeeddcc", answer, **embeds)


def test_a_prompt_without_a_digest_is_refused() -> None:
    position = SimpleNamespace(offset=1, length=1)
    media = [SimpleNamespace(identifier="renderer0-mm-7-image-0", mm_position=position)]
    for params in ({"remote_block_ids": [[1]]}, {"transfer_id": "x"}, {"remote_request_id": "5f"}):
        for request_id in ("cmpl-5f-0-ffeeddcc", "cmpl-5f-1-ffeeddcc"):
            with pytest.raises(kvferry.InvalidArgumentError, match="--mm-processor-cache-gb"):
                understood(request_id, {**LOAD, **AT, **params}, mm_features=media)


def test_a_rejected_request_gives_back_what_an_answer_names() -> None:
    def given_back(params: Params) -> Params:
        # A digest of the placeholder is of no use.
        return understood("5f", params, abort_immediately=True, prompt_token_ids=[0])

    answer = {**LOAD, **AT, "remote_block_ids": [[1]]}
    for params in (answer, {**answer, PROMPT: OTHER}):
        assert given_back(params) == params
    late = {**LOAD, **AT, "transfer_id": f"x#{OTHER}", PROMPT: OTHER}
    assert given_back(late) == {**late, "remote_request_id": None}
    for asked in ({"transfer_id": "x"}, {"remote_request_id": "5f"}, {}):
        assert given_back({**LOAD, **AT, **asked}) == {}
    # An engine that is paused rejects a request with its own prompt.
    own = understood("5f", {**LOAD, **AT, "transfer_id": "x"}, abort_immediately=True)
    assert own["transfer_id"] == f"x#{DIGEST}"


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("10.0.0.7", 5680, "10.0.0.7:5680"),
        ("node-3.example.org", 1, "node-3.example.org:1"),
        ("fe80::1", 65535, "[fe80::1]:65535"),
        ("::1", 5680, "[::1]:5680"),
    ],
)
def test_an_engine_id_says_where_its_listener_is(host: str, port: int, text: str) -> None:
    params = {**LOAD, "transfer_id": "x", "remote_bootstrap_addr": "http://1.2.3.4:8998"}
    engine_id = dialects.addressed_id("engine@home_dp1", host, port)
    assert engine_id == f"engine@home_dp1@{text}"
    own = understood("r", {**params, "remote_engine_id": engine_id})
    assert [own[key] for key in PLACE] == ["engine@home_dp1", host, port]
    # Where it is given, or none of Mooncake's, it is an id like any other.
    for more in ({"remote_host": "h"}, {"remote_bootstrap_addr": None}):
        assert understood("r", {**params, "remote_engine_id": engine_id, **more})["remote_engine_id"] == engine_id


@pytest.mark.parametrize(
    "engine_id",
    [
        *(None, 7, "", "engine", "engine@", "engine@host", "engine@host:x", "@host:1", "e@[]:1", "e@:1", "e@h:"),
        *("e@h:123456", "e@[::1]", "e@[a[b]:1", "e@a:b:1"),
    ],
)
def test_an_engine_id_of_another_connector_is_left_as_it_is(engine_id: Any) -> None:
    params = {**LOAD, "transfer_id": "x", "remote_bootstrap_addr": "http://1.2.3.4:8998", "remote_engine_id": engine_id}
    own = understood("r", params)
    assert (own.get("remote_host"), own["remote_engine_id"]) == (None, engine_id)


def test_an_answer_passes_for_one_of_a_push() -> None:
    answer: Params = {"transfer_mode": "pull", "remote_port": 1}
    dialects.as_push(answer)
    assert answer == {"transfer_mode": "push", "remote_port": 1}


def test_the_library_knows_a_request_by_another_id_where_it_does_not_take_vllms() -> None:
    for taken in ("x", "x" * 512, "\u00e4" * 256, "null\0", "1...sha256-23"):
        assert library_id(taken) == taken
    others = ["x" * 513, "x" * 512 + "y", "\u00e4" * 257, "half-\ud800", "half-\ud801", ""]
    # Whoever knows such an id must not give it to a request of its own.
    others.append(library_id(others[0]))
    found = [library_id(other) for other in others]
    assert len(set(found)) == len(others)
    assert all(0 < len(each.encode()) <= 512 for each in found)
    assert found[0] == f"{'x' * 48}...sha256-{hashlib.sha256(b'x' * 513).hexdigest()}"
