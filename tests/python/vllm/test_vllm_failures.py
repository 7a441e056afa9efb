"""Loads that fail, for each cause: under vLLM's policy `recompute` the decode engine computes the prompt, under `fail`
the request ends with an error; and in both cases nothing is left behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from mini_config import BLOCK, Settings, write_model
from mini_remote import Remote
from mini_trio import POLICIES, REMOTE_DECODE, Trio, prompt


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A prefill engine of another model."""
    model = write_model(tmp_path_factory.mktemp("other-model"), layers=5)
    engine = Remote(Settings("kv_producer", model, 3)).wait_started()
    yield engine
    engine.close()


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    policy: str = request.param
    return policy


def ended(trio: Trio, policy: str, name: str, words: list[int], answer: dict[str, Any], *causes: str) -> None:
    """The load failed for one of `causes`, and the request ended by the policy."""
    decode = trio.decode[policy]
    (state,) = trio.whole(decode)
    failed = state["failed"][name]
    assert failed["cause"] in causes, failed
    assert failed["message"]
    # The library names the blocks of all groups; vLLM takes them where there is one group, and refuses them elsewhere.
    assert failed["blocks"] == failed["held"]
    assert failed["told"] == ([] if trio.hybrid else failed["blocks"])
    if policy == "fail":
        assert (answer["reason"], answer["tokens"]) == ("error", [])
        assert name not in state["starts"]
    else:
        assert (answer["reason"], len(answer["tokens"])) == ("length", 4)
        assert state["starts"][name][0] == 0
    # What has been loaded so far serves nobody: under "fail" the same prompt is computed from the start.
    again = f"{name}-again"
    assert trio.decoded(decode, again, words, None)["reason"] == "length"
    (state,) = trio.whole(decode)
    if policy == "fail":
        assert state["starts"][again][0] == 0
    trio.works(decode)


def test_lease_that_has_run_out(trio: Trio, policy: str) -> None:
    name, words = f"late-{policy}", prompt(101, 100)
    before = trio.frail.call("state")["figures"].get("sends_expired", 0)
    params = trio.prefilled(trio.frail, name, words)
    trio.frail.call("run_until", f"e.figures.get('sends_expired', 0) > {before}")
    trio.whole(trio.frail)
    answer = trio.decoded(trio.decode[policy], name, words, params)
    ended(trio, policy, name, words, answer, "lease_expired")


def test_request_that_the_producer_does_not_know(trio: Trio) -> None:
    """It might have been on its way to the producer's worker: the decode engines wait for its word, both at once."""
    words = prompt(102, 90)
    params = {policy: trio.prefilled(trio.steady, f"unknown-{policy}", words) for policy in POLICIES}
    for policy, real in params.items():
        asked = {**real, "remote_request_id": f"p-never-there-{policy}"}
        trio.decode[policy].call("add", f"unknown-{policy}", words, 4, asked)
        trio.loading(trio.decode[policy], f"unknown-{policy}")
    answers = {policy: trio.answer(trio.decode[policy], f"unknown-{policy}") for policy in POLICIES}
    for policy, real in params.items():
        # The real one is given back.
        trio.decode[policy].call("add", f"unknown-{policy}-real", words, 4, real)
        trio.decode[policy].call("abort", f"unknown-{policy}-real")
    trio.whole(*trio.decode.values())
    for policy, answer in answers.items():
        ended(trio, policy, f"unknown-{policy}", words, answer, "lease_expired", "timeout")


