"""One block behind a large request to the same peer, beside one block alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from .engines.engine import Setup
from .engines.nixl import NIXL_THREADS
from .figures import Row, best, columns, number, percentile, row
from .sizes import size_text
from .transfer import Plan, Samples, alternate


def measure(plan: Plan) -> list[Samples]:
    """`plan.work` is the large request. Ours alone and behind, then NIXL's behind."""
    alone = replace(plan.work, blocks=1)
    engines = [
        Setup("agent", alone, plan.transport, options=dict(plan.config)),
        Setup("behind", plan.work, plan.transport, options=dict(plan.config)),
    ]
    if plan.peer:
        for threads in NIXL_THREADS:
            engines.append(Setup(f"behind-nixl-{threads}", plan.work, plan.transport, options={"num_threads": threads}))
    return alternate(engines, plan.rounds, text(plan))


def text(plan: Plan) -> str:
    """The work in words."""
    return f"1 x {size_text(plan.work.block_bytes)} behind {size_text(plan.work.bytes)}"


def summary(plan: Plan, samples: Sequence[Samples]) -> Row:
    """The row. `limit_ms` is the one block's time alone, `ours_ms` its time from its own call.

    `peer_ms` is from before the call for the large one, since NIXL may hold the thread up in that.
    """
    alone, behind, *nixl = samples
    return row(
        text(plan),
        plan.transport,
        ours_ms=median(behind.of("own")) * 1e3,
        limit_ms=median(alone.of("ms")),
        peer_ms=best([one.of("ms") for one in nixl]),
        caller_us=best([behind.of("caller_us")]),
        peer_caller_us=best([one.of("caller_us") for one in nixl]),
        ours_p99_ms=percentile(behind.of("own"), 0.99) * 1e3,
    )


def table(plan: Plan, samples: Sequence[Samples]) -> str:
    """All engines of a run."""
    alone = median(samples[0].of("ms"))
    names = ["kvferry, alone", "kvferry, behind", *(f"NIXL, num_threads {n}, behind" for n in NIXL_THREADS)]
    lines = []
    for name, one in zip(names, samples, strict=False):
        times = one.of("ms")
        own = [seconds * 1e3 for seconds in one.of("own")] or times
        large = best([one.of("large")])
        cells = (median(own), percentile(own, 0.99), median(times), None if large is None else large * 1e3)
        lines.append((name, *map(number, cells), number(median(own) / alone)))
    head = ("", "from its own call, ms", "p99", "from both, ms", "the large one ms", "its own / alone")
    return f"{text(plan)}, {plan.transport}, {plan.rounds} alternating rounds\n{columns(head, lines)}"
