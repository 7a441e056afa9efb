"""Sums up traces of runs, which workers write when their configuration has the key `trace` or the environment variable
KVFERRY_TRACE names a file. Prints counts, percentiles of each stage, the slowest receives and the failures.

The files also open in https://ui.perfetto.dev and in chrome://tracing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .. import trace
from ..bench.errors import UsageError
from ..bench.figures import columns, number
from ..bench.sizes import between, size_text
from .trace_page import page

_count = between(0, 10_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="traces, of as many workers as wanted")
    add("--slowest", type=_count, default=10, metavar="N", help="how many of the slowest to list (default %(default)s)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the summary as JSON instead")
    form.add_argument("--html", action="store_true", help="print it as a page of its own, for a browser, instead")


def _printable(text: str, longest: int = 60) -> str:
    """A name from a file without what a terminal would obey, and not too long."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    return clean if len(clean) <= longest else clean[: longest - 3] + "..."


def text(summary: trace.Summary) -> str:
    """The summary for people."""
    what = f"{summary['received']} received, {summary['failed']} failed, {summary['released']} released unread"
    lines = [
        f"{what}, {summary['unfinished']} without an end in the trace; {size_text(summary['bytes'])} in "
        f"{summary['operations']} operations, over {summary['seconds']:.3f} s",
        *(f"  {_printable(process, 100)}" for process in summary["processes"]),
        *_ahead(summary),
    ]
    if summary["left_out"] or summary["damaged"]:
        lines.append(
            f"not all is here: {summary['left_out']} events were left out when the trace was written, "
            f"{summary['damaged']} lines are damaged"
        )
    if summary["stages"]:
        rows = [
            (
                one["stage"],
                str(one["count"]),
                *map(number, (one["p50_ms"], one["p90_ms"], one["p99_ms"], one["max_ms"])),
            )
            for one in summary["stages"]
        ]
        lines += ["", columns(("stage of what was received", "count", "p50 ms", "p90 ms", "p99 ms", "max ms"), rows)]
    if summary["slowest"]:
        lines += ["", _slowest(summary["slowest"])]
    if summary["failures"]:
        rows = [
            (one["cause"], str(one["count"]), f"{_printable(one['request'], 40)}: {_printable(one['message'], 200)}")
            for one in summary["failures"]
        ]
        lines += ["", "failures by cause, with the first one's words"]
        lines += [f"  {_printable(cause)}: {count}; {words}" for cause, count, words in rows]
    if summary["sends"]:
        sends = ", ".join(f"{count} {_printable(outcome)}" for outcome, count in summary["sends"].items())
        lines += ["", f"leases granted: {sends}"]
    return "\n".join(lines)


def _ahead(summary: trace.Summary) -> list[str]:
    if not summary["chunks"]:
        return []
    ahead = summary["ahead_bytes"]
    share = f"{size_text(ahead)} of it ({100 * ahead / max(1, summary['bytes']):.0f} %)"
    return [f"{share} in {summary['chunks']} chunks, begun before the end of the prefill was known"]


def _slowest(slowest: Sequence[trace.SlowReceive]) -> str:
    shown = ("total", "held", "queued", "transfer", "confirm")
    rows = [
        (
            _printable(one["request"], 40),
            _printable(one["outcome"] or "", 20),
            size_text(one["bytes"]),
            *(number(one["stages_ms"].get(stage)) for stage in shown),
        )
        for one in slowest
    ]
    return columns(("slowest", "outcome", "size", *(f"{stage} ms" for stage in shown)), rows, texts=2)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    try:
        read = trace.read(options.files)
    except trace.TraceError as error:
        raise UsageError(str(error)) from None
    summary = trace.summarize(read, options.slowest)
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        print(page(summary) if options.html else text(summary))
    return 0
