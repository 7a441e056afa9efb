"""`kv_transfer_params` as proxies send them: with every key that they know, null where they have nothing to say."""

from __future__ import annotations

from typing import Any

import pytest
from lone_scheduler import LoneScheduler
from mini_trio import Trio, prompt

NEEDED = (
    "do_remote_prefill",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
)
OPTIONAL = (
    "do_remote_decode",
    "transfer_id",
    "remote_incarnation",
    "remote_num_tokens",
    "remote_lease_ms",
    "remote_lease_id",
    "tp_size",
    "pp_size",
    "dcp_size",
    "transfer_mode",
)
NULLS: dict[str, Any] = dict.fromkeys((*NEEDED, *OPTIONAL))
WORDS = prompt(300, 70)


def handed_over(
    engines: tuple[LoneScheduler, LoneScheduler], name: str, asked: dict[str, Any], nulls: dict[str, Any]
) -> None:
    """The prefill is kept, and the decode engine loads it."""
    prefill, decode = engines
    prefill.add(name, WORDS, 1, asked)
    params = prefill.until_answered(name)["params"]
    assert params, "nothing was handed over"
    prefill.turn(sent=[name])
    decode.add(name, WORDS, 2, {**params, **nulls})
    decode.turn()
    assert str(decode.scheduler.requests[name].status) == "WAITING_FOR_REMOTE_KVS"
    decode.turn(received=[name])
    decode.until_answered(name)
    for engine in engines:
        engine.turn()
        engine.assert_whole()


@pytest.mark.parametrize("key", [key for key in NULLS if key != "do_remote_decode"])
def test_one_key_of_a_prefill_is_null(engines: tuple[LoneScheduler, LoneScheduler], key: str) -> None:
    handed_over(engines, f"prefill-{key}", {"do_remote_decode": True, key: None}, {})


@pytest.mark.parametrize("key", OPTIONAL)
def test_one_key_of_a_load_is_null(engines: tuple[LoneScheduler, LoneScheduler], key: str) -> None:
    handed_over(engines, f"load-{key}", {"do_remote_decode": True}, {key: None})


def test_every_key_that_is_not_needed_is_null(engines: tuple[LoneScheduler, LoneScheduler]) -> None:
    handed_over(engines, "nulls", {**NULLS, "do_remote_decode": True}, dict.fromkeys(OPTIONAL))


def test_neither_role_is_asked_for(engines: tuple[LoneScheduler, LoneScheduler]) -> None:
    """Such a request is none of ours: it is computed, and nothing is kept of it."""
    for engine in engines:
        for name, params in (("no-role", NULLS), ("empty", {})):
            engine.add(name, WORDS, 1, params)
            assert engine.until_answered(name)["params"] is None
        engine.turn()
        engine.assert_whole()


@pytest.mark.parametrize("key", NEEDED[1:])
def test_a_needed_key_that_is_null_fails_the_request(engines: tuple[LoneScheduler, LoneScheduler], key: str) -> None:
    """As one that is missing: the workers are told to report the load as failed."""
    prefill, decode = engines
    name = f"needed-{key}"
    prefill.add(name, WORDS, 1, {"do_remote_decode": True})
    params = prefill.until_answered(name)["params"]
    prefill.turn(sent=[name])
    decode.add(name, WORDS, 2, {**params, key: None})
    refused = decode.turn().refused
    assert f"do_remote_prefill needs {key}, which is missing" in refused[name].message
    decode.abort(name)
    decode.turn(received=[name])
    for engine in engines:
        engine.turn()
        engine.assert_whole()


def test_more_block_ids_than_the_prompt_has_tokens(engines: tuple[LoneScheduler, LoneScheduler]) -> None:
    """The load fails alone: another one of the same step is handed out."""
    prefill, decode = engines
    prefill.add("p-many", WORDS, 1, {"do_remote_decode": True})
    params = prefill.until_answered("p-many")["params"]
    prefill.turn(sent=["p-many"])
    decode.add("many", WORDS, 2, {**params, "remote_block_ids": [[0] * 4_194_305]})
    decode.add("few", WORDS, 2, params)
    metadata = decode.turn()
    assert "4194305 block ids" in metadata.refused["many"].message
    assert "few" not in metadata.refused
    assert b"few" in metadata.step
    for name in ("many", "few"):
        decode.abort(name)
    assert set(decode.scheduler.requests) == {"many", "few"}, "vLLM takes reports only of requests that it knows"
    decode.turn(received=["many", "few"])
    for engine in engines:
        engine.turn()
        engine.assert_whole()


def test_hand_over_with_every_key_that_is_not_needed_null(trio: Trio) -> None:
    """With workers: every byte is right."""
    decode, words = trio.decode["fail"], prompt(320, 70)
    trio.steady.call("add", "p-nulls", words, 1, {**NULLS, "do_remote_decode": True})
    params = trio.answer(trio.steady, "p-nulls")["params"]
    trio.steady.call("step")
    assert trio.decoded(decode, "nulls", words, {**params, **dict.fromkeys(OPTIONAL)})["reason"] == "length"
    _, state = trio.whole(trio.steady, decode)
    assert (state["starts"]["nulls"][0], state["wrong_bytes"]["nulls"]) == (len(words) - 1, 0)
