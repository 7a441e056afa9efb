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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.cli import main as make_key

from lab.engines import chunked as under_way
from lab.faults.options import Options

BY_TRANSPORT = {
    "kill-consumer": ("faults.disturbed", "kill_consumer", 200),
    "kill-producer": ("faults.disturbed", "kill_producer", 200),
    "freeze": ("faults.disturbed", "freeze", 50),
    "cut": ("faults.disturbed", "cut", 50),
    "firewall": ("faults.firewall", "firewall", 20),
    "restart-listener": ("faults.disturbed", "restart_listener", 50),
    "sleep": ("faults.disturbed", "sleep", 50),
    "lease-race": ("faults.load", "lease_race", 10_000),
    "preempt": ("faults.load", "preempt", 3_000),
    "soak": ("faults.load", "soak", 100_000),
}
"""Series that run over TCP and over shared memory: module, function, rounds over each."""

WHOLE = {
    "garbage": ("faults.garbage", 1_000_000),
    "auth": ("faults.auth", 1),
    "vllm": ("faults.vllm", 3),
    "matrix": ("matrix.run", 1),
}
"""Series with a module of their own, whose `run` does all: module, rounds."""

PORTIONS = ("kill-consumer", "kill-producer", "freeze", "cut", "restart-listener", "preempt", "soak")
"""Series that can be run with prompts that are read while they are computed."""

TRANSPORTS = ("tcp", "shm")
RDMA = ("rc", "ud")
"""Where there is an RDMA device, as in scripts/rdma-vm."""

LONG = ("table", "cells")
"""Figures that are not shown as JSON, but written to the file of --json."""


def _function(module: str, name: str) -> Callable[..., dict[str, Any]]:
    found: Callable[..., dict[str, Any]] = getattr(importlib.import_module(f"lab.{module}"), name)
    return found


def _run(series: str, parsed: argparse.Namespace) -> dict[str, Any]:
    rounds, seed = parsed.rounds, parsed.seed
    if series in WHOLE:
        module, usual = WHOLE[series]
        options = Options(series, rounds or usual, seed, tuple(parsed.only or ()), tuple(parsed.connector or ()))
        return _function(module, "run")(options)
    module, name, usual = BY_TRANSPORT[series]
    parts = {}
    for transport in parsed.transport or TRANSPORTS:
        options = Options(f"{series} {transport}", rounds or usual, seed)
        parts[transport] = _function(module, name)(options, transport)
    zeros = {f"{key}_{transport}": n for transport, part in parts.items() for key, n in part["zeros"].items()}
    return {"zeros": zeros, **parts}


def _check(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Ends the program where names of rows or connectors are wrong."""
    if parsed.only is None and parsed.connector is None:
        return
    if "matrix" not in parsed.series:
        parser.error("--only and --connector belong to the series matrix")
    from lab.matrix.peers import PEERS
    from lab.matrix.rows import all_rows

    for given, known in ((parsed.only, all_rows()), (parsed.connector, PEERS)):
        for name in given or ():
            if name not in known:
                parser.error(f"unknown name {name!r}, expected one of {', '.join(known)}")


def main() -> int:
    """Runs series and prints what came of them; 0 only if every zero is one."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Breaks engines on purpose and counts what must not happen. Exit status 0 only if every number "
        "under 'zeros' is 0.",
    )
    names = [*BY_TRANSPORT, *WHOLE]
    parser.add_argument("series", nargs="+", choices=[*names, "all"], metavar="SERIES", help=", ".join(names) + ", all")
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
        "--portions",
        action="store_true",
        help="both engines are asked at once, and prompts read while they are computed (always in preempt)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    matrix = parser.add_argument_group("of the series matrix")
    matrix.add_argument("--only", action="append", metavar="ROW", help="only this row; may be repeated")
    matrix.add_argument("--connector", action="append", metavar="NAME", help="only this connector; may be repeated")
    options = parser.parse_args()
    _check(parser, options)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected at least 1")
    if options.key:
        folder = tempfile.TemporaryDirectory(prefix="kvferry-chaos-")
        atexit.register(folder.cleanup)
        os.environ["KVFERRY_KEY_FILE"] = f"{folder.name}/key"
        make_key(["key", os.environ["KVFERRY_KEY_FILE"]])
    if options.portions:
        if taken := [series for series in options.series if series not in PORTIONS]:
            parser.error(f"--portions is for {', '.join(PORTIONS)}, not for {', '.join(taken)}")
        os.environ[under_way.VARIABLE] = "1"
    chosen = names if "all" in options.series else options.series
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
