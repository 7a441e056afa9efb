"""A described deployment as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..plan import Description, LinkDescription, Range
from ..worker import Rank


class Request(NamedTuple):
    """What was asked for, for headings."""

    prefill: str
    decode: str
    tokens: int
    cached: int
    blocks: str

    @property
    def text(self) -> str:
        """The request in words."""
        cached = f", {self.cached} of them cached by the decode engine" if self.cached else ""
        return f"{self.tokens} tokens{cached}, blocks {self.blocks}"


def rank_text(rank: Rank) -> str:
    """A rank."""
    return f"pp {rank['pp']} tp {rank['tp']}"


def ranges_text(ranges: Iterable[Range]) -> str:
    """Ranges, such as `0-3,8`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) or "-"


def bytes_text(number: float) -> str:
    """A number of bytes with at most one digit behind the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.1f}".removesuffix(".0") + f" {unit}"


def mean_run(link: LinkDescription) -> float:
    """Bytes per operation; 0 without operations."""
    return link["bytes"] / link["operations"] if link["operations"] else 0.0


def table(request: Request, described: Description) -> str:
    """The tables: who reads what from whom, and what is read from each prefill rank."""
    links = described["links"]
    rows = [
        (
            rank_text(link["consumer"]),
            rank_text(link["producer"]),
            ranges_text(link["layers"]),
            ranges_text(link["heads"]),
            "+".join(link["parts"]) or "(told when it is over)",
            *(_figures(link) if link["operations"] else ["-"] * 9),
        )
        for link in links
    ]
    totals = {key: sum(link[key] for link in links) for key in ("bytes", "operations", "plan_bytes")}
    rows.append(
        (
            "all",
            *[""] * 4,
            bytes_text(totals["bytes"]),
            "",
            str(totals["operations"]),
            *[""] * 3,
            bytes_text(totals["bytes"] / max(1, totals["operations"])),
            "",
            bytes_text(totals["plan_bytes"]),
        )
    )
    head = (
        *("decode rank", "reads from", "layers", "heads", "parts", "bytes", "segments", "operations"),
        *("shortest", "median", "longest", "mean run", "host memory", "plan"),
    )
    sent = [
        (
            rank_text(rank["rank"]),
            ranges_text(rank["layers"]),
            ranges_text(rank["heads"]),
            " ".join(f"{number + 1} of {count}" for number, count in rank["tokens"]),
            bytes_text(rank["bytes"]),
            str(rank["peers"]),
        )
        for rank in described["producers"]
    ]
    return "\n".join(
        [
            f"prefill  {request.prefill}",
            f"decode   {request.decode}",
            f"request  {request.text}",
            "",
            *columns(head, rows, numbers_from=5),
            "",
            *columns(("prefill rank", "layers", "heads", "token share", "is read", "hears from"), sent, 4),
        ]
    )


def _figures(link: LinkDescription) -> list[str]:
    return [
        bytes_text(link["bytes"]),
        str(link["segments"]),
        str(link["operations"]),
        *(bytes_text(link[key]) for key in ("run_min", "run_median", "run_max")),
        bytes_text(mean_run(link)),
        "gathered" if link["gathered"] else "direct",
        bytes_text(link["plan_bytes"]),
    ]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> list[str]:
    """Lines of a table; columns from `numbers_from` on are set to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        placed = (
            cell.rjust(width) if column >= numbers_from else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(placed).rstrip()

    return [line(head), line(["-" * width for width in widths]), *map(line, rows)]
