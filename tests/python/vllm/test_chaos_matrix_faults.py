"""Rows of the fault matrix must notice when their fault did not happen: that is no pass."""

from __future__ import annotations

import asyncio

import pytest
from lab.matrix.judge import Verdict
from mini_matrix import FAILED, HUNG, RIGHT, SHORT, MiniMatrix

AFTER_THE_READ = ("lease-after", "p-killed-after")
DURING_THE_READ = ("lease-during", "p-killed-during", "d-killed", "client-left")


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> MiniMatrix:
    return MiniMatrix(monkeypatch)


@pytest.mark.parametrize("row", AFTER_THE_READ)
def test_a_fault_after_a_load_that_was_good_passes(mini: MiniMatrix, row: str) -> None:
    cell = mini.cell(row)
    assert cell.verdicts == [Verdict.RIGHT], cell


@pytest.mark.parametrize("row", [*AFTER_THE_READ, *DURING_THE_READ])
def test_a_load_that_fails_before_its_fault_is_no_pass(mini: MiniMatrix, row: str) -> None:
    mini.replies["decode"] = iter((FAILED,))
    cell = mini.cell(row)
    assert cell.verdicts == [Verdict.CLEAN_ERROR, Verdict.NOT_RUN], cell
    assert not cell.verdict.good
    assert any("was over before its fault: clean error" in note for note in cell.notes), cell


@pytest.mark.parametrize("row", AFTER_THE_READ)
@pytest.mark.parametrize(("reply", "verdict"), [(SHORT, Verdict.CUT_SHORT), (HUNG, Verdict.HANG)])
def test_an_answer_without_a_token_is_no_pass(mini: MiniMatrix, row: str, reply: object, verdict: Verdict) -> None:
    mini.replies["decode"] = iter((reply,))
    assert set(mini.cell(row).verdicts) == {verdict, Verdict.NOT_RUN}


def test_an_answer_that_comes_from_an_engine_that_should_be_frozen_is_no_pass(mini: MiniMatrix) -> None:
    async def rest() -> None:
        await asyncio.sleep(0.001)

    mini.rest = rest
    cell = mini.cell("lease-after")
    assert cell.verdicts == [Verdict.RIGHT, Verdict.NOT_RUN], cell


@pytest.mark.parametrize("dropped", [0, 3])
def test_a_firewall_that_drops_nothing_is_no_pass(mini: MiniMatrix, dropped: int) -> None:
    # What was dropped before D was asked says nothing.
    mini.pair.network.dropped_packets = 5

    def decode() -> object:
        mini.pair.network.dropped_packets += dropped
        yield RIGHT

    mini.replies["decode"] = decode()
    cell = mini.cell("firewall")
    assert cell.verdicts == ([Verdict.RIGHT] if dropped else [Verdict.RIGHT, Verdict.NOT_RUN]), cell
    assert cell.verdict.good == bool(dropped)
