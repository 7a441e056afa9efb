"""A record per request, and what a request costs that waits to be loaded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from kvferry import _wire
from kvferry.vllm.request_ids import library_id
from kvferry.vllm.request_table import RequestTable
from lone_scheduler import LoneScheduler
from mini_trio import prompt

LOAD = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "p-1",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_block_ids": [[1, 2, 3]],
}


@pytest.fixture
def decode(engines: tuple[LoneScheduler, LoneScheduler]) -> LoneScheduler:
    return engines[1]


@pytest.fixture
def calls(decode: LoneScheduler, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the library by the decode engine's scheduler side, and how often params are packed."""
    made: Counter[str] = Counter()
    handle = decode.connector._scheduler._scheduler._handle
    call, pack = handle.call, _wire.pack

    def counted(verb: str, *arguments: Any) -> None:
        made[verb] += 1
        call(verb, *arguments)

    def packed(what: str, value: Any) -> bytes:
        made[what] += 1
        return pack(what, value)

    monkeypatch.setattr(handle, "call", counted)
    monkeypatch.setattr(_wire, "pack", packed)
    return made


def test_waiting_load_costs_no_call_per_step(decode: LoneScheduler, calls: Counter[str]) -> None:
    pool = decode.scheduler.kv_cache_manager.block_pool
    decode.turn()
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    decode.add("waits", prompt(1, 40), 1, LOAD)
    for _ in range(3):
        decode.turn()
    assert (calls["arrived"], calls["matched"], calls["step"]) == (1, 1, 1)
    before = calls.total()
    for _ in range(20):
        decode.turn()
    assert calls.total() == before
    pool.free_blocks(taken)
    decode.turn()
    decode.turn(received=["waits"])
    decode.until_answered("waits")
    assert (calls["allocated"], calls["matched"], calls["finished"]) == (1, 1, 1)
    assert calls["kv_transfer_params"] == 1
    decode.assert_whole()


def test_refused_load_is_asked_for_once(decode: LoneScheduler, calls: Counter[str]) -> None:
    pool = decode.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    decode.add("refused", prompt(2, 40), 1, {**LOAD, "remote_block_ids": [[-1]]})
    for _ in range(5):
        decode.turn()
    assert calls["matched"] == 1
    pool.free_blocks(taken)
    # Under the policy "fail" the workers have to report it.
    assert set(decode.turn().refused) == {"refused"}
    decode.abort("refused")
    decode.turn(received=["refused"], reports=False)
    assert calls["allocated"] == 0
    decode.assert_whole()


def test_another_local_prefix_is_asked_for_anew(decode: LoneScheduler, calls: Counter[str]) -> None:
    connector = decode.connector
    pool = decode.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    decode.add("prefix", prompt(3, 40), 1, LOAD)
    request = decode.scheduler.requests["prefix"]
    found = [connector.get_num_new_matched_tokens(request, computed) for computed in (0, 0, 16, 16, 0)]
    assert found == [(40, True), (40, True), (24, True), (24, True), (40, True)]
    assert calls["matched"] == 3
    decode.abort("prefix")
    pool.free_blocks(taken)
    decode.turn()
    decode.assert_whole()


def test_workers_know_a_long_id_while_there_is_a_record() -> None:
    table, name = RequestTable(), "x" * 600
    record, short = table.create(name), table.create("short")
    assert (record.id, short.id) == (library_id(name), "short")
    assert (table.take_long_ids(), table.take_long_ids()) == ({record.id: name}, {})
    # Reported before its end, as after a load, it goes on.
    table.reported(record)
    table.end(record, kept=True)
    assert table.take_long_ids() == {}
    assert table.get(name) is record
    table.reported(record)
    assert table.take_long_ids() == {record.id: None}
    assert table.get(name) is None
    # Between two steps, nothing of it gets to the workers; one of the same id after it does not mislead them.
    table.end(table.create(name), kept=False)
    assert table.take_long_ids() == {}
    again = table.create(name)
    table.take_long_ids()
    table.end(again, kept=False)
    again = table.create(name)
    assert table.take_long_ids() == {}
    table.end(again, kept=False)
    assert table.take_long_ids() == {record.id: None}
    assert list(table) == [short]


def test_record_takes_the_place_of_one_that_waits_for_its_report() -> None:
    table, name = RequestTable(), "x" * 600
    first = table.create(name)
    table.end(first, kept=True, conversation=True)
    assert table.conversations == 1
    second = table.create(name)
    assert (table.get(name), table.conversations) == (second, 0)
    assert table.take_long_ids() == {first.id: name}
    table.end(second, kept=True)
    table.reported(second)
    assert table.take_long_ids() == {first.id: None}
    assert len(table) == 0
