"""One block behind a large request to the same peer, beside one block alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from .figures import Row, best, columns, number, percentile
from .sizes import size_text
from .transfer import Plan, Samples, alternate


def measure(plan: Plan) -> list[Samples]:
    """`plan.work` is the large request. A block alone, and a block behind."""
    alone = replace(plan.setup, name="kvferry, alone", work=replace(plan.work, blocks=1))
    behind = replace(plan.setup, name="kvferry, behind", engine=".engines.behind")
    return alternate([alone, behind], plan.rounds, text(plan))


def text(plan: Plan) -> str:
    """The work in words."""
    return f"1 x {size_text(plan.work.block_bytes)} behind {size_text(plan.work.bytes)}"


def summary(plan: Plan, samples: Sequence[Samples]) -> Row:
    """The row. `limit_ms` is the one block's time alone, `ours_ms` its time from its own call, and `ratio_limit` the
    first divided by the second."""
    alone, behind = median(samples[0].of("ms")), median(samples[1].of("own")) * 1e3
    return {
        "work": text(plan),
        "transport": plan.transport,
        "ours_ms": behind,
        "ours_p99_ms": percentile(samples[1].of("own"), 0.99) * 1e3,
        "limit_ms": alone,
        "ratio_limit": alone / behind,
        "caller_us": best([samples[1].of("caller_us")]),
    }


def table(plan: Plan, samples: Sequence[Samples]) -> str:
    """All engines of a run."""
    alone = median(samples[0].of("ms"))
    lines = []
    for one in samples:
        times = one.of("ms")
        own = [seconds * 1e3 for seconds in one.of("own")] or times
        large = best([one.of("large")])
        cells = (median(own), percentile(own, 0.99), median(times), None if large is None else large * 1e3)
        lines.append((one.setup.name, *map(number, cells), number(median(own) / alone)))
    head = ("", "from its own call, ms", "p99", "from both, ms", "the large one ms", "its own / alone")
    return f"{text(plan)}, {plan.transport}, {plan.rounds} alternating rounds\n{columns(head, lines)}"
