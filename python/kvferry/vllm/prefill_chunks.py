"""Tells the library which tokens of running prefills are written, for decode engines that read them meanwhile.

A step that writes such tokens has a mark, which the workers return with its output. vLLM has that output only when it
has the tokens that the step has sampled, or has sampled for nothing where no prompt ends with it. These are computed
from the step's attention, on every rank and in every stage, so all that the attention writes is there. (A device
executes what a worker enqueues in order, and ranks wait for one another in every layer.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvferry

from .log import logger
from .request_table import PrefillChunks, RequestRecord, RequestTable

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

Write = tuple[RequestRecord, int]
"""A prefill, and how many of its tokens are written when a step is over."""


@dataclass
class _Step:
    """A running step: the mark that ends it, and what it writes."""

    mark: int
    writes: list[Write] = field(default_factory=list)


class ChunkReporter:
    """Follows running prefills step by step. All calls come from the engine core's thread.

    Args:
        scheduler: Where progress is reported.
        requests: The records of this engine's requests.
        select: Picks the transferred groups of block lists.
        late: True if a drafter writes after a step has sampled. The next step's output then shows that it has written.
    """

    def __init__(
        self,
        scheduler: kvferry.Scheduler,
        requests: RequestTable,
        select: Callable[[Sequence[list[int]]], tuple[list[int], ...]],
        late: bool,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._select = select
        self._late = late
        # Prefills that are tracked and still computed.
        self._running = 0
        self._mark = 0
        # The oldest first.
        self._steps: deque[_Step] = deque()

    def track(self, record: RequestRecord, tokens: int) -> None:
        """Follows a prefill of `tokens` tokens, which decode engines may await by the record's name."""
        record.chunks = PrefillChunks(tokens)
        self._running += 1

    def end(self, record: RequestRecord, kept: bool) -> None:
        """Ends a prefill; `kept`: its blocks are kept for decode engines."""
        chunks = record.chunks
        if chunks is None or not chunks.running:
            return
        self._stop(chunks, still_open=kept)
        if not kept and chunks.reported:
            # The library may not have been told of its end, as when that was refused.
            self._report(record, chunks, 0)

    def forget(self, record: RequestRecord) -> None:
        """Stops reporting a prefill whose blocks are not kept any more."""
        if record.chunks is not None:
            record.chunks.open = False

    def step(self, output: SchedulerOutput | None) -> int:
        """Notes what a step writes. Returns the step's mark; 0 if its end tells nothing."""
        if output is None or not (self._running or self._steps):
            return 0
        writes = list(self._written_by(output)) if self._running else []
        # A step that computes nothing ends at once, beside a drafter that still writes for the one before.
        tells = self._late and self._steps and output.total_num_scheduled_tokens > 0
        if not writes and not tells:
            return 0
        self._mark += 1
        if writes:
            self._steps.append(_Step(self._mark + self._late, writes))
        return self._mark

    def confirm(self, mark: int) -> None:
        """Reports what all steps up to the one with this mark have written. They are over."""
        while self._steps and self._steps[0].mark <= mark:
            for record, tokens in self._steps.popleft().writes:
                if (chunks := record.chunks) is not None and chunks.open:
                    chunks.reported = self._report(record, chunks, tokens)

    def _written_by(self, output: SchedulerOutput) -> Iterable[Write]:
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if (found := self._running_prefill(new.req_id)) is not None:
                record, chunks = found
                # Some model runners are told anew of a request that was preempted.
                self._retract(record, chunks)
                chunks.blocks = tuple(list(ids) for ids in self._select(new.block_ids))
                yield from self._up_to(record, chunks, new.num_computed_tokens, scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        for request, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (found := self._running_prefill(request)) is None:
                continue
            record, chunks = found
            if request in cached.resumed_req_ids:
                self._retract(record, chunks)
            elif chunks.written_tokens == chunks.tokens <= computed:
                # Its prompt is done, and it goes on.
                continue
            if ids is not None:
                selected = self._select(ids)
                chunks.blocks = chunks.blocks or tuple([] for _ in selected)
                for known, more in zip(chunks.blocks, selected, strict=True):
                    known.extend(more)
            yield from self._up_to(record, chunks, computed, scheduled[request])

    def _running_prefill(self, vllm_id: str) -> tuple[RequestRecord, PrefillChunks] | None:
        record = self._requests.get(vllm_id)
        if record is None or record.chunks is None or not record.chunks.running:
            return None
        return record, record.chunks

    def _up_to(self, record: RequestRecord, chunks: PrefillChunks, computed: int, scheduled: int) -> Iterable[Write]:
        if computed < chunks.written_tokens:
            # What another connector was to load did not come, and is computed: into the same blocks.
            blocks = chunks.blocks
            self._retract(record, chunks)
            chunks.blocks = blocks
        written = min(computed + scheduled, chunks.tokens)
        assert record.name is not None
        if written > chunks.written_tokens and self._scheduler.is_followed(record.name):
            yield record, written
        chunks.written_tokens = max(chunks.written_tokens, written)

    def _retract(self, record: RequestRecord, chunks: PrefillChunks) -> None:
        """Retracts everything reported about a prefill: its blocks are given away."""
        chunks.written_tokens, chunks.blocks = 0, ()
        for step in self._steps:
            step.writes = [write for write in step.writes if write[0] is not record]
        if chunks.reported:
            chunks.reported = False
            self._report(record, chunks, 0)

    def _report(self, record: RequestRecord, chunks: PrefillChunks, tokens: int) -> bool:
        """Tells the library that `tokens` tokens are written; returns whether it has taken that."""
        assert record.name is not None
        try:
            self._scheduler.progressed(record.id, record.name, chunks.blocks if tokens else (), tokens)
        except kvferry.KvferryError as error:
            # Its end says more of it.
            logger.warning("Request %s is not read while it is computed: %s", record.id, error)
            self._stop(chunks, still_open=False)
            if tokens and chunks.reported:
                # Nothing would retract it when the blocks are given away.
                self._report(record, chunks, 0)
            return False
        return True

    def _stop(self, chunks: PrefillChunks, still_open: bool) -> None:
        self._running -= chunks.running
        chunks.running, chunks.open = False, still_open
