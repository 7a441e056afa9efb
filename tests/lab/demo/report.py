"""Turns a run's observations into tables and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.demo.cache_check import CacheCheck

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Receive:
    """A request's receive, joined over the decode engine's ranks."""

    # Blocks per rank, bytes over all ranks, and the slowest rank's time.
    blocks: int | None
    bytes: int | None
    transfer_ms: float | None
    # How many ranks told of it.
    ranks: int = 0


@dataclass(frozen=True)
class Row:
    """One prompt's line."""

    name: str
    prompt_tokens: int
    blocks: int | None
    bytes: int | None
    transfer_ms: float | None
    handover_ms: float | None
    equal: bool
    # What went wrong with the request, on one line.
    error: str = ""
    # The comparison of its cache, where the run makes one.
    cache: CacheCheck | None = None
    # From the client's request to its first token.
    first_token_ms: float | None = None


@dataclass
class Result:
    """What one connector's run showed."""

    connector: str
    # Whether a prompt's tokens have to be the baseline's. The alternative is that its cache is compared.
    tokens_count: bool = True
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # The hand-over before the counted ones, where the run makes one.
    first_handover_ms: float | None = None
    # Processors that the prefill and the decode engine use together without a request, where the run measures it.
    idle_cpus: float | None = None

    @property
    def equal(self) -> bool:
        """Whether every prompt's tokens were the baseline's."""
        return bool(self.rows) and all(row.equal for row in self.rows)

    @property
    def cache_equal(self) -> bool | None:
        """Whether every prompt's cache arrived as it was, None where it was not compared."""
        checks = [row.cache for row in self.rows if row.cache is not None]
        return len(checks) == len(self.rows) and all(check.equal for check in checks) if checks else None

    @property
    def passed(self) -> bool:
        """Whether everything that the run checks held."""
        answered = all(not row.error for row in self.rows)
        if self.tokens_count:
            return self.equal and answered and self.cache_equal is not False and not self.failures
        return answered and self.cache_equal is True and not self.failures

    def handovers(self) -> list[float]:
        """The hand-over times that are known, in milliseconds."""
        return [row.handover_ms for row in self.rows if row.handover_ms is not None]

    def as_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        handovers = self.handovers()
        return {
            "connector": self.connector,
            "requests": [
                {
                    "prompt_tokens": row.prompt_tokens,
                    "blocks": row.blocks,
                    "bytes": row.bytes,
                    "transfer_ms": _rounded(row.transfer_ms),
                    "handover_ms": _rounded(row.handover_ms),
                    "first_token_ms": _rounded(row.first_token_ms),
                    "equal": row.equal,
                    "error": row.error or None,
                    **({} if row.cache is None else _cache_json(row.cache)),
                }
                for row in self.rows
            ],
            "failures": self.failures,
            "summary": {
                "passed": self.passed,
                "equal": self.equal,
                "cache_equal": self.cache_equal,
                "first_handover_ms": _rounded(self.first_handover_ms),
                "handover_p50_ms": _rounded(statistics.median(handovers)) if handovers else None,
                "handover_max_ms": _rounded(max(handovers)) if handovers else None,
                "idle_cpus": _rounded(self.idle_cpus),
            },
        }


