"""What the subcommands do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal

from . import cuda
from . import transfer as transfers
from .errors import UsageError
from .figures import Row, json_text
from .plot import svg
from .sizes import size_text
from .work import Work

SIZES = [4096 << step for step in range(0, 11, 2)]
"""Block sizes, from 4 KiB to 4 MiB."""
REQUEST = 32 << 20
"""Bytes of a request."""


def _save(path: Path | None, rows: Sequence[Row]) -> None:
    if path is not None:
        _write(path, "--json", json_text(rows))


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {error.strerror or error}") from error


def _fits(what: str, size: int, engines: int) -> None:
    needed = 2 * size * engines
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.8 * have:
        raise UsageError(
            f"{what} takes {size_text(needed)} of memory, and this machine has {size_text(have)}: ask for fewer or "
            "smaller blocks"
        )


def _memory(options: argparse.Namespace) -> Literal["host", "cuda"]:
    memory: Literal["host", "cuda"] = options.memory or ("cuda" if options.transport == "cuda" else "host")
    if memory == "cuda" and (why := cuda.why_not()) is not None:
        option = "--memory cuda" if options.memory else "--transport cuda"
        raise UsageError(f"{option} needs a GPU, and there is none to use: {why}; take host, shm or tcp")
    return memory


def serve(options: argparse.Namespace) -> int:
    """`kvferry bench serve`."""
    from . import hosts

    memory = _memory(options)
    _fits(f"--size {size_text(options.size)}", options.size, 1)
    try:
        hosts.serve(options.port, options.size, memory, options.transport or "auto", _config(options))
    except KeyboardInterrupt:
        print("ended")
    return 0


def works(options: argparse.Namespace) -> list[Work]:
    """What is moved, one after the other."""
    sizes = SIZES if options.peer and not options.block_bytes else [options.block_bytes or 16384]
    made = []
    for size in sizes:
        blocks = options.blocks or (max(1, REQUEST // size) if options.peer else 2048)
        shape = (options.pattern, size, blocks, options.layers, options.requests, options.direction)
        made.append(Work(*shape, options.huge_pages))
    if options.grow is not None:
        name = options.grow.replace("-", "_")
        made = [replace(made[0], **{name: getattr(made[0], name) << step}) for step in range(options.steps)]
    return made


def plan_of(options: argparse.Namespace) -> transfers.Plan:
    """The first of the works as it is to be moved."""
    memory = _memory(options)
    if options.api == "worker" and options.direction == "write":
        raise UsageError("workers read; --direction write goes with --api agent")
    if options.watch and memory == "cuda":
        raise UsageError("--watch sees the host's memory only; it does not go with memory of a GPU")
    if options.watch and options.direction == "write":
        raise UsageError("--watch sees what the starting side reads; it does not go with --direction write")
    return transfers.Plan(
        works(options)[0],
        options.transport or ("auto" if options.peer else "shm"),
        options.rounds,
        f".engines.{options.api}",
        options.poll_ms,
        options.watch,
        _config(options),
        memory,
    )


def transfer(options: argparse.Namespace) -> int:
    """`kvferry bench transfer`."""
    plans = [replace(plan_of(options), work=work) for work in works(options)]
    for one in plans:
        _fits(one.work.text, one.work.pool_bytes, 1)
    if options.peer is not None:
        return _to_peer(options, plans)
    taken = []
    for one in plans:
        taken.append(transfers.measure(one))
        print(transfers.table(one, taken[-1]), flush=True)
    _save(options.json, [transfers.summary(one, samples[0]) for one, samples in zip(plans, taken, strict=True)])
    if options.plot is not None:
        drawing = _grown(options.grow, plans, taken) if options.grow else _rounds(plans[0], taken[0])
        _write(options.plot, "--plot", drawing)
    return 0


def _to_peer(options: argparse.Namespace, plans: Sequence[transfers.Plan]) -> int:
    from . import hosts

    given = {"--api worker": options.api == "worker", "--watch": options.watch, "--plot": options.plot}
    for name in (name for name, value in given.items() if value):
        raise UsageError(f"{name} does not go with --peer")
    server = hosts.ask(*options.peer)
    rows = hosts.rows(hosts.measure(plans, server))
    print(hosts.table(plans[0], server, rows))
    if options.json is not None:
        _write(options.json, "--json", json_text(rows, peer=hosts.about(plans[0], server)))
    return 0


def _config(options: argparse.Namespace) -> dict[str, object]:
    settings = {}
    for setting in options.ucx:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--ucx: {setting!r} is not NAME=VALUE")
        settings[name] = value
    return {"ucx": settings} if settings else {}


def _rounds(plan: transfers.Plan, samples: Sequence[transfers.Samples]) -> str:
    series = {one.setup.name: list(enumerate(one.of("ms"), 1)) for one in samples}
    return svg(f"{plan.text}, {plan.transport}", "round", "ms", series)


def _grown(grow: str, plans: Sequence[transfers.Plan], taken: Sequence[Sequence[transfers.Samples]]) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for plan, samples in zip(plans, taken, strict=True):
        for one in samples:
            x = float(getattr(plan.work, grow.replace("-", "_")))
            series.setdefault(one.setup.name, []).append((x, median(one.of("ms"))))
    return svg(f"{plans[0].text}, {plans[0].transport}, and on", grow, "median ms", series, doubling=True)


def handshake(options: argparse.Namespace) -> int:
    """`kvferry bench handshake`."""
    from . import handshake as cold

    asked = (options.transport, options.ranks, options.blocks)
    times = cold.measure(*asked, options.rounds)
    print(cold.table(*asked, times))
    _save(options.json, [cold.summary(*asked, times)])
    return 0


def listener(options: argparse.Namespace) -> int:
    """`kvferry bench listener`."""
    from . import listener as visited

    visits = visited.measure(options.clients, options.total)
    print(visited.table(visits))
    _save(options.json, [visited.summary(visits)])
    return 0


def idle(options: argparse.Namespace) -> int:
    """`kvferry bench idle`."""
    from . import idle as idling

    cost = idling.measure(options.transport, options.peers, options.seconds)
    print(idling.table(cost, options.transport))
    _save(options.json, [idling.summary(cost, options.transport)])
    return 0


def behind(options: argparse.Namespace) -> int:
    """`kvferry bench behind`."""
    from . import behind as waiting

    work = Work("random", options.block_bytes, options.blocks)
    plan = transfers.Plan(work, options.transport, options.rounds)
    _fits(work.text, work.pool_bytes, 2)
    samples = waiting.measure(plan)
    print(waiting.table(plan, samples))
    _save(options.json, [waiting.summary(plan, samples)])
    return 0


def telemetry(options: argparse.Namespace) -> int:
    """`kvferry bench telemetry`."""
    from . import telemetry as counting

    costs = counting.measure(options.transport, options.rounds, options.sittings)
    print(counting.table(options.transport, costs))
    _save(options.json, counting.summary(options.transport, costs))
    return 0


def plan(options: argparse.Namespace) -> int:
    """`kvferry bench plan`."""
    from . import planning

    times = planning.measure(options.layers, options.blocks, options.steps, options.rounds)
    print(planning.table(options.layers, times))
    _save(options.json, planning.summary(options.layers, times))
    if options.plot is not None:
        points = [(float(count), median(taken)) for count, _, taken in times]
        title = f"plans of {options.layers} layers from TP 4 to TP 1"
        _write(options.plot, "--plot", svg(title, "blocks", "median ms", {"kvferry": points}, doubling=True))
    return 0
