"""What the subcommands do."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from . import cuda
from . import transfer as transfers
from .engines import mooncake, nixl
from .errors import UsageError
from .figures import Row, about, json_text
from .plot import svg
from .sizes import size_text
from .work import Work


def _save(path: Path | None, rows: Sequence[Row]) -> None:
    if path is not None:
        _write(path, "--json", json_text(rows))


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {error.strerror or error}") from error


def _need_nixl(peer: str | None) -> None:
    if peer is not None and (why := nixl.missing()) is not None:
        raise UsageError(why)


def _need_peers(options: argparse.Namespace) -> None:
    if "nixl" in options.peer:
        _need_nixl("nixl")
    if "mooncake" in options.peer:
        if options.transport != "tcp":
            raise UsageError("--peer mooncake goes with --transport tcp")
        if options.poll_ms:
            raise UsageError("--poll-ms does not go with --peer mooncake, whose call returns at the end")
        if (why := mooncake.missing()) is not None:
            raise UsageError(why)


def _fits(work: Work, engines: int) -> None:
    needed = 2 * work.pool_bytes * engines
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.8 * have:
        raise UsageError(
            f"{work.text} takes {size_text(needed)} of memory for {engines} pairs of processes, and this machine has "
            f"{size_text(have)}: ask for fewer or smaller blocks"
        )


def transfer(options: argparse.Namespace) -> int:
    """`kvferry bench transfer`."""
    if options.am_limit is not None and not (options.limit and options.transport == "tcp"):
        raise UsageError("--am-limit goes with --limit and --transport tcp")
    if options.am_limit is not None and not os.access(options.am_limit, os.X_OK):
        raise UsageError(f"--am-limit: {options.am_limit} is no program")
    if options.transport == "cuda" and (why := cuda.why_not()) is not None:
        raise UsageError(f"--transport cuda needs a GPU, and there is none to use: {why}; take shm or tcp")
    if options.api == "worker" and options.direction == "write":
        raise UsageError("workers read; --direction write goes with --api agent")
    if options.watch and options.transport == "cuda":
        raise UsageError("--watch sees the host's memory only; it does not go with --transport cuda")
    if options.watch and options.direction == "write":
        raise UsageError("--watch sees what the starting side reads; it does not go with --direction write")
    _need_peers(options)
    work = Work(
        options.pattern,
        options.block_bytes,
        options.blocks,
        options.layers,
        options.requests,
        options.direction,
        options.huge_pages,
    )
    plan = transfers.Plan(
        work,
        options.transport,
        options.rounds,
        options.api,
        "nixl" in options.peer,
        options.limit,
        options.am_limit,
        options.poll_ms,
        options.watch,
        _config(options),
        options.library,
        "mooncake" in options.peer,
    )
    plans = [plan]
    if options.grow is not None:
        name = options.grow.replace("-", "_")
        grown = [replace(work, **{name: getattr(work, name) << step}) for step in range(options.steps)]
        plans = [replace(plan, work=one) for one in grown]
    for one in plans:
        _fits(one.work, len(transfers.setups(one)))
    taken = []
    for one in plans:
        taken.append(transfers.measure(one))
        print(transfers.table(one, taken[-1]), flush=True)
    _save(options.json, [transfers.summary(one, samples) for one, samples in zip(plans, taken, strict=True)])
    if options.plot is not None:
        drawing = _grown(options.grow, plans, taken) if options.grow else _rounds(plan, taken[0])
        _write(options.plot, "--plot", drawing)
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
    series = {transfers.label(one.name): list(enumerate(one.of("ms"), 1)) for one in samples}
    return svg(f"{plan.text}, {plan.transport}", "round", "ms", series)


def _grown(grow: str, plans: Sequence[transfers.Plan], taken: Sequence[Sequence[transfers.Samples]]) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for plan, samples in zip(plans, taken, strict=True):
        for one in samples:
            x = float(getattr(plan.work, grow.replace("-", "_")))
            series.setdefault(transfers.label(one.name), []).append((x, median(one.of("ms"))))
    return svg(f"{plans[0].text}, {plans[0].transport}, and on", grow, "median ms", series, doubling=True)


def handshake(options: argparse.Namespace) -> int:
    """`kvferry bench handshake`."""
    from . import handshake as cold

    _need_nixl(options.peer)
    if options.peer is not None:
        try:
            import zmq  # noqa: F401
        except ImportError:
            raise UsageError("--peer nixl needs pyzmq here, for the stock queries: pip install pyzmq") from None
    asked = (options.transport, options.ranks, options.blocks)
    times = cold.measure(*asked, options.rounds, options.peer is not None)
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

    _need_nixl(options.peer)
    cost = idling.measure(options.transport, options.peers, options.seconds, options.peer is not None)
    print(idling.table(cost, options.transport))
    _save(options.json, [idling.summary(cost, options.transport)])
    return 0


def behind(options: argparse.Namespace) -> int:
    """`kvferry bench behind`."""
    from . import behind as waiting

    _need_nixl(options.peer)
    work = Work("random", options.block_bytes, options.blocks)
    plan = transfers.Plan(work, options.transport, options.rounds, peer=options.peer is not None)
    _fits(work, 3 if plan.peer else 1)
    samples = waiting.measure(plan)
    print(waiting.table(plan, samples))
    _save(options.json, [waiting.summary(plan, samples)])
    return 0


def telemetry(options: argparse.Namespace) -> int:
    """`kvferry bench telemetry`."""
    from . import telemetry as counting

    costs = counting.measure(options.transport, options.rounds, options.sittings)
    print(counting.table(options.transport, costs))
    if options.json is not None:
        text = json.dumps({"about": about(), "rows": counting.summary(options.transport, costs)}, indent=2)
        _write(options.json, "--json", text + "\n")
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
