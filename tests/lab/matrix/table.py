"""The fault matrix as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.matrix.judge import ORDER, Cell, Verdict

if TYPE_CHECKING:
    from lab.matrix.peers import Peer
    from lab.matrix.rows import Row


def words(cell: Cell) -> str:
    """A cell of the table: its bad verdicts, and how many requests were right or failed cleanly."""
    verdicts = cell.verdicts or [Verdict.NOT_RUN]
    bad = [verdict.value for verdict in ORDER if verdict in verdicts and not verdict.good]
    counts = [
        f"{cell.requests[verdict.value]} {verdict.value}"
        for verdict in (Verdict.RIGHT, Verdict.CLEAN_ERROR)
        if cell.requests[verdict.value]
    ]
    if not bad:
        # What all requests were needs no count.
        return ", ".join(counts) if len(counts) > 1 else cell.verdict.value
    strong = ", ".join(f"**{text}**" for text in bad)
    return strong + (f" ({', '.join(counts)})" if counts else "")


def markdown(rows: Sequence[Row], peers: Sequence[Peer], cells: Sequence[Cell]) -> str:
    """A line for each row, a column for each connector."""
    by_key = {(cell.row, cell.connector): cell for cell in cells}
    lines = ["| fault | " + " | ".join(peer.title for peer in peers) + " |", "| --- |" + " --- |" * len(peers)]
    for row in rows:
        entries = [words(by_key.get((row.name, peer.name), Cell(row.name, peer.name))) for peer in peers]
        lines.append(f"| {row.title} (`{row.name}`) | " + " | ".join(entries) + " |")
    return "\n".join(lines)
