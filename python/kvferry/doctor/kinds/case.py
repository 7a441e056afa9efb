"""A kind of finding, and its outcomes."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["ok", "warning", "problem", "not applicable"]
STATES: tuple[State, ...] = ("ok", "warning", "problem", "not applicable")


class Case(NamedTuple):
    """One outcome of a finding. `remedy` may hold `{names}` that the finding fills in."""

    state: State
    meaning: str
    remedy: str = ""


class Kind(NamedTuple):
    """A finding: what is looked at, and the outcomes by name."""

    title: str
    looks_at: str
    cases: dict[str, Case]
