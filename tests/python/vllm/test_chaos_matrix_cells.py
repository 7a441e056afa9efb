"""Cells of the fault matrix whose rows do not come to their end: what was seen counts, a hang above all."""

from __future__ import annotations

import asyncio
from itertools import repeat
from types import SimpleNamespace

import aiohttp
import pytest
from lab.common import free_port
from lab.matrix import run as matrix
from lab.matrix.case import Case
from lab.matrix.judge import EngineAfter, Verdict
from lab.matrix.pair import Pair
from lab.matrix.peers import PEERS
from lab.matrix.rows import Row
from lab.network import LOOPBACK
from lab.servers.client import Answer as Reply
from lab.servers.server import ServerFailed
from mini_matrix import FAILED, GONE, HUNG, KEYS, RIGHT, TOKENS, WRONG, MiniMatrix

ON_LOOPBACK = SimpleNamespace(hosts=dict.fromkeys(("prefill", "decode"), LOOPBACK))


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> MiniMatrix:
    return MiniMatrix(monkeypatch)


def test_a_row_that_comes_to_its_end_passes(mini: MiniMatrix) -> None:
    mini.replies["decode"] = iter((RIGHT, FAILED))
    cell = mini.cell("reused")
    assert cell.verdicts == [Verdict.RIGHT, Verdict.CLEAN_ERROR], cell
    assert cell.verdict.good
    assert mini.asked.count("plain prefill") > 5


def test_a_wrong_answer_stays_one_when_the_engine_then_dies(mini: MiniMatrix) -> None:
    mini.replies = {"decode": iter((WRONG,)), "plain prefill": repeat(GONE)}
    mini.pair.engines["prefill"] = EngineAfter("prefill", dead="ended with status -6")
    cell = mini.cell("reused")
    assert {Verdict.WRONG, Verdict.DEAD, Verdict.NOT_RUN} <= set(cell.verdicts), cell
    assert cell.verdict is Verdict.WRONG
    assert any("ended with status -6" in note for note in cell.notes), cell
    assert any("a plain request to the prefill engine failed" in note for note in cell.notes), cell


def test_a_wrong_answer_before_the_fault_is_one(mini: MiniMatrix) -> None:
    mini.pair.restored = [True]
    mini.replies["decode"] = iter((WRONG,))
    cell = mini.cell("twice-in-turn")
    assert set(cell.verdicts) == {Verdict.WRONG, Verdict.RIGHT}, cell
    assert any(note.startswith("before the fault: hand-over: wrong") for note in cell.notes), cell


def test_engines_that_never_work_together_are_not_run(mini: MiniMatrix) -> None:
    mini.pair.restored = [True]
    mini.replies["decode"] = repeat(FAILED)
    cell = mini.cell("twice-in-turn")
    assert cell.verdicts == [Verdict.NOT_RUN], cell
    assert sum(note.startswith("before the fault: hand-over: clean error") for note in cell.notes) == matrix.HAND_OVERS


def test_what_was_seen_counts_when_the_engines_do_not_come_back(mini: MiniMatrix) -> None:
    mini.pair.restored = [False, ServerFailed("no answer within 900 s")]
    mini.pair.engines["decode"] = EngineAfter("decode", in_use=(0.0, 0.5))
    mini.replies["decode"] = iter((WRONG,))
    cell = mini.cell("unknown-id")
    assert set(cell.verdicts) == {Verdict.WRONG, Verdict.LEAKED, Verdict.NOT_RUN}, cell


def test_a_prefill_without_params_is_a_clean_error_where_it_comes_of_the_fault(mini: MiniMatrix) -> None:
    mini.replies["prefill"] = iter((Reply(200, (TOKENS[:1],)),))
    cell = mini.cell("null-flags")
    assert cell.verdicts == [Verdict.CLEAN_ERROR], cell
    mini.replies["prefill"] = iter((Reply(200, (TOKENS[:1],)),))
    cell = mini.cell("unknown-id")
    assert cell.verdicts == [Verdict.CLEAN_ERROR, Verdict.NOT_RUN], cell


