"""How far running prefills are reported to be written, by vLLM's own descriptions of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvferry
import pytest
from kvferry.vllm.prefill_chunks import ChunkReporter
from kvferry.vllm.request_table import RequestTable
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

Blocks = tuple[list[int], ...]


class Recorder:
    """Takes what is told in place of `kvferry.Scheduler`."""

    def __init__(self) -> None:
        self.followed = {"x"}
        self.told: list[tuple[str, Blocks, int]] = []
        self.refuses = False

    def is_followed(self, name: str) -> bool:
        return name in self.followed

    def progressed(self, request: str, name: str, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        if self.refuses:
            raise kvferry.InvalidArgumentError(-1, "INVALID_ARGUMENT", "no")
        assert name == "x"
        self.told.append((request, tuple(list(ids) for ids in blocks), tokens))

    def take(self) -> list[tuple[str, Blocks, int]]:
        told, self.told = self.told, []
        return told


class Engine:
    """The steps of an engine with one prompt, or more, of 100 tokens."""

    def __init__(self, late: bool = False) -> None:
        self.recorder = Recorder()
        scheduler: Any = self.recorder
        requests = RequestTable()
        self.chunks = ChunkReporter(scheduler, requests, lambda blocks: tuple(blocks), late)
        self.record = requests.create("r")
        self.record.name = "x"
        self.chunks.track(self.record, 100)

    def new(self, request: str, ids: list[int], computed: int, tokens: int) -> int:
        data = NewRequestData(request, [1] * 100, [], SamplingParams(), None, (ids,), computed, None)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [data]
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {request: tokens}, tokens
        return self.chunks.step(output)

    def goes_on(self, request: str, ids: list[int] | None, computed: int, tokens: int, resumed: bool = False) -> int:
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[request],
            resumed_req_ids={request} if resumed else set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None if ids is None else (ids,)],
            num_computed_tokens=[computed],
            num_output_tokens=[0],
        )
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {request: tokens}, tokens
        return self.chunks.step(output)

    def over(self, mark: int) -> list[tuple[str, Blocks, int]]:
        """What is told with the output of the step with this mark."""
        self.chunks.confirm(mark)
        return self.recorder.take()


def test_what_a_step_writes_is_told_with_its_output() -> None:
    engine = Engine()
    # A prefix hit counts with the first step.
    first = engine.new("r", [1, 2, 3], 16, 32)
    second = engine.goes_on("r", [4], 48, 16)
    assert engine.recorder.take() == []
    ((request, blocks, tokens),) = engine.over(first)
    assert (request, blocks[0][:3], tokens) == ("r", [1, 2, 3], 48)
    assert engine.over(second) == [("r", ([1, 2, 3, 4],), 64)]
    third = engine.goes_on("r", None, 64, 16)
    fourth = engine.goes_on("r", [5, 6], 80, 20)
    # One output may bring the marks of several.
    assert [tokens for *_, tokens in engine.over(fourth)] == [80, 100]
    assert third < fourth
    # What it decodes behind its prompt is nobody's.
    assert engine.goes_on("r", [7], 100, 1) == 0


def test_nothing_is_asked_of_the_workers_where_nobody_waits() -> None:
    engine = Engine()
    engine.recorder.followed = set()
    assert engine.new("r", [1, 2], 0, 32) == 0
    assert engine.new("other", [8], 0, 16) == 0
    # Somebody comes: all that is there by then is told.
    engine.recorder.followed = {"x"}
    assert engine.over(engine.goes_on("r", [3], 32, 16)) == [("r", ([1, 2, 3],), 48)]
    assert engine.chunks.step(SchedulerOutput.make_empty()) == 0
    assert engine.chunks.step(None) == 0


@pytest.mark.parametrize("as_new", [False, True])
def test_a_request_that_is_preempted_loses_what_was_told(as_new: bool) -> None:
    engine = Engine()
    first = engine.new("r", [1, 2], 0, 32)
    second = engine.goes_on("r", [3], 32, 16)
    assert len(engine.over(first)) == 1
    # Resumed, with a prefix hit, while the output of a step before is still to come.
    third = engine.new("r", [7, 8], 16, 16) if as_new else engine.goes_on("r", [7, 8], 16, 16, resumed=True)
    assert engine.recorder.take() == [("r", (), 0)]
    assert engine.over(second) == []
    assert engine.over(third) == [("r", ([7, 8],), 32)]


def test_tokens_that_another_connector_could_not_load_are_computed_again() -> None:
    engine = Engine()
    assert len(engine.over(engine.new("r", [1, 2, 3], 32, 16))) == 1
    again = engine.goes_on("r", None, 16, 16)
    assert engine.recorder.take() == [("r", (), 0)]
    assert engine.over(again) == [("r", ([1, 2, 3],), 32)]


def test_with_a_drafter_the_next_step_tells() -> None:
    engine = Engine(late=True)
    first = engine.new("r", [1, 2], 0, 32)
    assert engine.over(first) == []
    second = engine.goes_on("r", [3], 32, 16)
    assert [tokens for *_, tokens in engine.over(second)] == [32]
    # A step that computes nothing does not wait for the drafter.
    assert engine.chunks.step(SchedulerOutput.make_empty()) == 0
    # One that computes for others only tells too.
    others = SchedulerOutput.make_empty()
    others.num_scheduled_tokens, others.total_num_scheduled_tokens = {"other": 1}, 1
    assert [tokens for *_, tokens in engine.over(engine.chunks.step(others))] == [48]
    assert engine.chunks.step(others) == 0


def test_of_a_prefill_that_is_not_kept_nothing_that_was_told_holds() -> None:
    engine = Engine()
    assert len(engine.over(engine.new("r", [1, 2], 0, 32))) == 1
    engine.chunks.end(engine.record, kept=False)
    assert engine.recorder.take() == [("r", (), 0)]
    engine.chunks.end(engine.record, kept=False)
    assert engine.recorder.take() == []


def test_the_end_of_a_prefill() -> None:
    for kept in (True, False):
        engine = Engine()
        first = engine.new("r", [1, 2, 3], 0, 48)
        second = engine.goes_on("r", [4, 5, 6, 7], 48, 52)
        engine.chunks.end(engine.record, kept)
        # vLLM ends a request before it hands over what its last step has brought.
        assert [tokens for *_, tokens in engine.over(first)] == ([48] if kept else [])
        assert [tokens for *_, tokens in engine.over(second)] == ([100] if kept else [])
    engine = Engine()
    mark = engine.new("r", [1, 2, 3, 4, 5, 6, 7], 0, 100)
    engine.chunks.end(engine.record, kept=True)
    engine.chunks.forget(engine.record)
    assert engine.over(mark) == []


def test_what_the_library_refuses_ends_nothing_but_itself() -> None:
    engine = Engine()
    mark = engine.new("r", [1, 2], 0, 32)
    engine.recorder.refuses = True
    assert engine.over(mark) == []
    engine.recorder.refuses = False
    assert engine.goes_on("r", [3], 32, 16) == 0
