"""Decode engines that keep conversations, and vLLM's pause, sleep and shutdown, which wait until nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvferry.vllm.support import TELLS_OF_SLEEP
from test_vllm_turns import ANSWER, Conversation, prompt

pytestmark = pytest.mark.release

NEVER = {"history_lease_ms": 24 * 3600 * 1000}
"""No conversation ends by itself."""


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "child"])
def conversation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversation]:
    made = Conversation(tmp_path_factory.mktemp("pause"), False, child=request.param, **NEVER)
    yield made
    made.close()


def kept(conversation: Conversation) -> set[str]:
    return set(conversation.decode.call("state")["requests"])


def goes_on(conversation: Conversation, name: str, seed: int) -> None:
    """A conversation whose second turn loads the first."""
    first = prompt(seed, 70)
    said, history = conversation.turn(f"{name}-1", first)
    assert history is not None
    conversation.forget()
    conversation.turn(f"{name}-2", [*first, *said, *prompt(seed + 1, 40)], history)
    assert conversation.computed_from(f"{name}-2") == (70 + ANSWER - 1, 0)


@pytest.mark.parametrize("mapped", ["", "same", "another"], ids=["pause", "same", "another"])
def test_an_engine_that_falls_asleep_lets_go_of_conversations(conversation: Conversation, mapped: str) -> None:
    if mapped and conversation.child and not TELLS_OF_SLEEP:
        pytest.skip("MultiConnector of this vLLM does not pass on that memory is unmapped")
    name = f"sleepy-{mapped}"
    first = prompt(11, 70)
    said, history = conversation.turn(name, first)
    assert history is not None
    assert name in kept(conversation)
    conversation.decode.call("fall_asleep", bool(mapped))
    assert kept(conversation) == set()
    # Its next turn is computed, under the policy that the documents name.
    conversation.forget()
    second = [*first, *said, *prompt(12, 40)]
    params = conversation.prefilled(f"{name}-late", second, history)
    assert conversation.computed_from(f"{name}-late") == (0, 0)
    conversation.decode.call("wake_up", mapped)
    conversation.decode.call("add", f"{name}-late", second, 1, params)
    conversation.decode.call("run_until", f"'reason' in e.answers.get('{name}-late', {{}})")
    assert conversation.decode.call("state")["wrong_bytes"][f"{name}-late"] == 0
    # Awake, it keeps them again.
    goes_on(conversation, f"{name}-awake", 20)


@pytest.mark.parametrize("state", ["PAUSED_NEW", "PAUSED_ALL"])
def test_a_pause_lets_go_of_conversations_and_keeps_no_new_ones(conversation: Conversation, state: str) -> None:
    """Those that end while it waits for what runs are no more kept than those before."""
    assert conversation.turn(f"before-{state}", prompt(31, 70))[1] is not None
    words = prompt(32, 70)
    conversation.decode.call("add", f"during-{state}", words, ANSWER, conversation.prefilled(state, words, None))
    conversation.decode.call("run_until", f"'during-{state}' in e.answers")
    conversation.decode.call("pause", state)
    conversation.decode.call("run_while_needed")
    if state == "PAUSED_ALL":
        # What was running is there still, and goes on.
        assert kept(conversation) == {f"during-{state}"}
        conversation.decode.call("wake_up")
        conversation.decode.call("run_until", f"'reason' in e.answers['during-{state}']")
        assert conversation.decode.call("answer", f"during-{state}")["params"] is not None
    else:
        assert kept(conversation) == set()
        answer = conversation.decode.call("answer", f"during-{state}")
        assert (answer["reason"], len(answer["tokens"]), answer["params"]) == ("length", ANSWER, None)
        conversation.decode.call("wake_up")
    goes_on(conversation, f"after-{state}", 40)


def test_a_shutdown_that_waits_for_requests_does_not_wait_for_conversations(tmp_path: Path) -> None:
    made = Conversation(tmp_path, False, **NEVER)
    try:
        assert made.turn("kept", prompt(51, 70))[1] is not None
        words = prompt(52, 70)
        made.decode.call("add", "last", words, ANSWER, made.prefilled("last", words, None))
        made.decode.call("run_until", "'last' in e.answers")
        made.decode.call("drain")
        answer = made.decode.call("answer", "last")
        assert (answer["reason"], len(answer["tokens"])) == ("length", ANSWER)
        made.quiesce()
    finally:
        made.close()
