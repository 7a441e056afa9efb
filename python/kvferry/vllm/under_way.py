"""Prefills under way: what of them is written, for decode engines that read it meanwhile.

A step that writes for such a prefill has a mark, which the workers give back with its output. vLLM has that output only
when it has the tokens that the step has sampled, or has sampled for nothing where no prompt ends with it. These are
computed from the step's attention, on every rank and in every stage, so all that the attention writes is there. (A
device does in their order what a worker enqueues, and ranks wait for one another in every layer.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvferry

from .log import logger
from .request_ids import library_id

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class _Prefill:
    """One that decode engines may await.

    Attributes:
        request: vLLM's id of it.
        name: By which they await it.
        tokens: Of its prompt.
        blocks: Its block ids so far, by transferred KV-cache group.
        written: Up to which token steps so far write.
        told: Whether the library knows of blocks of it.
    """

    request: str
    name: str
    tokens: int
    blocks: tuple[list[int], ...] = ()
    written: int = 0
    told: bool = False


@dataclass
class _Step:
    """A step under way: its mark, and up to which token it writes for which prefills."""

    mark: int
    writes: list[tuple[_Prefill, int]] = field(default_factory=list)


class Progress:
    """All calls come from the engine core's thread.

    Args:
        scheduler: Who is told.
        select: Picks the transferred groups of block lists.
        late: Whether a drafter writes behind a step's sampling. The output of the next step then tells that it has.
    """

    def __init__(
        self,
        scheduler: kvferry.Scheduler,
        select: Callable[[Sequence[list[int]]], tuple[list[int], ...]],
        late: bool,
    ) -> None:
        self._scheduler = scheduler
        self._select = select
        self._late = late
        self._prefills: dict[str, _Prefill] = {}
        # Those that have ended well, and of which the last tokens are not known to be written.
        self._ended: dict[str, _Prefill] = {}
        self._mark = 0
        # The oldest first.
        self._steps: deque[_Step] = deque()

    def add(self, request: str, name: str, tokens: int) -> None:
        """A prefill of `tokens` tokens has come, that decode engines may await by `name`."""
        self._prefills[request] = _Prefill(request, name, tokens)

    def end(self, request: str, kept: bool) -> None:
        """It has ended; `kept`: its blocks are kept for them."""
        prefill = self._prefills.pop(request, None)
        if prefill is None:
            return
        if kept:
            self._ended[request] = prefill
        elif prefill.told:
            # The library may not have been told of its end, as when that was refused.
            self._tell(prefill, 0)

    def forget(self, request: str) -> None:
        """Nothing is kept of it any more."""
        self._ended.pop(request, None)

    def step(self, output: SchedulerOutput | None) -> int:
        """Takes note of what a step writes. Returns its mark; 0 if nobody wants to know."""
        if output is None or not (self._prefills or self._steps):
            return 0
        writes = list(self._written_by(output)) if self._prefills else []
        # A step that computes nothing ends at once, beside a drafter that still writes for the one before.
        tells = self._late and self._steps and output.total_num_scheduled_tokens > 0
        if not writes and not tells:
            return 0
        self._mark += 1
        if writes:
            self._steps.append(_Step(self._mark + self._late, writes))
        return self._mark

    def _written_by(self, output: SchedulerOutput) -> Iterable[tuple[_Prefill, int]]:
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if (prefill := self._prefills.get(new.req_id)) is not None:
                # Some model runners are told anew of a request that was preempted.
                self._give_away(prefill)
                prefill.blocks = tuple(list(ids) for ids in self._select(new.block_ids))
                yield from self._up_to(prefill, new.num_computed_tokens, scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        for request, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (prefill := self._prefills.get(request)) is None:
                continue
            if request in cached.resumed_req_ids:
                self._give_away(prefill)
            elif prefill.written == prefill.tokens <= computed:
                # Its prompt is done, and it goes on.
                continue
            if ids is not None:
                selected = self._select(ids)
                prefill.blocks = prefill.blocks or tuple([] for _ in selected)
                for known, more in zip(prefill.blocks, selected, strict=True):
                    known.extend(more)
            yield from self._up_to(prefill, computed, scheduled[request])

    def _up_to(self, prefill: _Prefill, computed: int, scheduled: int) -> Iterable[tuple[_Prefill, int]]:
        if computed < prefill.written:
            # What another connector was to load did not come, and is computed: into the same blocks.
            blocks = prefill.blocks
            self._give_away(prefill)
            prefill.blocks = blocks
        written = min(computed + scheduled, prefill.tokens)
        if written > prefill.written and self._scheduler.is_followed(prefill.name):
            yield prefill, written
        prefill.written = max(prefill.written, written)

    def _give_away(self, prefill: _Prefill) -> None:
        """Of what was said so far nothing holds any more."""
        prefill.written, prefill.blocks = 0, ()
        for step in self._steps:
            step.writes = [write for write in step.writes if write[0] is not prefill]
        if prefill.told:
            prefill.told = False
            self._tell(prefill, 0)

    def confirm(self, mark: int) -> None:
        """All steps up to the one with this mark are over: who waits for what they have written is told."""
        while self._steps and self._steps[0].mark <= mark:
            for prefill, tokens in self._steps.popleft().writes:
                known = self._prefills.get(prefill.request) or self._ended.get(prefill.request)
                if known is prefill:
                    prefill.told = self._tell(prefill, tokens)
        if self._ended:
            waiting = {prefill.request for step in self._steps for prefill, _ in step.writes}
            self._ended = {request: prefill for request, prefill in self._ended.items() if request in waiting}

    def _tell(self, prefill: _Prefill, tokens: int) -> bool:
        blocks = prefill.blocks if tokens else ()
        try:
            self._scheduler.progressed(library_id(prefill.request), prefill.name, blocks, tokens)
        except kvferry.KvferryError as error:
            # Its end says more of it.
            logger.warning("Request %s is not read while it is computed: %s", library_id(prefill.request), error)
            self._prefills.pop(prefill.request, None)
            self._ended.pop(prefill.request, None)
            if tokens and prefill.told:
                # Nobody would say any more when they are given away.
                self._tell(prefill, 0)
            return False
        return True
