"""What counting costs: hand-overs between workers that count, that do not, and that trace too, in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from .engines.engine import Setup
from .errors import BenchError
from .figures import Row, columns, number, percentile
from .transfer import Samples, alternate
from .work import Work

WORKS = (Work("random", 16384, 1), Work("random", 16384, 64), Work("random", 16384, 4096))
"""One block, a short prompt, and 64 MiB."""
VARIANTS = ("counting", "not counting", "not counting, again", "counting and tracing")
"""What is compared. The second takes part twice: how far its two times are apart is what this run cannot tell."""


@dataclass
class Cost:
    """Times of one work, in milliseconds, of each variant: of all rounds, what of these was not the bytes' way, and the
    median of each sitting."""

    work: Work
    rounds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    beside: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    medians: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VARIANTS})

    def ratio(self, variant: str) -> float:
        """A variant's time by that without counting: the median over sittings of the ratio of their medians."""
        without = self.medians["not counting"]
        return median(some / other for some, other in zip(self.medians[variant], without, strict=True))


def measure(transport: str, rounds: int, sittings: int) -> list[Cost]:
    """`rounds` of each variant in each of `sittings` pairs of processes, which have workers of all variants."""
    costs = [Cost(work) for work in WORKS]
    try:
        made = tempfile.TemporaryDirectory(prefix="kvferry-bench-")
    except OSError as error:
        raise BenchError(f"the traces need a folder to write in, which TMPDIR can name: {error}") from None
    with made as folder:
        without: dict[str, object] = {"telemetry": False, "trace": ""}
        counting = {"telemetry": True, "trace": ""}
        variants = [counting, without, without, {"telemetry": True, "trace": str(Path(folder) / "%p.json")}]
        for cost in costs:
            for sitting in range(sittings):
                # Each is the first to be made in one sitting and the last in another.
                order = [(sitting + place) % len(VARIANTS) for place in range(len(VARIANTS))]
                options = {"variants": [variants[i] for i in order]}
                setup = Setup("counting", ".engines.counting", cost.work, transport, options=options)
                text = f"{cost.work.text}, sitting {sitting + 1} of {sittings}"
                # A cycle more, in which the workers meet.
                (samples,) = alternate([setup], (rounds + 1) * len(VARIANTS), text)
                _add(cost, [VARIANTS[i] for i in order], samples)
    return costs


def _add(cost: Cost, names: Sequence[str], samples: Samples) -> None:
    counted = samples.rounds[len(VARIANTS) :]
    for index, name in enumerate(names):
        taken = [one.took for one in counted if one.took.extra["variant"] == index]
        times = [took.seconds * 1e3 for took in taken]
        cost.rounds[name] += times
        cost.beside[name] += [took.extra["beside"] * 1e3 for took in taken]
        cost.medians[name].append(median(times))


def table(transport: str, costs: Sequence[Cost]) -> str:
    """All works and variants."""
    lines = []
    for cost in costs:
        for index, name in enumerate(VARIANTS):
            times = cost.rounds[name]
            beside = number(median(cost.beside[name]), 4)
            cells = (number(median(times), 4), number(percentile(times, 0.99)), f"{cost.ratio(name):.4f}", beside)
            lines.append((cost.work.text if index == 0 else "", name, *cells))
    sittings, rounds = len(costs[0].medians[VARIANTS[0]]), len(costs[0].rounds[VARIANTS[0]])
    head = ("", "", "median ms", "p99 ms", "by not counting", "beside the copy, ms")
    title = f"hand-overs between two workers, {transport}: {rounds} rounds in {sittings} sittings, in turns"
    return f"{title}\n{columns(head, lines, texts=2)}"


def summary(transport: str, costs: Sequence[Cost]) -> list[Row]:
    """A map per work: the median milliseconds of each variant, and its ratio to not counting."""
    return [
        {
            "work": cost.work.text,
            "transport": transport,
            "ms": {name: median(cost.rounds[name]) for name in VARIANTS},
            "beside_ms": {name: median(cost.beside[name]) for name in VARIANTS},
            "ratio": {name: cost.ratio(name) for name in VARIANTS},
        }
        for cost in costs
    ]
