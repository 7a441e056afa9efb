"""Runs the demo for a list of pairs of shapes, one after the other, and makes one table of what came of them.

Each pair is a run of its own, in a process of its own with a time limit, so that none can keep the others from running.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.common import say
from lab.process import Child

if TYPE_CHECKING:
    from lab.demo.options import Options

# A run that is told to end stops its servers first.
_END_LIMIT_S = 90.0
_MESSAGE_LENGTH = 220
# An exception in a log, in the traceback's last line.
_EXCEPTION = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w+(?:Error|Exception)): (\S.*)$")
# What kvferry's worker says of a receive that failed; one that its own engine gave up is not a cause.
_NOT_RECEIVED = re.compile(r"request \S+ was not received \((?!aborted)(\w+)\): (\S.*)$")
# Exceptions that only pass on that something else failed.
_PASSED_ON = re.compile(
    r"EngineDeadError|EngineGenerateError|Engine core (?:initialization|proc)|See (?:root|stack)|CancelledError"
)


@dataclass(frozen=True)
class Pair:
    """One line of the list."""

    name: str
    prefill: str
    decode: str
    model: str = "llama"

    def arguments(self) -> list[str]:
        """What the demo is called with."""
        return ["--prefill", self.prefill, "--decode", self.decode, "--model", self.model]


PAIRS = (
    Pair("tp1-tp1", "tp=1", "tp=1"),
    Pair("tp2-tp1", "tp=2", "tp=1"),
    Pair("tp1-tp2", "tp=1", "tp=2"),
    Pair("pp2-tp1", "pp=2", "tp=1"),
    Pair("tp1-pp2", "tp=1", "pp=2"),
    Pair("pp2-tp2", "pp=2", "tp=2"),
    Pair("block32-block64", "block=32", "block=64"),
    Pair("block64-block32", "block=64", "block=32"),
    Pair("hybrid", "tp=1", "tp=1", "hybrid"),
    Pair("hybrid-tp2-block32-block64", "tp=2,block=32", "tp=1,block=64", "hybrid"),
    Pair("chunked", "tp=1", "tp=1", "chunked"),
    Pair("chunked-tp2-tp1", "tp=2", "tp=1", "chunked"),
    Pair("chunked-tp1-tp2", "tp=1", "tp=2", "chunked"),
    Pair("mla", "tp=1", "tp=1", "mla"),
    Pair("mla-tp2-tp1", "tp=2", "tp=1", "mla"),
    Pair("lfm2", "tp=1", "tp=1", "lfm2"),
    Pair("lfm2-tp2-tp1", "tp=2", "tp=1", "lfm2"),
    Pair("lfm2-tp1-tp2", "tp=1", "tp=2", "lfm2"),
    Pair("mamba2", "tp=1", "tp=1", "mamba2"),
    Pair("mamba2-tp2-tp1", "tp=2", "tp=1", "mamba2"),
    Pair("mamba2-tp1-tp2", "tp=1", "tp=2", "mamba2"),
    Pair("lfm2-pp2-tp1", "pp=2", "tp=1", "lfm2"),
    Pair("lfm2-tp1-pp2", "tp=1", "pp=2", "lfm2"),
    Pair("gdn", "tp=1", "tp=1", "gdn"),
    Pair("gdn-tp2-tp1", "tp=2", "tp=1", "gdn"),
    Pair("gdn-tp1-tp2", "tp=1", "tp=2", "gdn"),
)


@dataclass(frozen=True)
class Outcome:
    """What came of one pair."""

    pair: Pair
    passed: bool
    words: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "name": self.pair.name,
            "prefill": self.pair.prefill,
            "decode": self.pair.decode,
            "model": self.pair.model,
            "passed": self.passed,
            "result": self.words,
            "seconds": round(self.seconds, 1),
        }


def run_matrix(options: Options, folder: Path) -> int:
    """Runs all chosen pairs; the exit status."""
    chosen = [pair for pair in PAIRS if not options.only or pair.name in options.only]
    connector = options.connectors[0]
    outcomes: list[Outcome] = []
    for number, pair in enumerate(chosen, 1):
        say(f"pair {number}/{len(chosen)}: {pair.name}: prefill {pair.prefill}, decode {pair.decode}, {pair.model}")
        outcome = run_pair(pair, options, folder)
        say(f"  {outcome.words} ({outcome.seconds:.0f} s)")
        outcomes.append(outcome)
        # After each pair: what is known survives an interruption.
        if options.json is not None:
            found = {"connector": connector, "pairs": [outcome.as_json() for outcome in outcomes]}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(format_table(connector, outcomes), flush=True)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def run_pair(pair: Pair, options: Options, folder: Path) -> Outcome:
    """One pair, for at most the limit that the options give."""
    log, result = folder / f"{pair.name}.log", folder / f"{pair.name}.json"
    command = [sys.executable, "-m", "lab.demo", *pair.arguments(), "--connector", options.connectors[0]]
    command += ["--requests", str(options.requests), "--executor", options.executor, "--json", str(result)]
    command += ["--start-limit", str(options.start_limit)]
    command += ["--negative-control" if options.negative_control else "--no-negative-control"]
    if options.transport is not None:
        command += ["--transport", options.transport]
    if options.check_bytes:
        command += ["--check-bytes"]
    begin = time.monotonic()
    child = Child.program(command, log, deadly=signal.SIGTERM)
    try:
        status = child.wait(options.pair_limit)
    finally:
        child.stop(_END_LIMIT_S)
    seconds = time.monotonic() - begin
    value: Any = json.loads(result.read_text()) if result.exists() else {}
    text = log.read_text(errors="replace")
    causes = find_causes(server_logs(text))
    if status is None:
        told = f": {causes[0]}" if causes else ""
        return Outcome(pair, False, f"no result within {options.pair_limit} s{told}", seconds)
    return Outcome(pair, status == 0, describe(value, status == 0, causes), seconds)


def describe(value: dict[str, Any], passed: bool, causes: Sequence[str]) -> str:
    """A run's result in words.

    Args:
        value: What it wrote as JSON; empty where it wrote nothing.
        passed: Whether it said that all was well.
        causes: Exceptions in its servers' logs, the likeliest first.
    """
    if "requests" not in value:
        error = " ".join(str(value.get("error", "it ended without a result")).split("\n", 1)[0].split())
        return _shortened(f"failed: {causes[0]} ({error})" if causes else f"failed: {error}")
    requests = value["requests"]
    total = len(requests)
    failed = [request for request in requests if request["error"]]
    parts = []
    if failed:
        parts.append(f"{len(failed)} of {total} requests failed: {causes[0] if causes else failed[0]['error']}")
    compared = value["summary"]["cache_equal"] is not None
    if compared:
        right = sum(request["cache_equal"] for request in requests)
        parts.append(f"cache bytes equal: {right} of {total}")
    wrong = sum(not request["equal"] and not request["error"] for request in requests)
    if not compared or not value["summary"]["cache_equal"]:
        equal = sum(request["equal"] for request in requests)
        parts.append(f"tokens equal: {equal} of {total}" + (f", wrong tokens with HTTP 200: {wrong}" if wrong else ""))
    if not passed and not failed and not wrong:
        parts += value["failures"][:1]
        parts += causes[:1]
    return _shortened("; ".join(parts))


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * _MESSAGE_LENGTH else text[: 2 * _MESSAGE_LENGTH - 3] + "..."


def server_logs(text: str) -> list[Path]:
    """The logs of the prefill and decode servers of a run, from what it said."""
    match = re.search(r"; logs: (.+)$", text, re.MULTILINE)
    if match is None:
        return []
    folder = Path(match[1])
    # The decode server's first: it is the one that learns why a hand-over failed.
    return [log for name in ("decode", "prefill") for log in sorted(folder.glob(f"{name}*.log"))]


def find_causes(logs: Iterable[Path]) -> list[str]:
    """The exceptions and failed receives in the logs, each once; not those that only pass on that something failed."""
    found: dict[str, None] = {}
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            match = _NOT_RECEIVED.search(line) or _EXCEPTION.search(line)
            if match is not None and not _PASSED_ON.search(line):
                text = f"{match[1].rsplit('.', 1)[-1]}: {match[2].strip()}"
                found[text if len(text) <= _MESSAGE_LENGTH else text[: _MESSAGE_LENGTH - 3] + "..."] = None
    return list(found)


def format_table(connector: str, outcomes: Sequence[Outcome]) -> str:
    """All outcomes, as Markdown."""
    lines = [f"| pair | model | prefill | decode | {connector} |", "| --- | --- | --- | --- | --- |"]
    for outcome in outcomes:
        pair = outcome.pair
        words = outcome.words.replace("|", "\\|")
        passed = "passed" if outcome.passed else "NOT PASSED"
        lines.append(f"| {pair.name} | {pair.model} | `{pair.prefill}` | `{pair.decode}` | {passed}: {words} |")
    return "\n".join(lines)
