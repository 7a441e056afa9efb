"""The connector under vLLM's real scheduler: a prefill and a decode engine in two processes, every byte checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mini_config import BLOCK, Settings, write_model
from mini_remote import Remote
from mini_runner import RunnerName

P_SALT, D_SALT, OTHER_SALT = 1, 2, 3
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + i * 31 + i * i) % 499 for i in range(tokens)]


class Pair:
    """A prefill and a decode engine, with what a proxy does."""

    def __init__(
        self,
        folder: Path,
        policy: str,
        hybrid: bool,
        child: bool,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        runner: RunnerName = "mixin",
        reads: dict[str, Any] | None = None,
    ) -> None:
        model = write_model(folder)
        self.model, self.hybrid = model, hybrid
        limits = {"transfer_timeout_ms": 20000, **(reads or {})}
        self.states: str = (prefill or {}).get("states", "")
        self.groups = 1 + hybrid + bool(self.states)
        prefill = {"runner": runner, **(prefill or {})}
        decode = {"runner": runner, **(decode or {})}
        self.prefill = Remote(Settings("kv_producer", model, P_SALT, policy, hybrid, child, **prefill))
        self.decode = Remote(Settings("kv_consumer", model, D_SALT, policy, hybrid, child, extra=limits, **decode))
        self.prefill.wait_started()
        self.decode.wait_started()
        self.decode.call("loaded_from", P_SALT)

    def prefilled(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """The params that the prefill engine answers with."""
        self.prefill.call("add", f"p-{name}", tokens, 1, REMOTE_DECODE)
        self.prefill.call("run_until", f"'reason' in e.answers.get('p-{name}', {{}})")
        params: dict[str, Any] = self.prefill.call("answer", f"p-{name}")["params"]
        assert params["do_remote_prefill"] is True
        # The lease goes out with the next step, which vLLM makes because the request is still kept.
        self.prefill.call("step")
        return params

    def decoded(self, name: str, tokens: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
        """The decode engine's answer."""
        self.decode.call("add", name, tokens, 4, params)
        self.decode.call("run_until", f"'reason' in e.answers.get('{name}', {{}})")
        answer: dict[str, Any] = self.decode.call("answer", name)
        return answer

    def quiesce(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs both until nothing is left, and returns their states, with no request and no block left behind."""
        self.decode.call("run_while_needed")
        self.prefill.call("run_while_needed")
        states = self.prefill.call("state"), self.decode.call("state")
        for state in states:
            assert state["requests"] == {}
            assert state["leaked_blocks"] == 0
        return states

    def wrong_bytes_of_others(self, name: str, seed: int) -> int:
        """How many bytes of a load differ from what another prefill engine would have written. Where a
        test finds none wrong, this says that it could have."""
        words = prompt(seed, 64)
        self.decode.call("loaded_from", OTHER_SALT)
        try:
            self.decoded(name, words, self.prefilled(name, words))
        finally:
            self.decode.call("loaded_from", P_SALT)
        return int(self.quiesce()[1]["wrong_bytes"][name])

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture(
    scope="module",
    # Policy, windows beside full attention, child of MultiConnector, how the model runner calls, and how states beside
    # full attention are kept.
    params=[
        ("fail", True, False, "mixin", ""),
        ("recompute", False, False, "active", ""),
        ("fail", False, True, "active", ""),
        ("recompute", False, False, "active", "align"),
    ],
    ids=["fail-hybrid-mixin", "recompute-active", "fail-child-active", "recompute-states-active"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    policy, hybrid, child, runner, states = request.param
    more = {"states": states}
    pair = Pair(tmp_path_factory.mktemp("model"), policy, hybrid, child, more, more, runner)
    yield pair
    pair.close()


@pytest.fixture
def policy(pair: Pair, request: pytest.FixtureRequest) -> str:
    policy: str = request.node.callspec.params["pair"][0]
    return policy


def failed_or_recomputed(policy: str, pair: Pair, name: str, answer: dict[str, Any]) -> None:
    """A load that failed ends by vLLM's policy: with an error, or computed by the decode engine from the start."""
    if policy == "fail":
        assert answer["reason"] == "error"
        assert answer["tokens"] == []
    else:
        assert answer["reason"] == "length"
        assert len(answer["tokens"]) == 4
        assert pair.decode.call("state")["starts"][name][0] % BLOCK == 0


# With 103 tokens the window begins with the last token of a block.
@pytest.mark.parametrize("tokens", [5, BLOCK, 100, 103, 500])
def test_hand_over(pair: Pair, tokens: int) -> None:
    name = f"over-{tokens}"
    words = prompt(tokens, tokens)
    answer = pair.decoded(name, words, pair.prefilled(name, words))
    assert answer["reason"] == "length"
    assert len(answer["tokens"]) == 4
    p, d = pair.quiesce()
    assert d["starts"][name][0] == tokens - 1
    assert d["wrong_bytes"][name] == 0
    assert p["figures"]["sends_read"] >= 1


def test_asked_at_the_same_time_as_the_prefill_engine(pair: Pair) -> None:
    place = {
        key: value
        for key, value in pair.prefilled("before", [7, 8]).items()
        if key in ("remote_engine_id", "remote_host", "remote_port")
    }
    pair.decode.call("add", "before", [7, 8], 4, {**place, "do_remote_prefill": True, "transfer_id": "nobody's"})
    words = {f"at-once-{i}": prompt(40 + i, 60 + 90 * i) for i in range(3)}
    for name, tokens in words.items():
        pair.decode.call("add", name, tokens, 4, {**place, "do_remote_prefill": True, "transfer_id": f"x-{name}"})
    for _ in range(20):
        pair.decode.call("step")
    # The last one first: none waits for another.
    for name, tokens in reversed(words.items()):
        waiting = pair.decode.call("state")["requests"]
        assert all("WAITING_FOR_REMOTE_KVS" in waiting[each] for each in (name, "before"))
        pair.prefill.call("add", f"p-{name}", tokens, 1, {**REMOTE_DECODE, "transfer_id": f"x-{name}"})
        pair.prefill.call("run_until", f"'reason' in e.answers.get('p-{name}', {{}})")
        assert pair.prefill.call("answer", f"p-{name}")["params"]["remote_request_id"].startswith(f"x-{name}#")
        # As vLLM does while it keeps the blocks.
        pair.prefill.start("run_until", f"'p-{name}' not in e.scheduler.requests")
        pair.decode.call("run_until", f"'reason' in e.answers.get('{name}', {{}})")
        pair.prefill.result("run_until")
        answer = pair.decode.call("answer", name)
        assert (answer["reason"], len(answer["tokens"])) == ("length", 4)
    # One whose prefill never comes is aborted by its client. The first prefill, which nobody read, is given back.
    pair.decode.call("abort", "before")
    first = pair.prefill.call("answer", "p-before")["params"]
    pair.decode.call("add", "given-back", [7, 8], 4, first)
    pair.decode.call("abort", "given-back")
    _, d = pair.quiesce()
    assert {name: d["wrong_bytes"][name] for name in words} == dict.fromkeys(words, 0)
    assert {name: d["starts"][name][0] for name in words} == {name: len(tokens) - 1 for name, tokens in words.items()}


def test_a_prompt_of_one_token(pair: Pair) -> None:
    answer = pair.decoded("single", [7], pair.prefilled("single", [7]))
    assert (answer["reason"], len(answer["tokens"])) == ("length", 4)
    assert pair.quiesce()[1]["starts"]["single"][0] == 0


def test_several_at_once_some_with_a_shared_prefix(pair: Pair) -> None:
    shared = prompt(50, 4 * BLOCK)
    words = {f"many-{i}": (shared if i % 2 else []) + prompt(60 + i, 40 + 23 * i) for i in range(4)}
    params = {name: pair.prefilled(name, tokens) for name, tokens in words.items()}
    for name, tokens in words.items():
        pair.decode.call("add", name, tokens, 4, params[name])
    pair.decode.call(
        "run_until", "all(f'many-{i}' in e.answers and 'reason' in e.answers[f'many-{i}'] for i in range(4))"
    )
    _, d = pair.quiesce()
    assert {name: d["wrong_bytes"][name] for name in words} == dict.fromkeys(words, 0)


def test_prompt_that_is_cached_already_gives_the_blocks_back(pair: Pair) -> None:
    words = prompt(70, 4 * BLOCK)
    pair.decoded("first", words, pair.prefilled("first", words))
    before = pair.quiesce()[0]["figures"]
    pair.decoded("again", [*words[:-1], 7], pair.prefilled("again", [*words[:-1], 7]))
    p, d = pair.quiesce()
    assert d["wrong_bytes"]["again"] == 0
    assert (
        p["figures"]["sends_read"] + p["figures"]["sends_released"]
        == before["sends_read"] + before["sends_released"] + 1
    )


def test_aborted_before_it_was_scheduled(pair: Pair) -> None:
    before = pair.quiesce()[0]["figures"].get("sends_released", 0)
    words = prompt(80, 60)
    params = pair.prefilled("never", words)
    pair.decode.call("add", "never", words, 4, params)
    pair.decode.call("abort", "never")
    assert pair.quiesce()[0]["figures"]["sends_released"] == before + 1


def test_aborted_during_the_load(pair: Pair) -> None:
    words = prompt(81, 400)
    params = pair.prefilled("midway", words)
    pair.decode.call("add", "midway", words, 4, params)
    pair.decode.call("step")
    pair.decode.call("abort", "midway")
    pair.quiesce()


def test_prefill_that_is_aborted_keeps_nothing(pair: Pair) -> None:
    pair.prefill.call("add", "p-gone", prompt(82, 60), 1, REMOTE_DECODE)
    pair.prefill.call("abort", "p-gone")
    pair.quiesce()


@pytest.mark.parametrize(
    ("spoil", "value"),
    [
        ("remote_host", None),
        ("remote_port", "many"),
        ("remote_block_ids", None),
        ("remote_block_ids", [[1, 2], [3], [4]]),
        ("remote_request_id", 7),
        ("do_remote_prefill", "yes"),
    ],
)
def test_unusable_params_end_that_request_only(pair: Pair, policy: str, spoil: str, value: Any) -> None:
    name = f"spoilt-{spoil}-{value}"
    words = prompt(90, 70)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "nobody",
        "remote_request_id": "p-x",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_block_ids": [[1, 2, 3, 4, 5]] * pair.groups,
        "remote_num_tokens": 70,
        "tp_size": 1,
        "pp_size": 1,
    }
    params = {key: val for key, val in {**params, spoil: value}.items() if val is not None}
    failed_or_recomputed(policy, pair, name, pair.decoded(name, words, params))
    good = prompt(91, 50)
    assert pair.decoded(f"after-{name}", good, pair.prefilled(f"after-{name}", good))["reason"] == "length"
    assert pair.quiesce()[1]["wrong_bytes"][f"after-{name}"] == 0


