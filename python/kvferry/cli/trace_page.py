"""The summary of traces as a page of its own: no script, no other file, nothing from the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .. import trace
from ..bench.figures import number
from ..bench.sizes import size_text

COLOURS = {
    "held": "#b8bec4",
    "queued": "#d9a441",
    "planned": "#7a55a8",
    "transfer": "#1f6fb4",
    "confirm": "#2d8a39",
    "report": "#b3322f",
}
"""Stages that follow each other, of which a receive's bar is made; the others lie inside these or before them."""
_STYLE = """
body { font: 14px/1.5 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .2em .6em; border-bottom: 1px solid #ddd }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { display: flex; height: 1em; min-width: 12em } .bar span { height: 100% }
.legend span { display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 1em; vertical-align: middle }
"""


def page(summary: trace.Summary) -> str:
    """The page, as HTML."""
    what = (
        f"{summary['received']} received, {summary['failed']} failed, {summary['released']} released unread, "
        f"{summary['unfinished']} without an end in the trace; {size_text(summary['bytes'])} in "
        f"{summary['operations']} operations, over {summary['seconds']:.3f} s"
    )
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><meta charset="utf-8"><title>kvferry trace</title>',
        f"<style>{_STYLE}</style>",
        f"<h1>Traces of kvferry</h1><p>{escape(what)}</p>",
        _list(summary["processes"]),
        *_incomplete(summary),
        *_stages(summary["stages"]),
        *_slowest(summary["slowest"]),
        *_failures(summary["failures"]),
        *_leases(summary["sends"]),
        "</html>",
    ]
    return "\n".join(parts)


def _list(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int) -> str:
    """A table of cells that are HTML already. The first `texts` columns are text, the others are numbers."""

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = ["" if place < texts else ' class="number"' for place in range(len(cells))]
        return (
            "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"
        )

    return "<table>" + row("th", head) + "".join(row("td", cells) for cells in rows) + "</table>"


def _incomplete(summary: trace.Summary) -> list[str]:
    if not summary["left_out"] and not summary["damaged"]:
        return []
    missing = f"{summary['left_out']} events were left out when the trace was written, {summary['damaged']} lines"
    return [f"<p>Not all is here: {missing} are damaged.</p>"]


def _stages(stages: Sequence[trace.StageSummary]) -> list[str]:
    if not stages:
        return []
    rows = [
        (
            escape(one["stage"]),
            escape(one["meaning"]),
            str(one["count"]),
            *map(number, (one["p50_ms"], one["p90_ms"], one["p99_ms"], one["max_ms"])),
        )
        for one in stages
    ]
    head = ("stage of what was received", "what happens", "count", "p50 ms", "p90 ms", "p99 ms", "max ms")
    return ["<h2>Stages</h2>", _table(head, rows, texts=2)]


def _slowest(slowest: Sequence[trace.SlowReceive]) -> list[str]:
    if not slowest:
        return []
    longest = max(one["stages_ms"].get("total", 0.0) for one in slowest) or 1.0
    legend = "".join(f'<span style="background:{colour}"></span>{name}' for name, colour in COLOURS.items())
    rows = [
        (
            escape(one["request"]),
            escape(one["process"]),
            escape(one["outcome"] or ""),
            _bar(one["stages_ms"], longest),
            size_text(one["bytes"]),
            number(one["stages_ms"].get("total")),
        )
        for one in slowest
    ]
    head = ("request", "worker", "outcome", "stages", "size", "total ms")
    return ["<h2>Slowest</h2>", f'<p class="legend">{legend}</p>', _table(head, rows, texts=4)]


def _bar(stages_ms: dict[str, float], longest: float) -> str:
    pieces = [
        f'<span title="{name}: {number(taken)} ms" style="background:{colour};width:{100 * taken / longest:.2f}%">'
        "</span>"
        for name, colour in COLOURS.items()
        if (taken := stages_ms.get(name))
    ]
    return f'<div class="bar">{"".join(pieces)}</div>'


def _failures(failures: Sequence[trace.Failure]) -> list[str]:
    if not failures:
        return []
    rows = [
        (escape(one["cause"]), escape(one["request"]), escape(one["message"]), str(one["count"])) for one in failures
    ]
    return ["<h2>Failures</h2>", _table(("cause", "first request", "its message", "count"), rows, texts=3)]


def _leases(sends: dict[str, int]) -> list[str]:
    if not sends:
        return []
    rows = [(escape(outcome), str(count)) for outcome, count in sends.items()]
    return ["<h2>Leases granted</h2>", _table(("outcome", "count"), rows, texts=1)]
