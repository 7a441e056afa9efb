"""The judge of the fault matrix must be able to say every verdict, and only where it is due."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.matrix.judge import (
    Aftermath,
    Cell,
    EngineAfter,
    Outcome,
    Verdict,
    judge_cell,
    judge_engine,
    judge_request,
    merge,
)
from lab.matrix.table import words

EXPECTED = (5, 6, 7, 8)
RIGHT = Outcome("decode", 200, (EXPECTED,), EXPECTED)
WRONG = replace(RIGHT, choices=((5, 6, 9, 8),))
CLEAN = Outcome("decode", 500, (), EXPECTED, error="KV transfer failed")
HUNG = Outcome("decode", None, (), EXPECTED, error="no end within 60 s", hung=True)
WHOLE = Aftermath((EngineAfter("prefill"), EngineAfter("decode")), (RIGHT,))

REQUESTS = {
    "right": (RIGHT, Verdict.RIGHT),
    "two choices": (replace(RIGHT, choices=(EXPECTED, EXPECTED), count=2), Verdict.RIGHT),
    "another token": (WRONG, Verdict.WRONG),
    "the second choice has another token": (
        replace(RIGHT, choices=(EXPECTED, (5, 6, 7, 9)), count=2),
        Verdict.WRONG,
    ),
    "more tokens than asked for": (replace(RIGHT, choices=((*EXPECTED, 9),)), Verdict.WRONG),
    "wrong tokens, then an error": (replace(WRONG, error="the engine died"), Verdict.WRONG),
    "wrong tokens, then a hang": (replace(HUNG, status=200, choices=((1,),)), Verdict.WRONG),
    "too few tokens": (replace(RIGHT, choices=((5, 6),)), Verdict.CUT_SHORT),
    "no tokens": (replace(RIGHT, choices=((),)), Verdict.CUT_SHORT),
    "no choice": (replace(RIGHT, choices=()), Verdict.CUT_SHORT),
    "a choice is missing": (replace(RIGHT, count=2), Verdict.CUT_SHORT),
    "nothing to compare with": (replace(RIGHT, choices=((),), expected=()), Verdict.CUT_SHORT),
    "status 500": (CLEAN, Verdict.CLEAN_ERROR),
    "status 400": (replace(CLEAN, status=400), Verdict.CLEAN_ERROR),
    "no connection": (replace(CLEAN, status=None), Verdict.CLEAN_ERROR),
    "an error in a stream, after right tokens": (
        replace(RIGHT, choices=((5, 6),), error="the load failed"),
        Verdict.CLEAN_ERROR,
    ),
    "no end": (HUNG, Verdict.HANG),
    "no end after right tokens": (replace(HUNG, status=200, choices=((5, 6),)), Verdict.HANG),
}


@pytest.mark.parametrize(("outcome", "verdict"), REQUESTS.values(), ids=list(REQUESTS))
def test_requests(outcome: Outcome, verdict: Verdict) -> None:
    assert judge_request(outcome) is verdict


@pytest.mark.parametrize("first", ["right", "status 500"])
@pytest.mark.parametrize(("outcome", "verdict"), REQUESTS.values(), ids=list(REQUESTS))
def test_a_cell_is_the_worst_of_its_requests(first: str, outcome: Outcome, verdict: Verdict) -> None:
    found = judge_cell("row", "kvferry", [REQUESTS[first][0], outcome], WHOLE)
    assert found.verdict is min(verdict, REQUESTS[first][1], key=list(Verdict).index)
    assert found.verdict.good == verdict.good
    assert sum(found.requests.values()) == 2


ENGINES = {
    "its process ended": (EngineAfter("decode", dead="ended with status 1"), Verdict.DEAD),
    "it does not answer": (EngineAfter("decode", stuck=True), Verdict.HANG),
    "blocks are in use": (EngineAfter("prefill", in_use=(0.0, 0.125)), Verdict.LEAKED),
    "a request is open": (EngineAfter("decode", in_use=(1.0, 0.0)), Verdict.LEAKED),
}


@pytest.mark.parametrize(("engine", "verdict"), ENGINES.values(), ids=list(ENGINES))
def test_engines(engine: EngineAfter, verdict: Verdict) -> None:
    judged = judge_engine(engine)
    assert judged is not None
    assert judged[0] is verdict
    found = judge_cell("row", "kvferry", [RIGHT], replace(WHOLE, engines=(EngineAfter("prefill"), engine)))
    assert found.verdict is verdict
    assert not found.verdict.good
    assert any(engine.role in note for note in found.notes)


def test_a_sound_engine() -> None:
    assert judge_engine(EngineAfter("decode")) is None


def test_hand_overs_afterwards() -> None:
    # One that fails before one that is right is told, and no more.
    found = judge_cell("row", "kvferry", [CLEAN], replace(WHOLE, hand_overs=(CLEAN, RIGHT)))
    assert found.verdict is Verdict.CLEAN_ERROR
    assert any("afterwards" in note for note in found.notes)
    found = judge_cell("row", "x", [RIGHT], replace(WHOLE, hand_overs=(CLEAN, CLEAN)))
    assert found.verdict is Verdict.NO_HAND_OVER
    # A wrong answer is one wherever it comes, and so is a hang.
    for bad in (WRONG, HUNG):
        for when in ({"hand_overs": (bad, RIGHT)}, {"hand_overs": (bad,)}):
            assert judge_cell("row", "x", [RIGHT], replace(WHOLE, **when)).verdict is judge_request(bad)
    # Rows whose engines need not work together have none.
    assert judge_cell("row", "x", [RIGHT], replace(WHOLE, hand_overs=())).verdict is Verdict.RIGHT


def test_hand_overs_before_the_fault() -> None:
    found = judge_cell("row", "x", [RIGHT], WHOLE, (CLEAN, RIGHT))
    assert found.verdict is Verdict.RIGHT
    assert found.notes == ["before the fault: decode: clean error after 0.0 s: HTTP 500: KV transfer failed"]
    for bad in (WRONG, HUNG):
        assert judge_cell("row", "x", [RIGHT], WHOLE, (bad, RIGHT)).verdict is judge_request(bad)


@pytest.mark.parametrize(("outcome", "verdict"), REQUESTS.values(), ids=list(REQUESTS))
def test_a_row_that_does_not_come_to_its_end_is_not_run_beside_what_it_showed(
    outcome: Outcome, verdict: Verdict
) -> None:
    dead = replace(WHOLE, engines=(ENGINES["its process ended"][0],), hand_overs=(CLEAN,))
    found = judge_cell("row", "x", [outcome], dead, unfinished=["no first token"])
    # The hand-overs afterwards were broken off too.
    assert set(found.verdicts) == {verdict, Verdict.DEAD, Verdict.NOT_RUN}
    assert found.notes[-1] == "no first token"
    assert not judge_cell("row", "x", [outcome], WHOLE, unfinished=["no first token"]).verdict.good
    assert judge_cell("row", "x", [], Aftermath(), unfinished=["no server"]).notes == ["no server"]


def test_nothing_judged_is_not_run() -> None:
    assert judge_cell("row", "x", [], WHOLE).verdict is Verdict.NOT_RUN
    assert Cell("row", "x").verdict is Verdict.NOT_RUN
    assert not Verdict.NOT_RUN.good


def test_rounds_are_merged_to_the_worst() -> None:
    rounds = [judge_cell("row", "x", [outcome], WHOLE) for outcome in (RIGHT, WRONG, CLEAN)]
    found = merge(rounds)
    assert found.verdict is Verdict.WRONG
    assert found.requests == {"right": 1, "wrong answer with 200": 1, "clean error": 1}
    assert any(note.startswith("round 2: decode: wrong answer") for note in found.notes)
    assert merge([rounds[0]]).verdict is Verdict.RIGHT


def test_words_of_a_cell() -> None:
    assert words(judge_cell("row", "x", [RIGHT, RIGHT], WHOLE)) == "right"
    assert words(judge_cell("row", "x", [CLEAN], WHOLE)) == "clean error"
    assert words(judge_cell("row", "x", [RIGHT, CLEAN, CLEAN], WHOLE)) == "1 right, 2 clean error"
    dead = replace(WHOLE, engines=(ENGINES["its process ended"][0],))
    assert words(judge_cell("row", "x", [RIGHT, WRONG], dead)) == "**wrong answer with 200**, **engine dead** (1 right)"
    assert words(Cell("row", "x")) == "**not run**"
    assert words(judge_cell("row", "x", [CLEAN], WHOLE, unfinished=["why"])) == "**not run** (1 clean error)"


def test_every_verdict_was_said() -> None:
    said = {verdict for _, verdict in REQUESTS.values()} | {verdict for _, verdict in ENGINES.values()}
    assert said | {Verdict.NO_HAND_OVER, Verdict.NOT_RUN} == set(Verdict)
