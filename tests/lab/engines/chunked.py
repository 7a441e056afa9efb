"""Prompts that a producer computes in parts, while the consumer reads what is there: the option `--chunks`.

They share few blocks, as in an engine that is full: where none is free, the newest prompt gives its blocks away and
begins again. Some do so for no reason, when the consumer has just been told of them.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lab.engines.cache import TOKENS

if TYPE_CHECKING:
    from lab.engines.engine import Engine

VARIABLE = "KVFERRY_CHAOS_CHUNKS"
"""Set for all engines of a run with `--chunks`."""


def chosen() -> bool:
    """Whether prompts are computed in parts."""
    return bool(os.environ.get(VARIABLE))


@dataclass
class _Prompt:
    request: str
    key: int
    count: int
    blocks: list[int] = field(default_factory=list)
    spoilt: bool = False


class Prompts:
    """The prompts of one engine, the oldest first.

    Args:
        silent: A fault: prompts that others have written over are computed again in the same blocks, and the consumer
            is not told.
        aborts: How many of a hundred prompts end by their clients.
    """

    def __init__(self, engine: Engine, seed: int, silent: bool, aborts: int) -> None:
        self._engine, self._silent, self._aborts = engine, silent, aborts
        self._dice = random.Random(seed)
        self.running: list[_Prompt] = []
        self.preempted = 0
        self.aborted = 0

    def begin(self, request: str, key: int, count: int) -> None:
        """A prompt of `count` blocks comes in."""
        self.running.append(_Prompt(request, key, count))

    def step(self) -> None:
        """One engine step: some blocks of the oldest prompts."""
        budget = self._dice.randint(4, 24)
        for prompt in list(self.running):
            if budget == 0:
                return
            if prompt.spoilt:
                self._engine.fill(prompt.key, prompt.blocks)
                prompt.spoilt = False
            more = min(budget, prompt.count - len(prompt.blocks))
            taken = self._engine.take(more)
            if taken is None:
                self._give_away(self.running[-1])
                return
            budget -= more
            self._engine.fill(prompt.key, taken, len(prompt.blocks))
            prompt.blocks += taken
            if self._dice.random() * 100 < self._aborts:
                self._end(prompt, "aborted")
            elif len(prompt.blocks) == prompt.count:
                self._end(prompt, "complete")
            else:
                self._tell(prompt)
                if self._dice.random() < 0.1:
                    self._lose(prompt)

    def _tell(self, prompt: _Prompt) -> None:
        scheduler = self._engine.scheduler
        if scheduler.is_followed(self._engine.name_of(prompt.request)):
            scheduler.progressed(
                prompt.request, self._engine.name_of(prompt.request), [prompt.blocks], len(prompt.blocks) * TOKENS
            )

    def _lose(self, prompt: _Prompt) -> None:
        if not self._silent:
            self._give_away(prompt)
            return
        self.preempted += 1
        self._engine.spoil(prompt.blocks)
        prompt.spoilt = True

    def _give_away(self, prompt: _Prompt) -> None:
        if not prompt.blocks:
            return
        self.preempted += 1
        self._engine.scheduler.progressed(prompt.request, self._engine.name_of(prompt.request), [], 0)
        self._engine.give_back(prompt.blocks)
        prompt.blocks = []

    def _end(self, prompt: _Prompt, outcome: Any) -> None:
        self.running.remove(prompt)
        params = {"do_remote_decode": True, "transfer_id": self._engine.name_of(prompt.request)}
        tokens = len(prompt.blocks) * TOKENS
        keep, _ = self._engine.scheduler.finished(prompt.request, params, outcome, [prompt.blocks], tokens)
        if keep:
            self._engine.keep(prompt.request, prompt.key, prompt.blocks)
            # What was written last is known to be there when the request has ended.
            self._tell(prompt)
        else:
            self.aborted += 1
            self._engine.give_back(prompt.blocks)
