"""`python -m lab.chaos SERIES`: see `scripts/chaos --help`."""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvferry.cli import main as make_key

from lab.engines import chunked
from lab.faults.series import Options
from lab.process import preload

BY_TRANSPORT = {
    "kill-consumer": ("disturbed", "kill_consumer", 200),
    "kill-producer": ("disturbed", "kill_producer", 200),
    "freeze": ("disturbed", "freeze", 50),
    "cut": ("disturbed", "cut", 50),
    "firewall": ("firewall", "firewall", 20),
    "restart-listener": ("disturbed", "restart_listener", 50),
    "sleep": ("disturbed", "sleep", 50),
    "lease-race": ("load", "lease_race", 10_000),
    "preempt": ("load", "preempt", 3_000),
    "soak": ("load", "soak", 100_000),
}
"""Series that run over TCP and over shared memory: module of `lab.faults`, function, rounds over each."""

WHOLE = {
    "garbage": ("lab.faults.garbage", 1_000_000),
    "auth": ("lab.faults.auth", 1),
    "vllm": ("lab.faults.vllm", 3),
    "matrix": ("lab.matrix.run", 1),
}
"""Series with a module of their own, whose `run` does all: module, rounds."""

CHUNKED = ("kill-consumer", "kill-producer", "freeze", "cut", "restart-listener", "preempt", "soak")
"""Series that can be run with prompts that are read while they are computed."""

TRANSPORTS = ("tcp", "shm")
RDMA = ("rc", "ud")
"""Where there is an RDMA device, as in scripts/rdma-vm."""

LONG = ("table", "cells")
"""Figures that are not shown as JSON, but written to the file of --json."""


def _run(series: str, parsed: argparse.Namespace) -> dict[str, Any]:
    rounds, seed = parsed.rounds, parsed.seed
    if series in WHOLE:
        module, usual = WHOLE[series]
        options = Options(series, rounds or usual, seed, tuple(parsed.case or ()), tuple(parsed.connector or ()))
        whole: dict[str, Any] = importlib.import_module(module).run(options)
        return whole
    module, name, usual = BY_TRANSPORT[series]
    function: Callable[..., dict[str, Any]] = getattr(importlib.import_module(f"lab.faults.{module}"), name)
    parts = {}
    for transport in parsed.transport or TRANSPORTS:
        parts[transport] = function(Options(f"{series} {transport}", rounds or usual, seed), transport)
    zeros = {f"{key}_{transport}": n for transport, part in parts.items() for key, n in part["zeros"].items()}
    return {"zeros": zeros, **parts}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Breaks engines on purpose and counts what must not happen. Exit status 0 only if every number "
        "under 'zeros' is 0.",
    )
    names = [*BY_TRANSPORT, *WHOLE, "all"]
    parser.add_argument("series", nargs="+", choices=names, metavar="SERIES", help=", ".join(names))
    parser.add_argument("--rounds", type=int, help="how often (default: as docs/reliability.md has it)")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments and sizes")
    parser.add_argument(
        "--transport",
        choices=(*TRANSPORTS, *RDMA),
        action="append",
        help="this one, may be repeated (default: tcp and shm); rc and ud need an RDMA device, see scripts/rdma-vm",
    )
    parser.add_argument("--key", action="store_true", help="all engines have one key")
    parser.add_argument(
        "--chunks",
        action="store_true",
        help="both engines are asked at once, and prompts read while they are computed (always in preempt)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    matrix = parser.add_argument_group("of the series matrix")
    matrix.add_argument("--list", action="store_true", help="print the names of the cases and what each does")
    matrix.add_argument("--case", action="extend", nargs="+", metavar="NAME", help="only these cases")
    matrix.add_argument("--connector", action="extend", nargs="+", metavar="NAME", help="only these connectors")
    return parser


def _check(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Ends the program where options do not go together, and where it is only to list the cases."""
    if parsed.rounds is not None and parsed.rounds < 1:
        parser.error(f"--rounds is {parsed.rounds}, expected at least 1")
    if parsed.chunks and (taken := [series for series in parsed.series if series not in CHUNKED]):
        parser.error(f"--chunks is for {', '.join(CHUNKED)}, not for {', '.join(taken)}")
    if not (parsed.list or parsed.case or parsed.connector):
        return
    if "matrix" not in parsed.series:
        parser.error("--list, --case and --connector belong to the series matrix")
    from lab.matrix.peers import PEERS
    from lab.matrix.rows import all_rows

    if parsed.list:
        for row in all_rows().values():
            print(f"{row.name:<22}{row.title}\n{'':<22}{' '.join((row.act.__doc__ or '').split())}")
        sys.exit(0)
    known: Iterable[tuple[Any, Any]] = ((parsed.case, all_rows()), (parsed.connector, PEERS))
    for given, names in known:
        for name in given or ():
            if name not in names:
                parser.error(f"unknown name {name!r}, expected one of {', '.join(names)}")


def main() -> int:
    """Runs series and prints what came of them; 0 only if every zero is one."""
    parser = _parser()
    options = parser.parse_args()
    _check(parser, options)
    if options.key:
        folder = tempfile.TemporaryDirectory(prefix="kvferry-chaos-")
        atexit.register(folder.cleanup)
        os.environ["KVFERRY_KEY_FILE"] = f"{folder.name}/key"
        make_key(["key", os.environ["KVFERRY_KEY_FILE"]])
    if options.chunks:
        os.environ[chunked.VARIABLE] = "1"
    chosen = [*BY_TRANSPORT, *WHOLE] if "all" in options.series else options.series
    forked = ["lab.engines.engine"]
    if "matrix" in chosen:
        from lab.servers.forked import IMPORTED
        from lab.servers.specs import server_environment

        # Also of the process that all are forked from.
        os.environ.update(server_environment())
        forked += IMPORTED
    preload(*forked)
    results = {}
    failed = False
    for series in chosen:
        begin = time.monotonic()
        result = _run(series, options)
        result["seconds"] = round(time.monotonic() - begin, 1)
        results[series] = result
        print(f"== {series}")
        print(json.dumps({key: value for key, value in result.items() if key not in LONG}, indent=1))
        if "table" in result:
            print(result["table"], flush=True)
        bad = {key: n for key, n in result["zeros"].items() if n != 0}
        print(f"{series}: " + (f"FAILED: {bad}" if bad else "passed: every zero is zero"), flush=True)
        failed |= bool(bad)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