def test_prefill_that_is_aborted_while_the_decode_engine_waits(trio: Trio, policy: str) -> None:
    name, words = f"waits-{policy}", prompt(108, 90)
    place = trio.prefilled(trio.steady, f"{name}-before", [7])
    decode = trio.decode[policy]
    params = {key: place[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    decode.call("add", name, words, 4, {**params, "do_remote_prefill": True, "transfer_id": f"x-{name}"})
    for _ in range(5):
        decode.call("step")
    trio.steady.call("add", f"p-{name}", words, 1, {**REMOTE_DECODE, "transfer_id": f"x-{name}"})
    trio.steady.call("abort", f"p-{name}")
    trio.steady.call("step")
    # The one that was prefilled to learn the place is given back.
    decode.call("add", f"{name}-real", [7], 4, place)
    decode.call("abort", f"{name}-real")
    decode.call("run_until", f"'reason' in e.answers.get('{name}', {{}})")
    ended(trio, policy, name, words, trio.answer(decode, name), "lease_expired")


def test_nobody_listens(trio: Trio, policy: str) -> None:
    name, words = f"nobody-{policy}", prompt(103, 80)
    with socket.socket() as probe:
        # Bound and not listening: connections are refused, and nobody else takes the port meanwhile.
        probe.bind(("127.0.0.1", 0))
        groups = [list(range(1, 6))] * (2 if trio.hybrid else 1)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "nobody",
            "remote_request_id": "p-x",
            "remote_host": "127.0.0.1",
            "remote_port": probe.getsockname()[1],
            "remote_block_ids": groups,
            "remote_num_tokens": 80,
            "tp_size": 1,
            "pp_size": 1,
        }
        answer = trio.decoded(trio.decode[policy], name, words, params)
    ended(trio, policy, name, words, answer, "handshake_failed")


def test_engine_of_another_model(trio: Trio, stranger: Remote, policy: str) -> None:
    name, words = f"stranger-{policy}-{trio.hybrid}", prompt(104, 70)
    params = trio.prefilled(stranger, name, words)
    if trio.hybrid:
        # As many groups as the decode engine has, so that it is the handshake that refuses.
        params["remote_block_ids"] = params["remote_block_ids"] * 2
    answer = trio.decoded(trio.decode[policy], name, words, params)
    ended(trio, policy, name, words, answer, "incompatible")


def test_peer_that_does_not_move(trio: Trio) -> None:
    """Both decode engines load from it, one of them also a prompt whose beginning it has already and keeps when it
    computes the rest. The peer comes back later, and is used again."""
    shared, recompute = prompt(107, 4 * BLOCK), trio.decode["recompute"]
    # With one token more, the window groups' blocks of the prefix are there too.
    first = [*shared, 1]
    trio.decoded(recompute, "prefix", first, trio.prefilled(trio.steady, "prefix", first))
    for policy in POLICIES:
        trio.works(trio.decode[policy])
    names = {policy: f"frozen-{policy}" for policy in POLICIES}
    words = {name: prompt(105 + at, 300) for at, name in enumerate(names.values())}
    words["behind"] = [*shared, *prompt(109, 60)]
    params = {name: trio.prefilled(trio.steady, name, tokens) for name, tokens in words.items()}
    trio.steady.freeze()
    try:
        for policy, name in (*names.items(), ("recompute", "behind")):
            trio.decode[policy].call("add", name, words[name], 4, params[name])
            trio.loading(trio.decode[policy], name)
        answers = {name: trio.answer(trio.decode[policy], name) for policy, name in names.items()}
        behind = trio.answer(recompute, "behind")
    finally:
        trio.steady.thaw()
    for policy, name in names.items():
        ended(trio, policy, name, words[name], answers[name], "timeout")
    assert (behind["reason"], len(behind["tokens"])) == ("length", 4)
    state = recompute.call("state")
    assert state["failed"]["behind"]["cause"] == "timeout"
    assert state["starts"]["behind"][0] == len(shared)
    assert state["wrong_bytes"]["behind"] == 0


def test_bytes_that_change_under_the_read(trio: Trio, policy: str) -> None:
    """The producer's memory changes all the time: sooner or later it does between the read and its digest."""
    decode = trio.decode[policy]
    trio.steady.call("scribble", True)
    try:
        for attempt in range(250):
            name, words = f"scribbled-{policy}-{attempt}", prompt(200 + attempt, 500)
            answer = trio.decoded(decode, name, words, trio.prefilled(trio.steady, name, words))
            if name in decode.call("state")["failed"]:
                break
        else:
            pytest.fail("no digest ever differed")
    finally:
        trio.steady.call("scribble", False)
    # What it has of these prompts is no cache any more.
    trio.steady.call("fall_asleep")
    trio.steady.call("wake_up")
    ended(trio, policy, name, words, answer, "digest_mismatch")


def test_peer_that_dies_in_the_middle(trio: Trio) -> None:
    """Both decode engines are loading from it."""
    frail, words = trio.frail, {policy: prompt(110 + at, 400) for at, policy in enumerate(POLICIES)}
    for policy in POLICIES:
        # The connections are there before the engine stops.
        known = prompt(120 + POLICIES.index(policy), 40)
        trio.decode[policy].call("add", f"met-{policy}", known, 4, trio.prefilled(frail, f"met-{policy}", known))
        trio.answer(trio.decode[policy], f"met-{policy}")
        frail.call("add", f"p-dies-{policy}", words[policy], 1, REMOTE_DECODE)
        frail.call("run_until", f"'reason' in e.answers.get('p-dies-{policy}', {{}})")
    params = {policy: frail.call("answer", f"p-dies-{policy}")["params"] for policy in POLICIES}
    frail.call("step")
    frail.freeze()
    for policy in POLICIES:
        trio.decode[policy].call("add", f"dies-{policy}", words[policy], 4, params[policy])
        trio.loading(trio.decode[policy], f"dies-{policy}")
    trio.kill_frail()
    for policy in POLICIES:
        answer = trio.answer(trio.decode[policy], f"dies-{policy}")
        ended(trio, policy, f"dies-{policy}", words[policy], answer, "peer_died")
