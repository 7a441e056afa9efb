"""What came of one cell of the fault matrix: verdicts from what was observed, with nothing of servers or networks."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Verdict(enum.Enum):
    """What a request or a cell can be. From the worst to the best; a cell is the worst that it contains."""

    WRONG = "wrong answer with 200"
    CUT_SHORT = "incomplete answer with 200"
    DEAD = "engine dead"
    HANG = "hang"
    NO_HAND_OVER = "no hand-over works afterwards"
    LEAKED = "blocks leaked"
    NOT_RUN = "not run"
    CLEAN_ERROR = "clean error"
    RIGHT = "right"

    @property
    def good(self) -> bool:
        """Whether this is what must come of every fault."""
        return self in (Verdict.RIGHT, Verdict.CLEAN_ERROR)


ORDER = list(Verdict)


@dataclass(frozen=True)
class Outcome:
    """What came of one request."""

    label: str
    # None where no answer came, be it that the connection was lost or that the time was over.
    status: int | None
    # The token ids of each choice.
    choices: tuple[tuple[int, ...], ...] = ()
    expected: tuple[int, ...] = ()
    # How many choices were asked for.
    count: int = 1
    error: str | None = None
    # Not ended within the limit.
    hung: bool = False
    seconds: float = 0.0


def judge_request(outcome: Outcome) -> Verdict:
    """The verdict on one request.

    An error is clean only where no token came with it that the model would not have given. An answer without an error
    must have all tokens of all choices.
    """
    for tokens in outcome.choices:
        if tokens != outcome.expected[: len(tokens)]:
            return Verdict.WRONG
    if outcome.hung:
        return Verdict.HANG
    if outcome.error is not None or outcome.status != 200:
        return Verdict.CLEAN_ERROR
    whole = [tokens for tokens in outcome.choices if tokens == outcome.expected]
    if not outcome.expected or len(whole) != outcome.count or len(outcome.choices) != outcome.count:
        return Verdict.CUT_SHORT
    return Verdict.RIGHT


@dataclass(frozen=True)
class EngineAfter:
    """One engine after the fault; those that the row has killed are not looked at."""

    role: str
    # Why it is dead: its process ended, or it fails a plain request. None: it lives.
    dead: str | None = None
    # It does not answer a plain request within the limit.
    stuck: bool = False
    # Requests open, and the share of the KV cache in use. A row starts with none.
    in_use: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Aftermath:
    """What was found when the fault was over."""

    engines: tuple[EngineAfter, ...] = ()
    # Hand-overs that nothing disturbs, until one is right. Empty where none was made.
    hand_overs: tuple[Outcome, ...] = ()


@dataclass
class Cell:
    """One row with one connector."""

    row: str
    connector: str
    verdicts: list[Verdict] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst."""
        return min(self.verdicts, key=ORDER.index, default=Verdict.NOT_RUN)

    def as_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "row": self.row,
            "connector": self.connector,
            "verdict": self.verdict.value,
            "verdicts": [verdict.value for verdict in self.verdicts],
            "requests": dict(self.requests),
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }


def _add(cell: Cell, verdict: Verdict, note: str = "") -> None:
    if verdict not in cell.verdicts:
        cell.verdicts.append(verdict)
    if note:
        cell.notes.append(note)


def judge_engine(engine: EngineAfter) -> tuple[Verdict, str] | None:
    """What is wrong with an engine after the fault, None if nothing is."""
    if engine.dead is not None:
        return Verdict.DEAD, f"{engine.role} engine: {engine.dead}"
    if engine.stuck:
        return Verdict.HANG, f"{engine.role} engine: no answer to a plain request"
    if any(engine.in_use):
        words = f"{engine.in_use[0]:.0f} requests open, {engine.in_use[1]:.1%} of the KV cache in use"
        return Verdict.LEAKED, f"{engine.role} engine: {words}"
    return None


def judge_cell(
    row: str,
    connector: str,
    outcomes: Sequence[Outcome],
    aftermath: Aftermath,
    before: Sequence[Outcome] = (),
    unfinished: Sequence[str] = (),
) -> Cell:
    """The verdicts on a cell. With no request at all, nothing was shown: it counts as not run.

    `before`: hand-overs that nothing disturbs, before the fault. `unfinished`: why the row did not come to its fault or
    its end. It counts as not run then, beside what it has shown until then.
    """
    cell = Cell(row, connector)
    _add_undisturbed(cell, "before the fault", before)
    for outcome in outcomes:
        verdict = judge_request(outcome)
        cell.requests[verdict.value] += 1
        _add(cell, verdict, "" if verdict is Verdict.RIGHT else _words(outcome, verdict))
    for engine in aftermath.engines:
        found = judge_engine(engine)
        if found is not None:
            _add(cell, *found)
    verdicts = _add_undisturbed(cell, "afterwards", aftermath.hand_overs)
    if verdicts and Verdict.RIGHT not in verdicts and not unfinished:
        _add(cell, Verdict.NO_HAND_OVER)
    for reason in unfinished or (() if outcomes else ("no request was judged",)):
        _add(cell, Verdict.NOT_RUN, reason)
    return cell


def _add_undisturbed(cell: Cell, when: str, outcomes: Sequence[Outcome]) -> list[Verdict]:
    """The verdicts on hand-overs that nothing disturbs. One that fails is told, and no more: connections may be lost
    in a fault, and are cold before the first one. An answer that is wrong is so wherever it comes, as is a hang."""
    verdicts = [judge_request(outcome) for outcome in outcomes]
    for outcome, verdict in zip(outcomes, verdicts, strict=True):
        if verdict is not Verdict.RIGHT:
            cell.notes.append(f"{when}: {_words(outcome, verdict)}")
        if verdict in (Verdict.WRONG, Verdict.CUT_SHORT, Verdict.HANG):
            _add(cell, verdict)
    return verdicts


def merge(cells: Sequence[Cell]) -> Cell:
    """The cells of several rounds of a row as one."""
    whole = Cell(cells[0].row, cells[0].connector)
    for number, cell in enumerate(cells, 1):
        for verdict in cell.verdicts:
            _add(whole, verdict)
        whole.requests += cell.requests
        whole.notes += [f"round {number}: {note}" for note in cell.notes] if len(cells) > 1 else cell.notes
        whole.seconds += cell.seconds
    return whole


def _words(outcome: Outcome, verdict: Verdict) -> str:
    """One request in a line."""
    text = f"{outcome.label}: {verdict.value} after {outcome.seconds:.1f} s"
    if verdict is Verdict.WRONG:
        for tokens in outcome.choices:
            differing = sum(a != b for a, b in zip(tokens, outcome.expected, strict=False))
            if differing:
                return f"{text}: {differing} of {len(tokens)} tokens differ"
    if outcome.status not in (None, 200):
        text += f": HTTP {outcome.status}"
    if outcome.error:
        text += ": " + " ".join(outcome.error.split())[:300]
    return text
