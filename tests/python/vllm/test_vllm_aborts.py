"""Clients that leave at each stage: afterwards all of the prefill engine's blocks are free again, and the decode
engine's too."""

from __future__ import annotations

import time
from typing import Any

import pytest
from mini_trio import P_SALT, REMOTE_DECODE, STEADY_LEASE_MS, Trio, prompt

POLICY = "fail"


def figures(trio: Trio) -> dict[str, Any]:
    found: dict[str, Any] = trio.steady.call("state")["figures"]
    return found


def given_back(trio: Trio, before: dict[str, Any]) -> None:
    """Both engines are whole, and the prefill engine did not have to wait for its lease; the next request works."""
    after = trio.whole(trio.decode[POLICY], trio.steady)[1]["figures"]
    ends = {key: after.get(key, 0) - before.get(key, 0) for key in ("sends_read", "sends_released", "sends_expired")}
    assert ends["sends_expired"] == 0, ends
    assert ends["sends_read"] + ends["sends_released"] == 1, ends
    trio.works(trio.decode[POLICY])


def test_during_the_handshake(trio: Trio) -> None:
    """The decode engine has asked an engine that it has not met, and there is no answer yet."""
    decode = trio.decode[POLICY]
    fresh = trio.add_producer(P_SALT, STEADY_LEASE_MS)
    try:
        words = prompt(140, 200)
        params = trio.prefilled(fresh, "greeting", words)
        fresh.freeze()
        decode.call("add", "greeting", words, 4, params)
        trio.loading(decode, "greeting")
        handshakes = decode.call("state")["figures"].get("handshakes", 0)
        decode.call("abort", "greeting")
        fresh.thaw()
        after = trio.whole(decode, fresh)[1]["figures"]
        assert (after.get("sends_released", 0), after.get("sends_expired", 0)) == (1, 0)
        assert decode.call("state")["figures"].get("handshakes", 0) >= handshakes
    finally:
        fresh.close()


def test_waiting_and_never_scheduled(trio: Trio) -> None:
    """The decode engine has made its handshake and keeps the lease alive, but has no room yet."""
    decode, before, words = trio.decode[POLICY], figures(trio), prompt(141, 200)
    params = trio.prefilled(trio.steady, "waiting", words)
    decode.call("pause")
    decode.call("add", "waiting", words, 4, params)
    for _ in range(50):
        decode.call("step")
    assert decode.call("state")["requests"] == {"waiting": "WAITING"}
    decode.call("abort", "waiting")
    decode.call("wake_up")
    given_back(trio, before)


def test_before_any_step(trio: Trio) -> None:
    decode, before, words = trio.decode[POLICY], figures(trio), prompt(142, 200)
    params = trio.prefilled(trio.steady, "never", words)
    decode.call("add", "never", words, 4, params)
    decode.call("abort", "never")
    given_back(trio, before)


def test_rejected_before_it_came_to_the_engine(trio: Trio) -> None:
    before = figures(trio)
    params = trio.prefilled(trio.steady, "rejected", prompt(149, 200))
    trio.decode[POLICY].call("reject", "0b5a", params)
    given_back(trio, before)


def test_during_the_load(trio: Trio) -> None:
    """The load is under way and cannot end, because the prefill engine does not move."""
    decode = trio.decode[POLICY]
    trio.works(decode)
    before, words = figures(trio), prompt(143, 400)
    params = trio.prefilled(trio.steady, "midway", words)
    trio.steady.freeze()
    try:
        decode.call("add", "midway", words, 4, params)
        trio.loading(decode, "midway")
        decode.call("abort", "midway")
        # No longer than what cannot end may take: the worker gives the connection up after its grace of 5 s.
        end = time.monotonic() + 1
        for _ in range(20):
            decode.call("step")
            if time.monotonic() > end:
                break
        assert "midway" in decode.call("state")["requests"]
    finally:
        trio.steady.thaw()
    given_back(trio, before)


def test_loaded_and_not_yet_scheduled(trio: Trio) -> None:
    decode, before, words = trio.decode[POLICY], figures(trio), prompt(144, 200)
    decode.call("add", "loaded", words, 4, trio.prefilled(trio.steady, "loaded", words))
    decode.call("run_until", "'loaded' in e.scheduler.finished_recving_kv_req_ids")
    decode.call("abort", "loaded")
    given_back(trio, before)


def test_during_decode(trio: Trio) -> None:
    decode, before, words = trio.decode[POLICY], figures(trio), prompt(145, 200)
    decode.call("add", "decoding", words, 50, trio.prefilled(trio.steady, "decoding", words))
    decode.call("run_until", "e.sources.get('decoding')")
    decode.call("abort", "decoding")
    given_back(trio, before)


@pytest.mark.parametrize("steps", [0, 1])
def test_on_the_prefill_engine_before_its_end(trio: Trio, steps: int) -> None:
    """In its queue, and between two parts of a long prompt: nothing is kept."""
    words = prompt(146 + steps, 900)
    trio.steady.call("chunk", 256)
    try:
        trio.steady.call("add", f"p-gone-{steps}", words, 1, REMOTE_DECODE)
        for _ in range(steps):
            trio.steady.call("step")
        trio.steady.call("abort", f"p-gone-{steps}")
        trio.whole(trio.steady)
    finally:
        trio.steady.call("chunk", 0)
    trio.works(trio.decode[POLICY])


def test_after_the_prefill_and_before_the_decode_engine_sees_it(trio: Trio) -> None:
    """Nobody tells the prefill engine: its lease runs out."""
    before = trio.frail.call("state")["figures"].get("sends_expired", 0)
    trio.prefilled(trio.frail, "unseen", prompt(148, 300))
    trio.frail.call("abort", "p-unseen")
    (state,) = trio.whole(trio.frail)
    assert state["figures"]["sends_expired"] == before + 1
