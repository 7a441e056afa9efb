"""What is measured beside kvferry: NIXL, Mooncake and the baseline, which is the medium itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kvferry.bench import transfer
from kvferry.bench.engines.engine import Setup
from kvferry.bench.figures import Row, best, percentile
from kvferry.bench.pair import Round
from kvferry.bench.transfer import Plan, Samples

from .engines.mooncake import MOONCAKE_LANES
from .engines.nixl import NIXL_THREADS

NIXL, MOONCAKE, BASELINE = (f"lab.bench.engines.{name}" for name in ("nixl", "mooncake", "baseline"))
BASELINES = {
    "shm": {"vm": "process_vm_readv, 1,024 pieces a call", "memcpy": "memcpy, one piece"},
    "tcp": {"socket": "one TCP stream"},
    "cuda": {"device": "copy within the GPU, one piece"},
}
"""By transport, or for a GPU's memory. Ratios are made with UCX's messages where those are measured, else the first."""
_INSIDE = ("memcpy", "device")


def nixl(setup: Setup) -> list[Setup]:
    """NIXL with each of its settings, for the work of `setup`."""
    return [
        replace(setup, name=f"NIXL, num_threads {threads}", engine=NIXL, options={"num_threads": threads})
        for threads in NIXL_THREADS
    ]


def mooncake(setup: Setup) -> list[Setup]:
    """Mooncake with each of its settings; over TCP only. Its call returns at the end, so that nothing is polled."""
    return [
        replace(setup, name=f"Mooncake, {lanes} lanes", engine=MOONCAKE, poll_s=0.0, options={"lanes": lanes})
        for lanes in MOONCAKE_LANES
    ]


def baselines(setup: Setup, am_limit: Path | None) -> list[Setup]:
    """The medium's. `am_limit` is the program of UCX's own messages."""
    found = {}
    if am_limit is not None and setup.transport == "tcp" and setup.work.direction == "read":
        found["am"] = "UCX messages of 1 MiB"
    made = []
    medium = "cuda" if setup.memory == "cuda" else setup.transport
    for kind, name in {**found, **BASELINES.get(medium, {})}.items():
        # A copy inside one process has no direction: it is into the memory of the starting side.
        work = replace(setup.work, direction="read") if kind in _INSIDE else setup.work
        options = {"kind": kind, "program": str(am_limit)}
        made.append(replace(setup, name=name, engine=BASELINE, work=work, poll_s=0.0, options=options))
    return made


def ratio(one: float | None, other: float | None) -> float | None:
    """A figure by another, where both were measured."""
    return one / other if one and other else None


def summary(plan: Plan, samples: Sequence[Samples]) -> Row:
    """The row of our engine and of those beside it: of NIXL's and Mooncake's settings the better one of each figure.

    `peer_ms`, `mooncake_ms` and `limit_ms` are times to completion of NIXL, Mooncake and the baseline. `ratio_peer` is
    ours divided by NIXL's and `ratio_mooncake` ours by Mooncake's; `ratio_limit` is the baseline's divided by ours.
    """
    ours, *others = samples
    row = transfer.summary(plan, ours)

    def of(engine: str) -> list[Samples]:
        return [one for one in others if one.setup.engine == engine]

    def least(some: Iterable[Samples], what: str) -> float | None:
        return best([one.of(what) for one in some])

    stock, baseline = of(NIXL), of(BASELINE)[:1]
    peer, limit, theirs = least(stock, "ms"), least(baseline, "ms"), least(of(MOONCAKE), "ms")
    cpu = least(stock, "cpu")
    return {
        **row,
        "peer_ms": peer,
        "limit_ms": limit,
        "mooncake_ms": theirs,
        "ratio_peer": ratio(row["ours_ms"], peer),
        "ratio_limit": ratio(limit, row["ours_ms"]),
        "ratio_mooncake": ratio(row["ours_ms"], theirs),
        "peer_caller_us": least(stock, "caller_us"),
        "peer_notify_us": least(stock, "notify_us"),
        "peer_cpu_s_per_gb": cpu and cpu / plan.work.bytes * 1e9,
        "peer_p99_ms": min((percentile(one.of("ms"), 0.99) for one in stock), default=None),
    }


def table(plan: Plan, samples: Sequence[Samples]) -> str:
    """All engines of a run, and UCX's messages once more with the copy into place that they do without."""
    shown = []
    for one in samples:
        shown.append(one)
        if one.of("placed"):
            placed = [Round(replace(some.took, seconds=some.took.extra["placed"]), None) for some in one.rounds]
            shown.append(Samples(replace(one.setup, name="  the same and copied into place"), placed))
    return transfer.table(plan, shown)