def test_unknown_request_at_the_producer(pair: Pair, policy: str) -> None:
    words = prompt(95, 70)
    params = pair.prefilled("lost", words)
    asked = {**params, "remote_request_id": "p-never-there"}
    failed_or_recomputed(policy, pair, "lost", pair.decoded("lost", words, asked))
    # The real one is given back.
    pair.decode.call("add", "found", words, 4, params)
    pair.decode.call("abort", "found")
    pair.decode.call("run_while_needed")


def test_producer_that_is_dead(pair: Pair, policy: str) -> None:
    third = Remote(
        Settings("kv_producer", pair.model, OTHER_SALT, "fail", pair.hybrid, states=pair.states)
    ).wait_started()
    words = prompt(96, 90)
    third.call("add", "p-orphan", words, 1, REMOTE_DECODE)
    third.call("run_until", "'reason' in e.answers.get('p-orphan', {})")
    params = third.call("answer", "p-orphan")["params"]
    third.kill()
    failed_or_recomputed(policy, pair, "orphan", pair.decoded("orphan", words, params))
    pair.decode.call("run_while_needed")
    assert pair.decode.call("state")["leaked_blocks"] == 0


def test_the_check_of_bytes_can_fail(pair: Pair) -> None:
    assert pair.wrong_bytes_of_others("control", 97) > 1000
