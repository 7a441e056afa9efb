"""Runs the lines that are asked for and prints asked, got, met; or another transfer, beside others."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvferry.bench import cli, commands, transfer
from kvferry.bench.errors import UsageError
from kvferry.bench.figures import about, columns, json_text

from . import beside, compare
from .engines import mooncake, nixl
from .measure import ROOT, Measurements, Settings, grow
from .table import LINES, Line, Verdict


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures what is asked of kvferry's speed, beside NIXL, Mooncake and a baseline in the same runs, "
        "and judges every line. Exit status 0 when all was measured, met or not; 1 when something broke. "
        "`scripts/bench transfer --help` tells of other transfers beside them.",
        epilog="Environment: KVFERRY_LIBRARY=PATH   measure this libkvferry.so with this tree's Python package, and "
        "build and install no wheel",
    )
    add = made.add_argument
    add("--only", metavar="PATTERN", action="append", help="lines by name (as --list prints them), * and ? allowed")
    add("--list", action="store_true", help="print the lines' names and what is asked")
    add("--rounds", type=int, default=15, metavar="N", help="counted rounds (default %(default)s)")
    add("--no-peer", action="store_true", help="without NIXL and Mooncake: such lines are not judged")
    add("--vllm", action="store_true", help="also the lines with real vLLM servers (scripts/demo --compare, 15 min)")
    add("--plots", type=Path, metavar="FOLDER", help="also draw how each grows with blocks, size, requests and peers")
    add("--json", type=Path, metavar="FILE", help="also write rows and verdicts as JSON")
    add(
        "--compare",
        metavar="COMMIT",
        help="instead of all that: which lines differ from COMMIT's build by more than noise. --only, --rounds and",
    )
    add("--setups", type=int, default=8, metavar="N", help="so many set-ups of each line (default %(default)s) apply")
    # Given by scripts/bench.
    add("--compared-build", type=Path, help=argparse.SUPPRESS)
    return made


def chosen(patterns: list[str] | None, vllm: bool) -> list[Line]:
    """The lines that match any pattern, by name or by its part before the colon; all but real vLLM's without one."""
    found = [
        line
        for line in LINES
        if not patterns
        or any(fnmatch.fnmatch(line.name, p) or fnmatch.fnmatch(line.name.partition(":")[0], p) for p in patterns)
    ]
    return [line for line in found if vllm or not line.real or patterns]


def main(arguments: list[str]) -> int:
    """Exit code."""
    os.environ.setdefault("KVFERRY_LOG", "error")
    if arguments[:1] == ["transfer"]:
        return _transfer(arguments)
    options = parser().parse_args(arguments)
    if options.compare is not None:
        return _compare(options)
    lines = chosen(options.only, options.vllm)
    if not lines:
        parser().error(f"no line matches {', '.join(options.only)}; --list names them")
    if options.list:
        print(columns(("line", "asked"), [(line.name, line.asked) for line in lines], texts=2))
        return 0
    peer = not options.no_peer
    settings = Settings(max(1, options.rounds), peer, _am_limit(), peer and mooncake.missing() is None)
    taken = Measurements(settings)
    verdicts: list[tuple[Line, Verdict]] = []
    broke = False
    for line in lines:
        try:
            verdict = line.judge(taken)
        except Exception:
            traceback.print_exc()
            verdict, broke = Verdict("it broke, see above", None), True
        verdicts.append((line, verdict))
        if options.json is not None:
            # After each line, so that what was measured is not lost with what comes after.
            _save(options.json, taken, verdicts)
    words = {True: "met", False: "not met", None: "not judged"}
    print(f"\n{settings.rounds} alternating rounds, {os.sched_getaffinity(0).__len__()} processors")
    print(summary([(line, verdict, words[verdict.met]) for line, verdict in verdicts], peer))
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        grow(settings, options.plots)
    return 1 if broke else 0


