"""From rounds to figures, and figures as a table, as JSON and as a progress line."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from .. import ucx_info, version

Row = dict[str, Any]
"""One line of results: `work` and `transport` in words, and figures. Times are medians, None where not measured.

`ours_ms` is the time to completion. `caller_us` is time taken from the thread that starts the transfer and looks after
it. `notify_us` is from the last byte until the producer knows. CPU is that of both processes together.
"""


def percentile(values: Iterable[float], part: float) -> float:
    """The smallest value that `part` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def best(values: Iterable[Sequence[float]]) -> float | None:
    """The lowest of the medians; None without values."""
    medians = [median(some) for some in values if some]
    return min(medians) if medians else None


def number(value: float | None, digits: int = 3) -> str:
    """A number with about `digits` digits that count; `-` for none."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table; the first `texts` columns are texts, the others numbers."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        placed = (
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(placed).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])


def about() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "kvferry": version(),
        "ucx": ucx_info()["version"],
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def json_text(rows: Sequence[Row], **more: object) -> str:
    """`{"about": ..., "rows": [...]}`."""
    return json.dumps({"about": about(), "rows": list(rows), **more}, indent=2) + "\n"


class Progress:
    """A bar on stderr, where that is a terminal; else nothing."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, max(1, total), 0
        self._shown = sys.stderr.isatty()

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        if self._shown:
            full = 30 * self._done // self._total
            sys.stderr.write(f"\r{self._what} [{'#' * full}{'.' * (30 - full)}] {self._done}/{self._total}")
            sys.stderr.flush()

    def end(self) -> None:
        """Takes the bar away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
