"""The doctor's findings, and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from .kinds import KINDS, Case, State


@dataclass(frozen=True)
class Finding:
    """One finding. `evidence` are the facts that it rests on, a line each."""

    id: str
    case: str
    state: State
    title: str
    meaning: str
    evidence: list[str]
    remedy: str

    def as_map(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def found(id: str, case: str, evidence: Iterable[str] = (), **values: str) -> Finding:
    """The finding `id` with the outcome `case`; `values` are filled into its remedy."""
    kind = KINDS[id]
    state, meaning, remedy = kind.cases[case]
    lines = [_plain(line) for line in evidence if line]
    return Finding(id, case, state, kind.title, meaning, lines, remedy.format(**values) if values else remedy)


def _plain(text: str) -> str:
    """One line that moves no cursor: some of the evidence comes from other hosts."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where there is a problem, else 0."""
    return int(any(finding.state == "problem" for finding in findings))


def markdown() -> str:
    """The findings as they stand in docs/doctor.md: a row for each trouble, and the names of the other outcomes.

    A trouble that another finding has too, with the same remedy, refers to it."""
    parts = []
    known: dict[Case, str] = {}
    for id, kind in KINDS.items():
        lines = [f"### `{id}`: {kind.title}", "", kind.looks_at, ""]
        troubles = {name: case for name, case in kind.cases.items() if case.remedy} or kind.cases
        lines += ["| outcome | state | meaning | remedy |", "| --- | --- | --- | --- |"]
        for name, case in troubles.items():
            first = known.setdefault(case, id)
            cells = (f"`{name}`", case.state, case.meaning, case.remedy if first == id else f"as for `{first}`")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        others = [f"`{name}` ({case.state})" for name, case in kind.cases.items() if name not in troubles]
        if others:
            lines += ["", f"Otherwise {', '.join(others)}."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