def _am_limit() -> Path | None:
    program = os.environ.get("KVFERRY_AM_LIMIT")
    return Path(program) if program else None


def _transfer(arguments: list[str]) -> int:
    """`scripts/bench transfer`: as `kvferry bench transfer`, beside others."""
    made = argparse.ArgumentParser(prog="scripts/bench")
    works = made.add_subparsers(dest="bench")
    cli.add_transfer(works)
    add = works.choices["transfer"].add_argument
    absent = {"nixl": nixl.missing, "mooncake": mooncake.missing}
    kinds = [*absent, "baseline"]
    add("--beside", action="append", choices=kinds, default=[], help="in turns with it; may be given repeatedly")
    add("--library", type=Path, metavar="FILE", help="in turns with another build of libkvferry.so")
    add("--with", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="in turns with a setting")
    options = made.parse_args(arguments)
    if options.peer or options.plot or options.grow:
        made.error("--peer, --plot and --grow go with `kvferry bench transfer`")
    try:
        plan = commands.plan_of(options)
    except UsageError as error:
        made.error(str(error))
    if "mooncake" in options.beside and plan.transport != "tcp":
        made.error("--beside mooncake goes with --transport tcp")
    for name in options.beside:
        if name in absent and (why := absent[name]()) is not None:
            made.error(why)
    engines = []
    if options.library is not None:
        engines.append(replace(plan.setup, name=f"kvferry of {options.library.name}", library=str(options.library)))
    for setting in options.settings:
        key, _, value = setting.partition("=")
        changed = {**plan.config, key: int(value) if value.isdigit() else value}
        engines.append(replace(plan.setup, name=f"kvferry, {setting}", options=changed))
    engines += beside.nixl(plan.setup) if "nixl" in options.beside else []
    engines += beside.mooncake(plan.setup) if "mooncake" in options.beside else []
    engines += beside.baselines(plan.setup, _am_limit()) if "baseline" in options.beside else []
    samples = transfer.measure(plan, engines)
    print(beside.table(plan, samples))
    if options.json is not None:
        options.json.write_text(json_text([beside.summary(plan, samples)]), encoding="utf-8")
    return 0


def summary(judged: Sequence[tuple[Line, Verdict, str]], peer: bool) -> str:
    """Asked, got, met; with peers also the column of Mooncake's."""
    head = ["line", "asked", "got", "", "of Mooncake's"]
    cells = [[line.name, line.asked, verdict.got, met, verdict.mooncake] for line, verdict, met in judged]
    shown = len(head) if peer else len(head) - 1
    return columns(head[:shown], [some[:shown] for some in cells], texts=shown)


def _compare(options: argparse.Namespace) -> int:
    """With the two builds that scripts/bench has made."""
    names = [name for name in compare.LINES if any(fnmatch.fnmatch(name, p) for p in options.only or ["*"])]
    if not names:
        parser().error(f"--compare has none of {', '.join(options.only)}, only {', '.join(compare.LINES)}")
    if options.setups < compare.FEWEST or options.setups % 2 or options.rounds < 1:
        parser().error(f"--compare needs an even number of set-ups, at least {compare.FEWEST}, and at least one round")
    tree = compare.Build(Path(os.environ["KVFERRY_LIBRARY"]), ROOT / "python", "this tree")
    folder = options.compared_build
    other = compare.Build(folder / "libkvferry.so", folder / "python", options.compare)
    return compare.compare(names, options.rounds, options.setups, tree, other)


def _save(path: Path, taken: Measurements, verdicts: list[tuple[Line, Verdict]]) -> None:
    judged = [
        {
            "line": line.name,
            "asked": line.asked,
            "got": verdict.got,
            "met": verdict.met,
            "mooncake": verdict.mooncake or None,
        }
        for line, verdict in verdicts
    ]
    path.write_text(
        json.dumps({"about": about(), "rows": taken.rows, "lines": judged}, indent=2) + "\n", encoding="utf-8"
    )