def _cache_json(check: CacheCheck) -> dict[str, Any]:
    return {
        "cache_bytes": check.compared,
        "cache_bytes_differing": check.differing,
        "cache_equal": check.equal,
        "cache_problem": check.problem,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _shown(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def read_traces(path: Path) -> dict[str, Receive]:
    """Joins what the traces of the decode engine's ranks tell of receives that succeeded, by vLLM's request id.

    `path` is the file of the first rank; the others' have a number in their names.
    """
    # Not installed where other connectors run alone.
    from kvferry import trace

    receives = trace.read(path.parent.glob(f"{path.stem}*{path.suffix}")).receives
    good = (receive for receive in receives if receive.outcome == "received")
    return _join((each.request, each.blocks, each.bytes, each.stage("transfer")) for each in good)


def _join(told: Iterable[tuple[str, int, int, float | None]]) -> dict[str, Receive]:
    """By request; `told` has a rank's blocks, bytes and microseconds of one."""
    found: dict[str, list[tuple[int, int, float | None]]] = {}
    for request, blocks, size, time in told:
        found.setdefault(request, []).append((blocks, size, time))
    return {
        request: Receive(
            max(blocks for blocks, _, _ in ranks),
            sum(size for _, size, _ in ranks),
            max((time / 1e3 for _, _, time in ranks if time is not None), default=None),
            len(ranks),
        )
        for request, ranks in found.items()
    }


def unseen_transfers(rows: Iterable[Row]) -> list[str]:
    """The requests that kvferry answered without telling of bytes: nothing shows that it moved their caches."""
    return [
        f"{row.name}: no trace tells of bytes that kvferry moved for it" for row in rows if not (row.error or row.bytes)
    ]


def read_receives(path: Path) -> dict[str, Receive]:
    """Joins the lines that the decode engine's ranks wrote (`lab.probes.nixl`), by vLLM's request id."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return _join(tuple(json.loads(line)) for line in lines)


def format_rows(rows: Sequence[Row]) -> str:
    """The table of one run."""
    cached = any(row.cache is not None for row in rows)
    head = f"{'prompt':<8}{'tokens':>8}{'blocks':>8}{'bytes':>12}{'transfer ms':>13}{'hand-over ms':>14}"
    head += f"{'cache bytes':>13}{'differing':>11}" if cached else ""
    head += f"  {'tokens equal' if cached else 'equal'}"
    lines = [head, "-" * len(head)]
    for row in rows:
        blocks = "-" if row.blocks is None else str(row.blocks)
        size = "-" if row.bytes is None else str(row.bytes)
        line = (
            f"{row.name:<8}{row.prompt_tokens:>8}{blocks:>8}{size:>12}{_shown(row.transfer_ms, 2):>13}"
            f"{_shown(row.handover_ms):>14}"
        )
        notes = [row.error]
        if row.cache is not None:
            line += f"{row.cache.compared:>13}{row.cache.differing:>11}"
            notes.append(row.cache.problem or "")
        line += f"  {'yes' if row.equal else 'NO'}"
        lines.append("  ".join([line, *(note for note in notes if note)]))
    return "\n".join(lines)


def joined(results: Sequence[Result]) -> list[Result]:
    """One result for each connector: the rows of all its turns. What a turn has once is the median over them."""
    turns: dict[str, list[Result]] = {}
    for result in results:
        turns.setdefault(result.connector, []).append(result)
    return [
        Result(
            name,
            tokens_count=found[0].tokens_count,
            rows=[row for result in found for row in result.rows],
            failures=[failure for result in found for failure in result.failures],
            notes=[note for result in found for note in result.notes],
            first_handover_ms=_median(result.first_handover_ms for result in found),
            idle_cpus=_median(result.idle_cpus for result in found),
        )
        for name, found in turns.items()
    ]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def format_comparison(results: Sequence[Result]) -> str:
    """The table of several connectors, as Markdown."""
    lines = [
        "| connector | prompts equal | first hand-over ms | hand-over p50 ms | hand-over max ms | transfer p50 ms "
        "| transfer max ms | first token p50 ms | idle CPUs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        handovers = result.handovers()
        tokens = [row.first_token_ms for row in result.rows if row.first_token_ms is not None]
        times = [row.transfer_ms for row in result.rows if row.transfer_ms is not None]
        equal = sum(row.equal for row in result.rows)
        lines.append(
            f"| {result.connector} | {equal} of {len(result.rows)} | {_shown(result.first_handover_ms)} "
            f"| {_shown(statistics.median(handovers) if handovers else None)} | {_shown(max(handovers, default=None))} "
            f"| {_shown(statistics.median(times) if times else None, 2)} | {_shown(max(times, default=None), 2)} "
            f"| {_shown(statistics.median(tokens) if tokens else None)} | {_shown(result.idle_cpus, 3)} |"
        )
    return "\n".join(lines)
