"""What the subcommands do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from . import transfer as transfers
from .cli import UsageError
from .engines import nixl
from .figures import Row, write_json
from .work import Work, size_text


def _save(path: Path | None, rows: Sequence[Row]) -> None:
    if path is None:
        return
    try:
        write_json(path, rows)
    except OSError as error:
        raise UsageError(f"--json: {path} cannot be written: {error.strerror or error}") from error


def _need_nixl(peer: str | None) -> None:
    if peer is not None and (why := nixl.missing()) is not None:
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
    _need_nixl(options.peer)
    work = Work(
        options.pattern, options.block_bytes, options.blocks, options.layers, options.requests, options.direction
    )
    config: dict[str, object] = {}
    for setting in options.ucx:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--ucx: {setting!r} is not NAME=VALUE")
        config.setdefault("ucx", {})[name] = value  # type: ignore[index]
    plan = transfers.Plan(
        work,
        options.transport,
        options.rounds,
        options.api,
        options.peer is not None,
        options.limit,
        options.am_limit,
        options.poll_ms,
        config,
    )
    _fits(work, len(transfers.setups(plan)))
    samples = transfers.measure(plan)
    if os.environ.get("KVB_DEBUG"):
        for one in samples:
            print(one.name, [round(x) for x in one.of("caller_us")], [round(x, 1) for x in one.of("ms")])
    print(transfers.table(plan, samples))
    _save(options.json, [transfers.summary(plan, samples)])
    return 0
