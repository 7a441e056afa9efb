"""Looks at what this machine and process would use, moves bytes over every path that is there, and says what to do.

With --peer, also asks a running engine who it is, whether it fits, and which way bytes would go."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections import Counter
from typing import Any

from .._environment import variables, without, wrong_variables
from .._errors import InvalidArgumentError, KvferryError
from ..bench.errors import UsageError
from ..bench.figures import columns
from ..bench.sizes import host_and_port
from ..doctor import STATES, Finding, exit_code
from ..doctor.examine import Asked, as_json, examine
from ..doctor.peer import Asked as Peer
from ..settings import Setting
from ..vllm.config import describe
from .config import any_config, read_config
from .shapes import DTYPES, add_model, count, engine, model, parse_engine

EPILOG = """exit status: 0 all is well or only warned of, 1 there is a problem, 2 what was asked for cannot be.

--shape takes the keys of `kvferry plan --prefill`; the model goes with it: --layers with --kv-heads and --head-size, or
with --mla.

examples:
  kvferry doctor
  kvferry doctor --json | jq '.findings[] | select(.state == "problem")'
  kvferry doctor --peer 10.0.0.5:5680 --shape tp=2,block=64 --layers 32 --kv-heads 8 --head-size 128

docs/doctor.md has what every finding means.
"""
_MODEL = ("layers", "kv_heads", "head_size", "mla", "window", "full_every")


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 600:
        raise ValueError(text)
    return value


_seconds.__name__ = "number of seconds from 1 to 600"


def _field(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(text)
    return name, value


_field.__name__ = "NAME=VALUE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("--json", action="store_true", help="print everything as JSON instead of a table")
    add("--no-transfers", action="store_true", help="move no bytes on this machine")
    add(
        "--config",
        metavar="CONFIG",
        help="the engine's --kv-transfer-config, or its kv_connector_extra_config alone such as '{\"port\": 5700}': "
        "JSON text, the path of a file with it, or - for standard input",
    )
    add("--peer", type=host_and_port, metavar="HOST:PORT", help="an engine's handshake listener to ask")
    add("--no-connect", action="store_true", help="with --peer: do not connect to the agents of its ranks")
    add("--timeout", type=_seconds, default=60.0, metavar="S", help="how long the command may take (default 60)")
    add("--shape", metavar="KEY=VALUE,...", help="with --peer: the shape of this side's engine, to be compared")
    add("--layers", type=count, metavar="N", help="layers of this side's model")
    add_model(parser)
    add(
        "--compat",
        type=_field,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a fact that both engines must share, such as dtype=torch.bfloat16; the names are those that the peer has",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. Raises `UsageError` for options that cannot be."""
    report = examine(asked_for(options))
    print(as_json(report) if options.json else table(report.findings))
    return exit_code(report.findings)


def asked_for(options: argparse.Namespace) -> Asked:
    """The options from the command line and the environment."""
    try:
        given = any_config({} if options.config is None else read_config(options.config))
    except UsageError as error:
        raise UsageError(f"--config: {error}") from None
    worker, scheduler, wrong = _chosen(given.extra)
    # A decode engine is asked only by prefill engines that read conversations back.
    listens = given.role != "kv_consumer" or bool(scheduler.get("multi_turn"))
    own = _own_side(options)
    peer = None
    if options.peer is not None:
        host, port = options.peer
        peer = Peer(host, port, own, not options.no_connect)
    return Asked(worker, scheduler, wrong, listens, not options.no_transfers, options.timeout, peer)


def _chosen(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The options given or in the environment, for the worker and for the scheduler, and the environment's wrong
    variables with what is wrong with each.

    Raises `UsageError` if what was given is wrong."""
    try:
        settings, wrong = _described(extra)
    except InvalidArgumentError as error:
        raise UsageError(f"--config: {error.message.removeprefix('kvf_settings_describe: ')}") from None
    except KvferryError:
        # Without the library nothing can be checked, and there is a finding about that.
        return extra, extra, {}
    told = [setting for setting in settings if setting["source"] != "default"]
    worker, scheduler = (
        {setting["key"]: setting["value"] for setting in told if part in setting["parts"]}
        for part in ("worker", "scheduler")
    )
    return worker, scheduler, wrong


def _described(extra: dict[str, Any]) -> tuple[list[Setting], dict[str, str]]:
    """Every key with its value, and the wrong variables, which count for none."""
    try:
        return describe(extra)["settings"], {}
    except InvalidArgumentError:
        # What was given is wrong, or the environment: the former is looked at alone.
        with without(variables()):
            describe(extra)
    wrong = wrong_variables()
    with without(wrong):
        return describe(extra)["settings"], wrong


def _own_side(options: argparse.Namespace) -> dict[str, Any] | None:
    given = [name for name in _MODEL if getattr(options, name) is not None]
    if options.shape is None:
        if given or options.compat:
            name = given[0] if given else "compat"
            raise UsageError(f"--{name.replace('_', '-')} describes this side for --peer, which needs --shape as well")
        return None
    if options.peer is None:
        raise UsageError("--shape is compared with a running engine: give its listener as --peer HOST:PORT")
    if options.layers is None:
        raise UsageError("--layers is missing; --shape needs the model")
    shape = engine(parse_engine("--shape", options.shape), DTYPES[options.dtype])
    return {"model": model(options), "engine": shape, "compat": dict(options.compat)}


def table(findings: list[Finding]) -> str:
    """The findings for people: what was seen, and under it what to do."""
    head = ("state", "finding", "what was seen")
    narrow = max(len(finding.id) for finding in findings)
    width = max(40, shutil.get_terminal_size((120, 24)).columns - len("not applicable") - narrow - 4)
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        lines = _wrapped(finding.meaning, width, "")
        for line in finding.evidence:
            lines += _wrapped(line, width, "- ")
        if finding.remedy and finding.state in ("warning", "problem"):
            lines += _wrapped(f"do: {finding.remedy}", width, "")
        rows.append((finding.state, finding.id, lines[0]))
        rows += [("", "", line) for line in lines[1:]]
    counts = Counter(finding.state for finding in findings)
    summary = ", ".join(f"{counts[state]} {state}" for state in STATES)
    return f"{columns(head, rows, texts=len(head))}\n\n{summary}"


def _wrapped(text: str, width: int, start: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False
    ) or [""]
