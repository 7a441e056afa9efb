"""A described deployment as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..bench.figures import columns
from ..bench.sizes import size_text
from ..plan import Description, LinkDescription, Range
from ..worker import Rank


class Request(NamedTuple):
    """The options, for headings."""

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
            size_text(totals["bytes"]),
            "",
            str(totals["operations"]),
            *[""] * 3,
            size_text(totals["bytes"] / max(1, totals["operations"])),
            "",
            size_text(totals["plan_bytes"]),
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
            size_text(rank["bytes"]),
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
            columns(head, rows, texts=5),
            "",
            columns(("prefill rank", "layers", "heads", "token share", "is read", "hears from"), sent, texts=4),
        ]
    )


def _figures(link: LinkDescription) -> list[str]:
    return [
        size_text(link["bytes"]),
        str(link["segments"]),
        str(link["operations"]),
        *(size_text(link[key]) for key in ("run_min", "run_median", "run_max")),
        size_text(mean_run(link)),
        "gathered" if link["gathered"] else "direct",
        size_text(link["plan_bytes"]),
    ]
