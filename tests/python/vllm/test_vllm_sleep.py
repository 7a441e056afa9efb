"""vLLM's sleep while transfers are under way. Without `--enable-sleep-mode` it is a pause: all requests are aborted, no
new one starts, and when nothing is left to do the caches are dropped. With it, the cache's memory is unmapped, of which
vLLM tells a connector from 0.33 on; here no page of it can be touched meanwhile. For 0.32's refusal see
`test_vllm_support.py`."""

from __future__ import annotations

import pytest
from mini_trio import P_SALT, STEADY_LEASE_MS, Trio, prompt

pytestmark = pytest.mark.release

POLICY = "fail"


def test_a_cpu_engine_has_no_sleep_mode(trio: Trio) -> None:
    """vLLM refuses the option itself there, so that nothing ever unmaps a registered cache on a CPU."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not built for CPU")
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        EngineArgs(model=trio.model, skip_tokenizer_init=True, enable_sleep_mode=True).create_model_config()


def test_decode_engine_that_falls_asleep_in_a_load(trio: Trio) -> None:
    decode = trio.decode[POLICY]
    trio.works(decode)
    words = prompt(160, 400)
    params = trio.prefilled(trio.steady, "dozing", words)
    trio.steady.freeze()
    try:
        decode.call("add", "dozing", words, 4, params)
        trio.loading(decode, "dozing")
        # The load cannot end well while the other engine does not move: the abort ends it.
        decode.call("fall_asleep")
    finally:
        trio.steady.thaw()
    trio.whole(trio.steady, decode)
    # What arrives now waits, and its prompt is kept by the prefill engine: its lease is asked for all the time.
    later = prompt(161, 200)
    decode.call("add", "meanwhile", later, 4, trio.prefilled(trio.steady, "meanwhile", later))
    for _ in range(50):
        decode.call("step")
    assert decode.call("state")["requests"] == {"meanwhile": "WAITING"}
    decode.call("wake_up")
    assert trio.answer(decode, "meanwhile")["reason"] == "length"
    _, d = trio.whole(trio.steady, decode)
    assert d["starts"]["meanwhile"][0] == len(later) - 1
    assert d["wrong_bytes"]["meanwhile"] == 0
    trio.works(decode)


def test_prefill_engine_that_falls_asleep_while_it_is_read(trio: Trio) -> None:
    """It sleeps when the decode engine has what it came for, not before."""
    decode, words = trio.decode[POLICY], prompt(162, 400)
    trio.works(decode)
    params = trio.prefilled(trio.steady, "read", words)
    decode.call("add", "read", words, 4, params)
    trio.loading(decode, "read")
    trio.steady.start("fall_asleep")
    assert trio.answer(decode, "read")["reason"] == "length"
    trio.steady.result("fall_asleep")
    trio.steady.call("wake_up")
    _, d = trio.whole(trio.steady, decode)
    assert d["starts"]["read"][0] == len(words) - 1
    assert d["wrong_bytes"]["read"] == 0
    trio.works(decode)


def test_prefill_engine_that_falls_asleep_with_what_nobody_fetches(trio: Trio) -> None:
    """It sleeps when the lease has run out."""
    frail = trio.frail
    before = frail.call("state")["figures"].get("sends_expired", 0)
    trio.prefilled(frail, "kept", prompt(163, 300))
    frail.call("fall_asleep")
    assert frail.call("state")["figures"]["sends_expired"] == before + 1
    frail.call("wake_up")
    trio.whole(frail)


@pytest.mark.parametrize("mapped", ["same", "another"])
def test_decode_engine_whose_cache_is_unmapped(trio: Trio, mapped: str) -> None:
    decode = trio.decode[POLICY]
    trio.works(decode)
    decode.call("fall_asleep", True)
    # What arrives now waits. Nobody asks for its lease to be kept, which lasts for a while by itself.
    words = prompt(164 if mapped == "same" else 165, 200)
    decode.call("add", mapped, words, 4, trio.prefilled(trio.steady, mapped, words))
    gone, others = f"{mapped}-gone", prompt(180 if mapped == "same" else 181, 100)
    decode.call("add", gone, others, 4, trio.prefilled(trio.steady, gone, others))
    for _ in range(20):
        decode.call("step")
    decode.call("abort", gone)
    for _ in range(20):
        decode.call("step")
    decode.call("wake_up", mapped)
    assert trio.answer(decode, mapped)["reason"] == "length"
    _, d = trio.whole(trio.steady, decode)
    assert d["starts"][mapped][0] == len(words) - 1
    assert d["wrong_bytes"][mapped] == 0
    trio.works(decode)


def test_requests_that_wait_keep_their_prefills_over_an_unmapped_sleep(trio: Trio) -> None:
    """What was announced to the workers before is not given back when they end, and is announced again."""
    decode, words = trio.decode[POLICY], prompt(166, 200)
    trio.works(decode)
    decode.call("fall_asleep")
    decode.call("add", "early", words, 4, trio.prefilled(trio.steady, "early", words))
    for _ in range(20):
        decode.call("step")
    # As when a pause becomes a sleep.
    decode.call("unmap")
    decode.call("wake_up", "another")
    assert trio.answer(decode, "early")["reason"] == "length"
    _, d = trio.whole(trio.steady, decode)
    assert d["starts"]["early"][0] == len(words) - 1
    assert d["wrong_bytes"]["early"] == 0
    trio.works(decode)


@pytest.mark.parametrize("mapped", ["same", "another"])
def test_prefill_engine_whose_cache_is_unmapped(trio: Trio, mapped: str) -> None:
    """Decode engines follow by themselves, and get nothing of what the memory holds that it had before."""
    decode, producer = trio.decode[POLICY], trio.add_producer(P_SALT, STEADY_LEASE_MS)
    try:
        registered = set()
        for turn in range(3):
            name, words = f"{mapped}-{turn}", prompt(170 + turn + (3 if mapped == "same" else 0), 300)
            params = trio.prefilled(producer, name, words)
            assert trio.decoded(decode, name, words, params)["reason"] == "length"
            p, d = trio.whole(producer, decode)
            # What the workers before had is not added up.
            registered.add(p["figures"]["registered_bytes"])
            assert d["starts"][name][0] == len(words) - 1
            assert d["wrong_bytes"][name] == 0
            producer.call("fall_asleep", True)
            # Its prefills are gone: an error, and the process that is asked for them lives.
            assert trio.decoded(decode, f"{name}-again", words, params)["reason"] == "error"
            producer.call("wake_up", mapped)
        trio.whole(producer, decode)
        assert len(registered) == 1, registered
    finally:
        producer.close()
    trio.works(decode)