def test_no_exception_of_a_row_ends_the_run(mini: MiniMatrix) -> None:
    async def act(case: Case) -> None:
        await case.decode(await case.prefill(case.prompt()))
        raise aiohttp.ClientOSError("reset by peer")

    cell = mini.cell(Row("row", "title", act))
    assert set(cell.verdicts) == {Verdict.RIGHT, Verdict.NOT_RUN}, cell
    assert any("ClientOSError: reset by peer" in note for note in cell.notes), cell


@pytest.mark.parametrize("ready", [False, True])
def test_an_engine_counts_as_running_when_it_has_come_up(monkeypatch: pytest.MonkeyPatch, ready: bool) -> None:
    """One that does not come up is no dead engine: the machine may be slow. One that then answers nothing is looked at,
    because that may be the fault's doing."""

    async def wait_ready(*_: object) -> None:
        if not ready:
            raise ServerFailed("no answer within 900 s")

    async def plain(role: str, limit_s: float) -> Reply:
        return HUNG

    setting = SimpleNamespace(session=None, servers=SimpleNamespace(wait_ready=wait_ready))
    pair = Pair(setting, ON_LOOPBACK, PEERS["kvferry"])
    monkeypatch.setattr(pair, "launch", lambda role: pair.running.update({role: None}))
    monkeypatch.setattr(pair, "plain", plain)
    with pytest.raises(ServerFailed, match="no end within 60 s" if ready else "no answer within 900 s"):
        asyncio.run(pair.start("decode"))
    assert pair.is_up("decode") == ready


async def _forget_on_a_dead_server() -> None:
    async with aiohttp.ClientSession() as session:
        pair = Pair(SimpleNamespace(session=session, servers=None), ON_LOOPBACK, PEERS["kvferry"])
        pair.ports["decode"] = free_port()
        await pair.forget("decode")


def test_forgetting_fails_on_a_dead_server_as_other_requests_do() -> None:
    with pytest.raises(ServerFailed, match="reset_prefix_cache on the decode engine: ClientConnectorError"):
        asyncio.run(_forget_on_a_dead_server())


@pytest.mark.parametrize("row", ["null-keys", "missing-keys", "typed-keys"])
def test_keys_that_hang_are_a_hang(mini: MiniMatrix, monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    # In the proportion of 60 s to 900 s, with what else such a row does.
    mini.hang_s = 1.0
    monkeypatch.setattr(matrix, "ROW_LIMIT_S", (KEYS - 1) * mini.hang_s)
    mini.replies["decode"] = iter([HUNG] * KEYS)
    cell = mini.cell(row)
    assert cell.verdict is Verdict.HANG, cell
    assert Verdict.NOT_RUN not in cell.verdicts, cell


def test_keys_are_left_out_when_an_engine_is_stuck(mini: MiniMatrix) -> None:
    mini.pair.engines["prefill"] = EngineAfter("prefill", stuck=True)
    assert mini.cell("null-keys").requests.total() == 1


def test_a_hang_is_one_when_the_time_of_the_row_is_over(mini: MiniMatrix, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(case: Case) -> None:
        await case.decode(await case.prefill(case.prompt()))
        await asyncio.sleep(60)

    monkeypatch.setattr(matrix, "ROW_LIMIT_S", 10.0)
    mini.replies["decode"] = iter((HUNG,))
    cell = mini.cell(Row("row", "title", act))
    assert set(cell.verdicts) == {Verdict.HANG, Verdict.NOT_RUN}, cell
    assert cell.verdict is Verdict.HANG


@pytest.mark.parametrize("kind", ["prefill", "plain prefill"])
def test_a_request_that_hangs_before_the_fault_is_a_hang(mini: MiniMatrix, kind: str) -> None:
    mini.replies[kind] = iter((HUNG,))
    cell = mini.cell("lease-before")
    assert set(cell.verdicts) == {Verdict.HANG, Verdict.NOT_RUN}, cell


def test_a_hand_over_that_nothing_disturbs_and_that_hangs_is_a_hang(mini: MiniMatrix) -> None:
    mini.replies["decode"] = iter((RIGHT, HUNG, RIGHT))
    assert mini.cell("unknown-id").verdict is Verdict.HANG
