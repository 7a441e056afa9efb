"""Conversations: for the next turn, the prefill engine loads what the decode engine has of the turn before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mini_config import Settings, write_model
from mini_remote import Remote
from mini_runner import RunnerName
from test_vllm_engines import REMOTE_DECODE, prompt

SALT = 5
"""Of both engines: a history has bytes of either, and what they follow from is the tokens alone."""
ANSWER = 20


class Conversation:
    """Two engines, and what the multi-turn proxy of vLLM does between them."""

    def __init__(
        self, folder: Path, hybrid: bool, runner: RunnerName = "mixin", child: bool = False, **decode: Any
    ) -> None:
        model = write_model(folder)
        self.hybrid, self.child = hybrid, child
        # The stock connector's keys.
        extra = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 8}
        common: dict[str, Any] = {"hybrid": hybrid, "runner": runner, "child": child}
        self.prefill = Remote(Settings("kv_both", model, SALT, "recompute", extra=extra, **common))
        self.decode = Remote(Settings("kv_consumer", model, SALT, "fail", extra={**extra, **decode}, **common))
        for engine in (self.prefill, self.decode):
            engine.wait_started()
            engine.call("loaded_from", SALT)

    def prefilled(self, name: str, tokens: list[int], history: dict[str, Any] | None) -> dict[str, Any]:
        """The prefill engine's answer."""
        asked = {**(history or {}), **REMOTE_DECODE}
        self.prefill.call("add", f"p-{name}", tokens, 1, asked)
        self.prefill.call("run_until", f"'reason' in e.answers.get('p-{name}', {{}})")
        self.prefill.call("step")
        answer: dict[str, Any] = self.prefill.call("answer", f"p-{name}")
        assert answer["reason"] == "length"
        params: dict[str, Any] = answer["params"]
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        return params

    def turn(
        self, name: str, tokens: list[int], history: dict[str, Any] | None = None
    ) -> tuple[list[int], dict[str, Any] | None]:
        """What the decode engine says to a prompt, and what it answers for the next turn."""
        params = self.prefilled(name, tokens, history)
        self.decode.call("add", name, tokens, ANSWER, params)
        self.decode.call("run_until", f"'reason' in e.answers.get('{name}', {{}})")
        self.decode.call("step")
        answer = self.decode.call("answer", name)
        assert answer["reason"] == "length"
        assert self.decode.call("state")["wrong_bytes"][name] == 0
        return answer["tokens"], answer["params"]

    def give_back(self, name: str, tokens: list[int], params: dict[str, Any]) -> None:
        """A client leaves before the decode engine loads the prefill, whose lease would last for long."""
        self.decode.call("add", name, tokens, 1, params)
        self.decode.call("abort", name)
        self.decode.call("step")

    def computed_from(self, name: str) -> tuple[int, int]:
        """Of a prefill: how many tokens were there before it began, and how many bytes of these were wrong."""
        state = self.prefill.call("state")
        return state["starts"][f"p-{name}"][0], state["wrong_bytes"].get(f"p-{name}", 0)

    def forget(self) -> None:
        """Takes from the prefill engine what it has of earlier prompts itself."""
        self.prefill.call("run_while_needed")
        self.prefill.call("forget_prefixes")

    def quiesce(self) -> None:
        """Runs both until nothing is left; then no request and no block may be left behind."""
        for engine in (self.prefill, self.decode):
            engine.call("run_while_needed")
            state = engine.call("state")
            assert state["requests"] == {}
            assert state["leaked_blocks"] == 0

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture(scope="module", params=[False, True], ids=["full", "windows"])
def conversation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversation]:
    # Each of vLLM's model runners is there once.
    runner: RunnerName = "active" if request.param else "mixin"
    made = Conversation(tmp_path_factory.mktemp("turns"), request.param, runner)
    yield made
    made.close()


@pytest.mark.parametrize("ends", [89, 80], ids=["in a block", "at its end"])
def test_the_next_turn_loads_the_turn_before(conversation: Conversation, ends: int) -> None:
    first = prompt(ends, ends + 1 - ANSWER)
    said, history = conversation.turn(f"a{ends}", first)
    assert history is not None
    assert (history["do_remote_prefill"], history["do_remote_decode"]) == (False, True)
    # The last token said has not been computed.
    assert history["remote_num_tokens"] == ends
    assert history["remote_lease_ms"] == 480_000
    second = [*first, *said, *prompt(ends + 1, 40)]
    said, next_history = conversation.turn(f"b{ends}", second, history)
    assert conversation.computed_from(f"b{ends}") == (ends, 0)
    assert next_history is not None
    third = [*second, *said, *prompt(ends + 2, 10)]
    conversation.turn(f"c{ends}", third, next_history)
    assert conversation.computed_from(f"c{ends}") == (len(second) + ANSWER - 1, 0)


def test_what_a_history_has_in_common_with_the_prompt_is_loaded(conversation: Conversation) -> None:
    # In steps of 16 tokens. Nothing but a whole history has the window of what comes next.
    for name, kept, loaded in [("stripped", 70, 64), ("other", 5, 0), ("shorter", 89, 80)]:
        first = prompt(len(name) + 200, 70)
        said, history = conversation.turn(f"{name}-1", first)
        assert history is not None
        second = [*first, *said][:kept]
        if name != "shorter":
            # A client that leaves out what the model thought.
            second += prompt(len(name) + 300, 60)
        conversation.forget()
        conversation.turn(f"{name}-2", second, history)
        start, wrong = conversation.computed_from(f"{name}-2")
        assert (start, wrong) == (0 if conversation.hybrid else loaded, 0)


