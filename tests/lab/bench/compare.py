"""Two builds beside each other, each with its own Python package: which lines differ by more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from kvferry.bench import transfer
from kvferry.bench.errors import BenchError
from kvferry.bench.figures import columns
from kvferry.bench.transfer import Plan
from kvferry.bench.work import Work

from .measure import SHM, TCP, Shape

LINES: dict[str, Shape] = {
    "shm-4k": SHM[1],
    "shm-16k": SHM[0],
    "shm-64k": SHM[2],
    "shm-contiguous": SHM[3],
    "tcp-4k": TCP[1],
    "tcp-16k": TCP[0],
    "tcp-64k": TCP[2],
}
"""What is compared, named as the lines of the table."""
ERRORS, LEAST = 3.0, 0.05
"""A line has moved if it differs by more than so many standard errors, and by more than this part. With eight
set-ups of equal builds, one line in fifty differs by three errors (Student's t), and there are seven lines."""
FEWEST = 6
"""Set-ups: fewer give no standard error to rely on. Their number is even, so that the roles are even."""


@dataclass(frozen=True)
class Change:
    """The tree's time divided by the other build's: the geometric mean over all set-ups, and the standard error of its
    logarithm; NaN where one set-up does not tell."""

    ratio: float
    error: float

    @property
    def verdict(self) -> str:
        """In a word, empty where it may be noise."""
        # The logarithm's, in which slower and faster are the same.
        away = abs(math.log(self.ratio))
        if not (away > ERRORS * self.error and away > math.log1p(LEAST)):
            return ""
        return "slower" if self.ratio > 1 else "faster"


def change(ratios: Sequence[float]) -> Change:
    """What the ratios of all set-ups say together. Raises `ValueError` without any."""
    logs = [math.log(ratio) for ratio in ratios]
    if not logs:
        raise ValueError("no set-up was measured")
    mean = sum(logs) / len(logs)
    if len(logs) == 1:
        return Change(math.exp(mean), math.nan)
    variance = sum((one - mean) ** 2 for one in logs) / (len(logs) - 1)
    return Change(math.exp(mean), math.sqrt(variance / len(logs)))


@dataclass(frozen=True)
class Build:
    """A library, the folder of the Python package that belongs to it, and whose they are."""

    library: Path
    package: Path
    name: str


def _ratio(shape: Shape, rounds: int, tree: Build, other: Build, swapped: bool) -> float:
    """The tree's median divided by the other build's, in a set-up of its own."""
    transport, pattern, blocks, size = shape
    plan = Plan(Work(pattern, size, blocks), transport, rounds)  # type: ignore[arg-type]
    engines = [
        replace(plan.setup, name=build.name, library=str(build.library), package=str(build.package))
        for build in ((other, tree) if swapped else (tree, other))
    ]
    one, two = (median(samples.of("ms")) for samples in transfer.alternate(engines, rounds, plan.text))
    return two / one if swapped else one / two


def compare(names: Sequence[str], rounds: int, setups: int, tree: Build, other: Build) -> int:
    """Measures the lines and prints them. Exit code."""
    for build in (tree, other):
        try:
            _ratio(("shm", "random", 16, 4096), 1, build, build, False)
        except BenchError as error:
            print(f"error: the build of {build.name} cannot be measured:\n{error}")
            return 1
    cells = []
    for name in names:
        ratios = [_ratio(LINES[name], rounds, tree, other, bool(number % 2)) for number in range(setups)]
        found = change(ratios)
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        cells.append((name, each, f"{found.ratio:.3f}", f"{found.error:.3f}", found.verdict))
        print(f"{name}: {found.ratio:.3f} +- {found.error:.3f}  {found.verdict}", flush=True)
    print(f"\n{tree.name}'s time divided by that of {other.name}, {setups} set-ups of {rounds} rounds")
    print(columns(("line", "set-ups", "ratio", "error", ""), cells, texts=2))
    print(f"\nA line moved if it differs by more than {ERRORS:.0f} errors and by more than {LEAST:.0%}.")
    return 0
