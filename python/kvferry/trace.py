"""Reads traces of runs (`trace` of a worker's config, or `KVFERRY_TRACE`) and sums them up.

The files are in Chrome's trace event format, array form, one event per line; docs/telemetry.md has what is in them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

STAGES: dict[str, tuple[str, str, str]] = {
    "total": ("known", "reported", "from the worker's first word of the request to the report"),
    "ahead": ("first_chunk", "known", "chunks are read before the end of the prefill is known"),
    "held": ("known", "queued", "the lease is kept, the engine has not asked for the load"),
    "handshake": ("handshake", "connected", "metadata is fetched and ranks are connected, where the request waited"),
    "queued": ("queued", "planned", "the load waits until the first rank needed is connected"),
    "planned": ("planned", "posted", "the reads are worked out, and wait for room to be posted"),
    "posting": ("posted", "all_posted", "reads are handed to UCX, while others are under way"),
    "transfer": ("posted", "last_byte", "bytes are under way"),
    "confirm": ("last_byte", "confirmed", "the producer is told, and says whether the lease held"),
    "report": ("confirmed", "reported", "the report is handed to the engine"),
}
"""Each stage of a receive: its first and last moment as in the file, and what happens in it."""

MOMENTS = (
    "first_chunk",
    "known",
    "queued",
    "handshake",
    "connected",
    "planned",
    "posted",
    "all_posted",
    "last_byte",
    "confirmed",
    "reported",
)
FORMER = {"chunks": "portions", "first_chunk": "first_portion"}
"""The names of these in older traces, whose outcome "given_back" is "released" now."""
PERCENTILES = (50, 90, 99)


class TraceError(ValueError):
    """The file is no trace, or cannot be read."""


@dataclass(frozen=True)
class Process:
    """A worker that wrote a trace."""

    name: str
    engine: str
    rank: str
    pid: int
    incarnation: str


@dataclass
class Receive:
    """One receive. Times are microseconds since 1970; None for what was not reached.

    `outcome` is "received", a failure's cause, "released" for one that was held and not loaded, and None for one
    whose end is not in the file.
    """

    process: int
    request: str
    began: float
    outcome: str | None = None
    ended: float | None = None
    moments: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    blocks: int = 0
    operations: int = 0
    chunks: int = 0
    ahead_bytes: int = 0
    engine: str = ""
    remote_request: str = ""
    message: str = ""

    def stage(self, name: str) -> float | None:
        """Microseconds that a stage took, None if it was not gone through."""
        first, last, _ = STAGES[name]
        begin, end = self.moments.get(first), self.moments.get(last)
        if begin is None or end is None or (name == "held" and begin == end):
            return None
        return max(0.0, end - begin)


@dataclass
class Send:
    """One lease. `outcome` is "read", "released", "expired", "dropped", or None while it holds."""

    process: int
    request: str
    began: float
    outcome: str | None = None
    ended: float | None = None


@dataclass
class Trace:
    """The content of some files."""

    files: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    left_out: int = 0
    damaged: int = 0
    """Lines that are no events. The last one of a file that was cut short does not count."""


class _Damaged(ValueError):
    pass


def _text(event: Mapping[str, Any], key: str) -> str:
    value = event.get(key, "")
    if not isinstance(value, str):
        raise _Damaged(key)
    return value


def _number(event: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = event.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 2**53:
        raise _Damaged(key)
    return value


def _no_constant(name: str) -> Any:
    raise _Damaged(name)


class _File:
    """The events of one file, by the ids in it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.process: int | None = None
        self.name = ""
        self.receives: dict[str, Receive] = {}
        self.sends: dict[str, Send] = {}

    def take(self, event: Any) -> None:
        if not isinstance(event, dict):
            raise _Damaged("event")
        phase, args = event.get("ph"), event.get("args", {})
        if not isinstance(args, dict):
            raise _Damaged("args")
        if phase == "M":
            self.meta(event, args)
        elif phase == "i" and event.get("name") == "left out":
            self.trace.left_out += int(_number(args, "left_out"))
        elif self.process is not None and phase in ("b", "e"):
            kind, id = event.get("cat"), _text(event, "id")
            if phase == "b" and "request" in args:
                self.begin(kind, id, _text(args, "request"), _number(event, "ts"))
            elif phase == "e" and "outcome" in args:
                self.end(kind, id, event, args)

    def meta(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        if event.get("name") == "process_name":
            self.name = _text(args, "name")
        if event.get("name") == "kvferry":
            rank = f"pp {int(_number(args, 'pp_rank'))} tp {int(_number(args, 'tp_rank'))}"
            pid = int(_number(event, "pid"))
            made = Process(self.name, _text(args, "engine"), rank, pid, _text(args, "incarnation"))
            self.process = len(self.trace.processes)
            self.trace.processes.append(made)

    def begin(self, kind: object, id: str, request: str, at: float) -> None:
        assert self.process is not None
        if kind == "recv":
            self.receives[id] = Receive(self.process, request, at)
            self.trace.receives.append(self.receives[id])
        elif kind == "send":
            self.sends[id] = Send(self.process, request, at)
            self.trace.sends.append(self.sends[id])

    def end(self, kind: object, id: str, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        outcome, at = _text(args, "outcome"), _number(event, "ts")
        if kind == "send" and (send := self.sends.pop(id, None)) is not None:
            send.outcome, send.ended = outcome, at
        if kind != "recv" or (receive := self.receives.pop(id, None)) is None:
            return
        args = {name: args[former] for name, former in FORMER.items() if former in args} | dict(args)
        outcome = "released" if outcome == "given_back" else outcome
        moments = {key: _number(args, key) for key in MOMENTS if args.get(key) is not None}
        receive.bytes, receive.blocks, receive.operations = (
            int(_number(args, key, 0)) for key in ("bytes", "blocks", "operations")
        )
        # Older traces do not have them.
        receive.chunks, receive.ahead_bytes = (int(_number(args, key, 0)) for key in ("chunks", "ahead_bytes"))
        receive.engine, receive.remote_request = _text(args, "engine"), _text(args, "remote_request")
        receive.message = args["message"] if isinstance(args.get("message"), str) else ""
        receive.moments, receive.outcome, receive.ended = moments, outcome, at


def read(paths: Iterable[Path]) -> Trace:
    """Reads files of one or several workers, also such that are still written to or were cut short.

    Raises `TraceError` for a file that cannot be read or is no trace of kvferry.
    """
    trace = Trace()
    for path in paths:
        file = _File(trace)
        try:
            with path.open("rb") as lines:
                torn = False
                for line in lines:
                    # A torn line counts only if others follow it.
                    trace.damaged += torn
                    torn = not _line(file, line)
                torn = torn and line.endswith(b"\n")
                trace.damaged += torn
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
        if file.process is None:
            raise TraceError(
                f"{path} is no trace of kvferry: it does not say which worker wrote it; give files that the key "
                "`trace` or the environment variable KVFERRY_TRACE named"
            )
        trace.files.append(str(path))
    return trace


def _line(file: _File, line: bytes) -> bool:
    """Takes a line; whether it was whole."""
    body = line.strip().removesuffix(b",")
    if body in (b"", b"[", b"]"):
        return True
    try:
        file.take(json.loads(body, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return False
    return True


class StageSummary(TypedDict):
    """A stage of the receives that succeeded, in milliseconds."""

    stage: str
    meaning: str
    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class SlowReceive(TypedDict):
    """A receive, with its stages in milliseconds."""

    request: str
    process: str
    outcome: str | None
    bytes: int
    stages_ms: dict[str, float]


class Failure(TypedDict):
    """Receives that failed for one cause, and what the first of them said."""

    cause: str
    count: int
    request: str
    message: str


class Summary(TypedDict):
    """The output of `kvferry trace --json`."""

    files: list[str]
    processes: list[str]
    seconds: float
    received: int
    failed: int
    released: int
    unfinished: int
    bytes: int
    blocks: int
    operations: int
    chunks: int
    ahead_bytes: int
    stages: list[StageSummary]
    slowest: list[SlowReceive]
    failures: list[Failure]
    sends: dict[str, int]
    left_out: int
    damaged: int


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of the ordered values that `percent` of all do not exceed."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def _stage(name: str, receives: Iterable[Receive]) -> StageSummary | None:
    taken = sorted(value / 1e3 for one in receives if (value := one.stage(name)) is not None)
    if not taken:
        return None
    p50, p90, p99 = (percentile(taken, percent) for percent in PERCENTILES)
    return {
        "stage": name,
        "meaning": STAGES[name][2],
        "count": len(taken),
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "max_ms": taken[-1],
    }


def _failures(failed: Iterable[Receive]) -> list[Failure]:
    by_cause: dict[str, list[Receive]] = {}
    for one in failed:
        by_cause.setdefault(str(one.outcome), []).append(one)
    ordered = sorted(by_cause.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        {"cause": cause, "count": len(ones), "request": ones[0].request, "message": ones[0].message}
        for cause, ones in ordered
    ]


def process_text(process: Process) -> str:
    """A worker in words. Where it was given no name of its own, its name is its engine and rank."""
    if process.engine in process.name:
        return f"{process.name} (pid {process.pid})"
    return f"{process.name} (engine {process.engine}, {process.rank}, pid {process.pid})"


def summarize(trace: Trace, slowest: int = 10) -> Summary:
    """Counts, percentiles per stage, the slowest receives, failures by cause."""
    received = [one for one in trace.receives if one.outcome == "received"]
    released = [one for one in trace.receives if one.outcome == "released"]
    unfinished = [one for one in trace.receives if one.outcome is None]
    failed = [one for one in trace.receives if one.outcome not in ("received", "released", None)]
    spans: list[Receive | Send] = [*trace.receives, *trace.sends]
    ends = [at for one in spans for at in (one.began, one.ended) if at is not None]
    stages = [_stage(name, received) for name in STAGES]
    slow = sorted((one for one in (*received, *failed)), key=lambda one: -(one.stage("total") or 0))[:slowest]
    return {
        "files": trace.files,
        "processes": [process_text(process) for process in trace.processes],
        "seconds": (max(ends) - min(ends)) / 1e6 if ends else 0.0,
        "received": len(received),
        "failed": len(failed),
        "released": len(released),
        "unfinished": len(unfinished),
        "bytes": sum(one.bytes for one in received),
        "blocks": sum(one.blocks for one in received),
        "operations": sum(one.operations for one in received),
        "chunks": sum(one.chunks for one in received),
        "ahead_bytes": sum(one.ahead_bytes for one in received),
        "stages": [stage for stage in stages if stage is not None],
        "slowest": [
            {
                "request": one.request,
                "process": process_text(trace.processes[one.process]),
                "outcome": one.outcome,
                "bytes": one.bytes,
                "stages_ms": {name: taken / 1e3 for name in STAGES if (taken := one.stage(name)) is not None},
            }
            for one in slow
        ],
        "failures": _failures(failed),
        "sends": dict(sorted(Counter(one.outcome or "held" for one in trace.sends).items())),
        "left_out": trace.left_out,
        "damaged": trace.damaged,
    }