def test_a_history_that_is_not_proven_gives_wrong_bytes(conversation: Conversation) -> None:
    """The control: the same prompt, and digests that lie about what the blocks hold."""
    if conversation.hybrid:
        pytest.skip("once is enough")
    first = prompt(401, 70)
    _, history = conversation.turn("truth-1", first)
    liar = [*first[:40], *prompt(402, 50)]
    _, theirs = conversation.turn("liar-1", liar[:70])
    assert history is not None
    assert theirs is not None
    conversation.forget()
    forged = {**history, "remote_token_digests": theirs["remote_token_digests"]}
    second = [*liar[:70], *prompt(403, 40)]
    conversation.give_back("liar-2", second, conversation.prefilled("liar-2", second, forged))
    start, wrong = conversation.computed_from("liar-2")
    assert start == 64
    assert wrong > 0


def test_a_history_that_is_not_loaded_is_given_back(conversation: Conversation) -> None:
    first = prompt(501, 70)
    said, history = conversation.turn("given-1", first)
    assert history is not None
    second = [*first, *said, *prompt(502, 30)]
    # The prefill engine has computed the same meanwhile.
    conversation.give_back("given-0", second, conversation.prefilled("given-0", second, None))
    params = conversation.prefilled("given-2", second, history)
    conversation.decode.call("run_until", "'given-1' not in e.scheduler.requests")
    conversation.decode.call("add", "given-3", second, 1, params)
    conversation.decode.call("run_until", "'reason' in e.answers.get('given-3', {})")


@pytest.mark.parametrize(
    "broken",
    [
        {"remote_token_digests": None},
        {"remote_token_digests": "x"},
        {"remote_token_digests": {"step": 0, "digests": ""}},
        {"remote_token_digests": {"step": 16, "digests": "AAAA"}},
        {"remote_token_digests": {"step": 1, "digests": 7}},
        {"remote_num_tokens": None},
        {"remote_num_tokens": -1},
        {"remote_port": None},
        {"remote_block_ids": [[1, 2]] * 100},
    ],
    ids=lambda broken: "-".join(broken),
)
def test_a_history_that_cannot_be_read_is_computed_again(
    conversation: Conversation, broken: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    first = prompt(601, 70)
    name = request.node.name.replace("[", "-").replace("]", "")
    said, history = conversation.turn(f"{name}-1", first)
    assert history is not None
    second = [*first, *said, *prompt(602, 30)]
    conversation.forget()
    conversation.turn(f"{name}-2", second, {**history, **broken})
    assert conversation.computed_from(f"{name}-2") == (0, 0)


def test_a_decode_engine_keeps_no_more_than_its_share_and_for_no_longer_than_its_lease(tmp_path: Path) -> None:
    # 12 of 96 blocks: those of two turns of 89 tokens.
    made = Conversation(tmp_path, False, history_percent=13, decoder_kv_blocks_ttl=20)
    try:
        histories = [made.turn(f"t{at}", prompt(700 + at, 70))[1] for at in range(3)]
        assert None not in histories
        # The oldest has given way to the third.
        made.decode.call("run_until", "set(e.scheduler.requests) == {'t1', 't2'}")
        # Without a sign of life from anyone.
        made.decode.call("run_while_needed")
        # One that is gone is computed again, under the policy that the documents name.
        first = prompt(700, 70)
        assert histories[0] is not None
        made.forget()
        params = made.prefilled("late", [*first, *prompt(704, 60)], histories[0])
        state = made.prefill.call("state")
        assert state["failed"]["p-late"]["cause"] == "lease_expired"
        assert state["starts"]["p-late"] == [0]
        made.decode.call("add", "late", [*first, *prompt(704, 60)], 1, params)
        made.decode.call("run_until", "'reason' in e.answers.get('late', {})")
        made.quiesce()
    finally:
        made.close()


def test_conversations_give_way_to_requests_that_need_their_blocks(tmp_path: Path) -> None:
    # All of the 95 blocks may be kept: 15 conversations of 6.
    made = Conversation(tmp_path, False, history_percent=100)
    try:
        for at in range(15):
            assert made.turn(f"t{at}", prompt(900 + at, 70))[1] is not None
        kept = made.decode.call("state")["requests"]
        assert len(kept) == 15
        # One that waits for 40 blocks, and goes on to need more.
        long = prompt(950, 630)
        params = made.prefilled("long", long, None)
        made.decode.call("add", "long", long, 100, params)
        made.decode.call("run_until", "'reason' in e.answers.get('long', {})")
        assert made.decode.call("answer", "long")["reason"] == "length"
        state = made.decode.call("state")
        assert state["starts"]["long"][0] == len(long) - 1
        assert state["wrong_bytes"]["long"] == 0
        assert "t0" not in state["requests"]
        assert "t14" in state["requests"]
        # Those that run take more as they go on, and are not preempted for it.
        for name in ("one", "two"):
            made.decode.call("add", name, prompt(len(name) + 960, 300), 500, None)
        made.decode.call("run_until", "'reason' in e.answers.get('one', {}) and 'reason' in e.answers.get('two', {})")
        assert made.decode.call("state")["starts"]["one"][:2] == [0, 300]
        # As after an update of the weights.
        made.decode.call("reset_caches")
        made.quiesce()
    finally:
        made.close()


def test_without_multi_turn_nothing_is_kept_and_nothing_is_loaded(tmp_path: Path) -> None:
    made = Conversation(tmp_path, False, bidirectional_kv_xfer=False)
    try:
        first = prompt(801, 70)
        assert made.turn("plain-1", first)[1] is None
        made.quiesce()
    finally:
        made.close()
