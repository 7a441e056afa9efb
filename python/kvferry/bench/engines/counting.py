"""Several pairs of workers, which differ in one setting, in the same two processes and on the same memory.

They take turns, a round each. Between processes, times differ by more than what is looked for here: where memory
happens to lie, and which processor a thread happens to be on. `options["variants"]` is a list of what is added to the
workers' configuration; `extra["variant"]` of a round says which one it was.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from ..memory import Memory
from . import worker
from .engine import Setup, Took


def _setups(setup: Setup) -> list[Setup]:
    return [replace(setup, options=dict(variant)) for variant in setup.options["variants"]]


class Starter:
    """See `engines.Starter`."""

    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        self._starters = [worker.Starter(one, memory, other) for one in _setups(setup)]

    def meet(self, hello: Any) -> None:
        """The first request's address does it."""

    def warm(self) -> None:
        """The hold does it."""

    def run(self, prepared: Any) -> Took:
        variant, inner = prepared
        took: Took = self._starters[variant].run(inner)
        took.extra["variant"] = variant
        return took

    def close(self) -> None:
        for starter in self._starters:
            starter.close()


class Other:
    """See `engines.Other`. It says whose turn it is: each has one in every cycle, in an order of the cycle's own, so
    that none always comes after the same other one."""

    def __init__(self, setup: Setup, memory: Memory) -> None:
        self._others = [worker.Other(one, memory) for one in _setups(setup)]
        self._round = -1

    def _variant(self) -> int:
        cycle, turn = divmod(self._round, len(self._others))
        order = list(range(len(self._others)))
        random.Random(cycle).shuffle(order)
        return order[turn]

    def hello(self) -> Any:
        return None

    def expect(self) -> Any:
        self._round += 1
        return self._variant(), self._others[self._variant()].expect()

    def known(self, timeout: float) -> float | None:
        return self._others[self._variant()].known(timeout)

    def close(self) -> None:
        for other in self._others:
            other.close()


starter, other = Starter, Other
