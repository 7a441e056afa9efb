"""Transfers: kvferry, NIXL, Mooncake and the medium in alternating rounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from .engines.engine import Setup
from .engines.mooncake import MOONCAKE_LANES
from .engines.nixl import NIXL_THREADS
from .figures import Progress, Row, best, columns, number, percentile, row
from .memory import Pages
from .pair import Pair, Round
from .sizes import size_text
from .work import Work

WARM_UP = 2
"""Rounds of every engine that are not counted: connections, caches and allocators are cold."""
MEDIA = {"shm": ("vm", "memcpy"), "tcp": ("socket",), "cuda": ("device",)}
"""What stands for the medium. The first is the one that ratios are made with."""
_INSIDE = ("memcpy", "device")
_NAMES = {
    "behind": "kvferry, behind",
    "agent": "kvferry",
    "worker": "kvferry (worker)",
    "vm": "process_vm_readv, 1,024 pieces a call",
    "memcpy": "memcpy, one piece",
    "device": "copy within the GPU, one piece",
    "socket": "one TCP stream",
    "am": "UCX messages of 1 MiB",
}


@dataclass(frozen=True)
class Plan:
    """What is measured. `api` is the engine of ours: "agent" or "worker". `peer`: beside NIXL. `watch`: a thread of the
    starting side looks when the last byte comes, so that `notify_us` is right also where nobody looks for long; it
    takes processor time. `library`: another build of libkvferry.so to take turns with. `mooncake`: beside Mooncake,
    over TCP only; `poll_s` does not concern it."""

    work: Work
    transport: str = "shm"
    rounds: int = 15
    api: str = "agent"
    peer: bool = False
    limit: bool = False
    am_limit: Path | None = None
    poll_s: float = 0.0
    watch: bool = False
    config: dict[str, object] = field(default_factory=dict)
    library: Path | None = None
    mooncake: bool = False

    @property
    def text(self) -> str:
        """The work in words, for the row."""
        polling = f", polling every {self.poll_s * 1e3:g} ms" if self.poll_s else ""
        return self.work.text + polling


@dataclass
class Samples:
    """The rounds of one engine."""

    name: str
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


def setups(plan: Plan) -> list[Setup]:
    """The engines of a plan, ours first."""
    made = [Setup(plan.api, plan.work, plan.transport, plan.poll_s, dict(plan.config))]
    if plan.library is not None:
        made.append(replace(made[0], engine=f"{plan.api}@{plan.library}"))
    if plan.peer:
        for threads in NIXL_THREADS:
            made.append(Setup(f"nixl-{threads}", plan.work, plan.transport, plan.poll_s, {"num_threads": threads}))
    if plan.mooncake:
        for lanes in MOONCAKE_LANES:
            made.append(Setup(f"mooncake-{lanes}", plan.work, plan.transport, options={"lanes": lanes}))
    if plan.limit:
        if plan.am_limit is not None and plan.transport == "tcp" and plan.work.direction == "read":
            made.append(Setup("am", plan.work, plan.transport, 0.0, {"program": str(plan.am_limit)}))
        # A copy inside one process has no direction: it is into the memory of the starting side.
        inside = replace(plan.work, direction="read")
        media = MEDIA[plan.transport]
        made += [Setup(name, inside if name in _INSIDE else plan.work, plan.transport) for name in media]
    return made


def measure(plan: Plan) -> list[Samples]:
    """Takes the rounds of a plan's engines."""
    return alternate(setups(plan), plan.rounds, plan.text, plan.watch)


def alternate(engines: Sequence[Setup], rounds: int, text: str, watch: bool = False) -> list[Samples]:
    """The engines take turns, in the other order every second time."""
    samples = [Samples(setup.engine) for setup in engines]
    progress = Progress(text, (rounds + WARM_UP) * len(engines))
    pages = Pages()
    with ExitStack() as stack:
        stack.callback(pages.close)
        pairs = []
        for setup in engines:
            pair = stack.enter_context(Pair(replace(setup, pages=pages.of(setup.work))))
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


def summary(plan: Plan, samples: Sequence[Samples]) -> Row:
    """The row. Each figure of NIXL's and of Mooncake's is that of the setting in which it is better."""
    ours, *others = samples
    nixl = [one for one in others if one.name.startswith("nixl")]
    limit = next((one for one in others if one.name in ("am", MEDIA[plan.transport][0])), None)
    gigabytes = plan.work.bytes / 1e9
    peer_cpu = best([one.of("cpu") for one in nixl])
    nixl_p99 = [percentile(one.of("ms"), 0.99) for one in nixl]
    return row(
        plan.text,
        plan.transport,
        ours_ms=median(ours.of("ms")),
        peer_ms=best([one.of("ms") for one in nixl]),
        limit_ms=None if limit is None else median(limit.of("ms")),
        caller_us=best([ours.of("caller_us")]),
        peer_caller_us=best([one.of("caller_us") for one in nixl]),
        notify_us=best([ours.of("notify_us")]),
        cpu_s_per_gb=median(ours.of("cpu")) / gigabytes,
        peer_cpu_s_per_gb=None if peer_cpu is None else peer_cpu / gigabytes,
        ours_p99_ms=percentile(ours.of("ms"), 0.99),
        peer_p99_ms=min(nixl_p99, default=None),
        peer_notify_us=best([one.of("notify_us") for one in nixl]),
        mooncake_ms=best([one.of("ms") for one in others if one.name.startswith("mooncake")]),
    )


def label(engine: str) -> str:
    """An engine's name for people."""
    name, _, library = engine.partition("@")
    if library:
        return f"{label(name)} of {Path(library).name}"
    peer, _, setting = engine.rpartition("-")
    if peer == "mooncake":
        return f"Mooncake, {setting} lanes"
    return _NAMES.get(engine) or f"NIXL, num_threads {setting}"


def table(plan: Plan, samples: Sequence[Samples]) -> str:
    """All engines of a run."""
    gigabytes = plan.work.bytes / 1e9
    ours = median(samples[0].of("ms"))
    lines = []
    for one in samples:
        times = one.of("ms")
        middle = median(times)
        caller, notify = best([one.of("caller_us")]), best([one.of("notify_us")])
        name = label(one.name)
        lines.append(
            (
                name,
                number(middle),
                number(percentile(times, 0.99)),
                number(gigabytes / middle * 1e3),
                number(caller),
                number(best([one.of("caller_cpu_us")])),
                number(notify),
                number(median(one.of("cpu")) / gigabytes),
                number(ours / middle),
            )
        )
        placed = one.of("placed")
        if placed:
            middle = median(placed) * 1e3
            cells = (number(middle), "", number(gigabytes / middle * 1e3), "", "", "", "", number(ours / middle))
            lines.append(("  the same and copied into place", *cells))
    head = ("", "median ms", "p99 ms", "GB/s", "caller us", "its CPU us", "notify us", "CPU s/GB", "kvferry / it")
    title = f"{plan.text}, {plan.transport}: {size_text(plan.work.bytes)}, {plan.rounds} alternating rounds"
    return f"{title}\n{columns(head, lines)}"
