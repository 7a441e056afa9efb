"""Transfers: kvferry in turns with whatever else is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from .engines.engine import AGENT, WORKER, Setup
from .figures import Progress, Row, best, columns, number, percentile
from .memory import Pages
from .pair import Pair, Round
from .sizes import size_text
from .work import Work

WARM_UP = 2
"""Rounds of every engine that are not counted: connections, caches and allocators are cold."""
NAMES = {AGENT: "kvferry", WORKER: "kvferry (worker)"}


@dataclass(frozen=True)
class Plan:
    """What is measured. `api` is the engine of ours: `AGENT` or `WORKER`. `watch`: a thread of the starting side looks
    when the last byte comes, so that `notify_us` is right also where nobody looks for long; it takes processor time."""

    work: Work
    transport: str = "shm"
    rounds: int = 15
    api: str = AGENT
    poll_s: float = 0.0
    watch: bool = False
    config: dict[str, object] = field(default_factory=dict)
    memory: Literal["host", "cuda"] = "host"

    @property
    def text(self) -> str:
        """The work in words, for the row."""
        polling = f", polling every {self.poll_s * 1e3:g} ms" if self.poll_s else ""
        return self.work.text + polling

    @property
    def setup(self) -> Setup:
        """Our engine."""
        config = dict(self.config)
        return Setup(NAMES[self.api], self.api, self.work, self.transport, self.poll_s, config, memory=self.memory)


@dataclass
class Samples:
    """The rounds of one engine."""

    setup: Setup
    rounds: list[Round] = field(default_factory=list)

    def of(self, what: str) -> list[float]:
        """One figure of all rounds, in the units of `Row`; empty where it was not measured."""
        got: list[float | None]
        if what == "ms":
            got = [one.took.seconds * 1e3 for one in self.rounds]
        elif what == "caller_us":
            got = [None if one.took.caller is None else one.took.caller * 1e6 for one in self.rounds]
        elif what == "caller_cpu_us":
            got = [one.took.extra["caller_cpu"] * 1e6 for one in self.rounds if "caller_cpu" in one.took.extra]
        elif what == "notify_us":
            got = [None if one.notify_s is None else one.notify_s * 1e6 for one in self.rounds]
        elif what == "cpu":
            got = [one.took.cpu for one in self.rounds]
        else:
            got = [one.took.extra.get(what) for one in self.rounds]
        return [value for value in got if value is not None]


def measure(plan: Plan, beside: Sequence[Setup] = ()) -> list[Samples]:
    """Takes the rounds of our engine and of others beside it."""
    return alternate([plan.setup, *beside], plan.rounds, plan.text, plan.watch)


def alternate(
    engines: Sequence[Setup], rounds: int, text: str, watch: bool = False, make: Callable[[Setup], Any] = Pair
) -> list[Samples]:
    """The engines take turns, in the other order every second time. `make` starts one, as `Pair` does."""
    samples = [Samples(setup) for setup in engines]
    progress = Progress(text, (rounds + WARM_UP) * len(engines))
    pages = Pages()
    with ExitStack() as stack:
        stack.callback(pages.close)
        pairs = []
        for setup in engines:
            pair = stack.enter_context(make(replace(setup, pages=pages.of(setup.work))))
            # Before it is stopped for the first time: engines give up a connection that is not made within seconds.
            pair.round()
            pair.pause()
            pairs.append(pair)
        stack.callback(progress.end)
        for index in range(rounds + WARM_UP):
            order = range(len(pairs)) if index % 2 else range(len(pairs) - 1, -1, -1)
            for turn in order:
                pairs[turn].resume()
                one = pairs[turn].round(watch)
                pairs[turn].pause()
                if index >= WARM_UP:
                    samples[turn].rounds.append(one)
                progress.step()
    return samples


def summary(plan: Plan, ours: Samples) -> Row:
    """The row of our engine."""
    return {
        "work": plan.text,
        "transport": plan.transport,
        "ours_ms": median(ours.of("ms")),
        "ours_p99_ms": percentile(ours.of("ms"), 0.99),
        "caller_us": best([ours.of("caller_us")]),
        "notify_us": best([ours.of("notify_us")]),
        "cpu_s_per_gb": median(ours.of("cpu")) / plan.work.bytes * 1e9,
    }


def table(plan: Plan, samples: Sequence[Samples]) -> str:
    """All engines of a run, ours first."""
    gigabytes = plan.work.bytes / 1e9
    ours = median(samples[0].of("ms"))
    lines = []
    for one in samples:
        times = one.of("ms")
        middle = median(times)
        figures = (
            middle,
            percentile(times, 0.99),
            gigabytes / middle * 1e3,
            *(best([one.of(what)]) for what in ("caller_us", "caller_cpu_us", "notify_us")),
            median(one.of("cpu")) / gigabytes,
            ours / middle,
        )
        lines.append((one.setup.name, *map(number, figures)))
    head = ("", "median ms", "p99 ms", "GB/s", "caller us", "its CPU us", "notify us", "CPU s/GB", "kvferry / it")
    title = f"{plan.text}, {plan.transport}: {size_text(plan.work.bytes)}, {plan.rounds} alternating rounds"
    return f"{title}\n{columns(head, lines)}"
