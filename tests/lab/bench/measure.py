"""The measurements behind the lines: each is a call into `kvferry.bench` that prints its own table and gives a row."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from kvferry.bench import behind, handshake, idle, listener, planning, transfer
from kvferry.bench.engines.engine import WORKER, Setup
from kvferry.bench.figures import Row, best, percentile
from kvferry.bench.transfer import Plan
from kvferry.bench.work import Work

from . import beside, nixl

ROOT = Path(__file__).resolve().parents[3]
MANY_LAYERS, MANY_BLOCKS = 64, 4096
"""262,144 block-layers in one request."""
POLL_S = 0.05
COLD_BLOCKS = 131_072
IDLE_PEERS, IDLE_S = 100, 10.0
CLIENTS, VISITS = 1000, 20_000
VLLM_REQUESTS, VLLM_TURNS = 200, 2
"""Requests of each connector, and in how many turns, between which the others have theirs."""

Shape = tuple[str, str, int, int]
"""Transport, pattern, blocks, bytes per block."""
SHM: list[Shape] = [
    ("shm", "random", 2048, 16384),
    ("shm", "random", 8192, 4096),
    ("shm", "random", 2048, 65536),
    ("shm", "contiguous", 2048, 16384),
]
TCP: list[Shape] = [
    ("tcp", "random", 2048, 16384),
    ("tcp", "random", 8192, 4096),
    ("tcp", "random", 2048, 65536),
]


@dataclass(frozen=True)
class Settings:
    """How thoroughly: counted rounds, whether beside NIXL, the program of UCX's own messages, and whether beside
    Mooncake where that has a part, which is transfers over TCP."""

    rounds: int
    peer: bool
    am_limit: Path | None
    mooncake: bool = False


class Measurements:
    """Takes each measurement at most once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.rows: list[Row] = []
        self.transfer = cache(self._transfer)
        self.caller = cache(self._caller)
        self.notify = cache(self._notify)
        self.behind = cache(self._behind)
        self.cold = cache(self._cold)
        self.listener = cache(self._listener)
        self.idle = cache(self._idle)
        self.vllm = cache(self._vllm)

    def _keep(self, made: Row, table: str) -> Row:
        print(f"\n{table}", flush=True)
        self.rows.append(made)
        return made

    def _run(self, plan: Plan, others: list[Setup]) -> Row:
        samples = transfer.measure(plan, others)
        return self._keep(beside.summary(plan, samples), beside.table(plan, samples))

    def _stock(self, plan: Plan) -> list[Setup]:
        return beside.nixl(plan.setup) if self._settings.peer else []

    def _transfer(self, shape: Shape) -> Row:
        transport, pattern, blocks, size = shape
        plan = Plan(Work(pattern, size, blocks), transport, self._settings.rounds)  # type: ignore[arg-type]
        mooncake = beside.mooncake(plan.setup) if self._settings.mooncake and transport == "tcp" else []
        return self._run(plan, [*self._stock(plan), *mooncake, *beside.baselines(plan.setup, self._settings.am_limit)])

    def _caller(self, transport: str) -> Row:
        work = Work("random", 1024, MANY_BLOCKS, MANY_LAYERS)
        plan = Plan(work, transport, self._settings.rounds, WORKER, POLL_S)
        return self._run(plan, self._stock(plan))

    def _notify(self, transport: str) -> Row:
        plan = Plan(Work(), transport, self._settings.rounds, WORKER, POLL_S, watch=True)
        return self._run(plan, self._stock(plan))

    def _behind(self, transport: str) -> Row:
        plan = Plan(Work("random", 16384, 32768), transport, self._settings.rounds)
        samples = behind.measure(plan)
        return self._keep(behind.summary(plan, samples), behind.table(plan, samples))

    def _cold(self, ranks: int) -> Row:
        asked: tuple[str, int, int] = ("tcp", ranks, COLD_BLOCKS)
        times = cold(self._settings, ranks)
        row = handshake.summary(*asked, times)
        row["peer_ms"] = best([some for name, some in times.items() if name.startswith("NIXL")])
        row["ratio_peer"] = beside.ratio(row["ours_ms"], row["peer_ms"])
        return self._keep(row, handshake.table(*asked, times))

    def _listener(self) -> listener.Visits:
        visits = listener.measure(CLIENTS, VISITS)
        self._keep(listener.summary(visits), listener.table(visits))
        return visits

    def _idle(self, transport: str) -> Row:
        found = idle.measure(transport, IDLE_PEERS, IDLE_S)
        stock = nixl.idle(transport, IDLE_S) if self._settings.peer else {}
        row = {**idle.summary(found, transport), "peer_ms": min((s * 1e3 for s in stock.values()), default=None)}
        return self._keep(row, idle.table(found, transport, stock))

    def _vllm(self) -> dict[str, list[float]]:
        """Hand-over times by connector, in milliseconds."""
        times: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "demo.json"
            count = str(VLLM_REQUESTS // VLLM_TURNS)
            command = ["scripts/demo", "--compare", "--transport", "tcp", "--requests", count, "--json", str(out)]
            for _ in range(VLLM_TURNS):
                subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
                found: Any = json.loads(out.read_text(encoding="utf-8"))
                for result in found if isinstance(found, list) else found["results"]:
                    known = [one["handover_ms"] for one in result["requests"] if one["handover_ms"] is not None]
                    times.setdefault(result["connector"], []).extend(known)
        for mine, peer in itertools.product(("kvferry", "kvferry-at-once"), ("stock", "stock-quiet")):
            ours, some = times[mine], times[peer]
            made = {"work": f"hand-over of real vLLM requests, {mine} beside {peer}", "transport": "tcp"}
            figures = {"ours_ms": median(ours), "peer_ms": median(some), "ratio_peer": median(ours) / median(some)}
            tails = {"ours_p99_ms": percentile(ours, 0.99), "peer_p99_ms": percentile(some, 0.99)}
            self.rows.append({**made, **figures, **tails})
        return times


def cold(settings: Settings, ranks: int) -> handshake.Times:
    """Milliseconds of first contacts by engine."""
    asked: tuple[str, int, int] = ("tcp", ranks, COLD_BLOCKS)
    with nixl.consumers(*asked) if settings.peer else nullcontext() as others:
        return handshake.measure(*asked, settings.rounds, others)


def grow(settings: Settings, folder: Path) -> None:
    """How each grows: drawings of twice as many blocks, twice the size, twice the requests, and plans."""
    from kvferry.bench.plot import svg

    def grown(name: str, axis: str, works: list[Work]) -> None:
        for transport in ("shm", "tcp"):
            series: dict[str, list[tuple[float, float]]] = {}
            for work in works:
                plan = Plan(work, transport, settings.rounds)
                stock = beside.nixl(plan.setup) if settings.peer else []
                for one in transfer.measure(plan, [*stock, *beside.baselines(plan.setup, None)]):
                    x = float(getattr(work, axis))
                    series.setdefault(one.setup.name, []).append((x, median(one.of("ms"))))
            title = f"{works[0].text}, and on, {transport}"
            drawing = svg(title, axis.replace("_", " "), "median ms", series, doubling=True)
            (folder / f"grow-{name}-{transport}.svg").write_text(drawing, encoding="utf-8")

    grown("blocks", "blocks", [Work(blocks=512 << step) for step in range(6)])
    grown("size", "block_bytes", [Work(blocks=1024, block_bytes=1024 << step) for step in range(8)])
    grown("requests", "requests", [Work(blocks=256, requests=1 << step) for step in range(6)])
    times = planning.measure(64, 500, 6, settings.rounds)
    points = [(float(count), median(taken)) for count, _, taken in times]
    drawing = svg("plans of 64 layers from TP 4 to TP 1", "blocks", "median ms", {"kvferry": points}, doubling=True)
    (folder / "grow-plan.svg").write_text(drawing, encoding="utf-8")
    _grown_peers(settings, folder, svg)


def _grown_peers(settings: Settings, folder: Path, svg: Callable[..., str]) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        for name, some in cold(settings, ranks).items():
            series.setdefault(name, []).append((float(ranks), median(some)))
    drawing = svg(f"first contact to first byte, {COLD_BLOCKS:,} blocks", "ranks", "median ms", series, doubling=True)
    (folder / "grow-peers.svg").write_text(drawing, encoding="utf-8")
