"""Shows which keys of the configuration differ from their defaults here, and with --all every key and what it means.

With a --kv-transfer-config of vLLM, also says whether an engine would start with it on this machine: a worker and a
scheduler side start with its options for a moment."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from .. import settings
from .._environment import variables, without
from .._errors import InvalidArgumentError, KvferryError
from ..bench.errors import UsageError
from ..bench.figures import columns
from ..doctor.child import ChildError
from ..vllm.beside import CONNECTOR_NAME, MULTI_CONNECTOR, check_children, children
from ..vllm.config import describe
from ..vllm.files import CONNECTORS, missing_files
from ..vllm.start_check import Engine, problems
from ..vllm.stock import translate, vain_variables

ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("fail", "recompute")
UNUSED = ("kv_port", "enable_permute_local_kv")
"""Fields of vLLM 0.32's and 0.33's `KVTransferConfig` that `KvferryConnector` does not look at."""
FIELDS = (
    "kv_connector",
    "engine_id",
    "kv_role",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "kv_load_failure_policy",
    "kv_buffer_device",
    *UNUSED,
)
LONGEST = 4096
"""Bytes of a path; a longer text is JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "config",
        nargs="?",
        metavar="KV_TRANSFER_CONFIG",
        help="vLLM's --kv-transfer-config: JSON text, the path of a file with it, or - for standard input",
    )
    parser.add_argument("--json", action="store_true", help="print every key as JSON")
    parser.add_argument(
        "--all", action="store_true", help="every key with its meaning, also those that the program sets"
    )


def read_config(argument: str) -> dict[str, Any]:
    """A configuration from a command's argument: JSON text, the path of a file with it, or - for standard input.

    Raises `UsageError` for what is none.
    """
    return _transfer_config(_read(argument))


class Given(NamedTuple):
    """The options of KvferryConnector in a kv-transfer-config: its `kv_connector_extra_config`, notes about the rest,
    the `kv_role`, None if it does not say, and the `kv_load_failure_policy`."""

    extra: dict[str, Any]
    notes: list[str]
    role: str | None
    policy: str = "fail"


def any_config(config: dict[str, Any]) -> Given:
    """As `extra_config`, for a `config` that may also be a `kv_connector_extra_config` alone."""
    whole = {"kv_connector", "kv_role", "kv_connector_extra_config"}
    return extra_config(config) if whole & set(config) else Given(config, [], None)


def _read(argument: str) -> str:
    try:
        if argument == "-":
            return sys.stdin.read()
        if not argument.lstrip().startswith("{") and len(argument.encode()) < LONGEST:
            return Path(argument).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{argument!r} is neither a JSON map nor a readable file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{argument!r} is not text") from None
    return argument


def _transfer_config(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the kv-transfer-config is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"the kv-transfer-config must be a map, not {value!r}")
    return value


def _one_of(place: str, config: dict[str, Any], key: str, choices: tuple[str, ...]) -> None:
    if config[key] not in choices:
        raise UsageError(f"{place}{key} must be one of {', '.join(choices)}, not {config[key]!r}")


def extra_config(config: dict[str, Any], place: str = "") -> Given:
    """The options that vLLM's `config` gives KvferryConnector, also inside MultiConnector's.

    Raises `UsageError` for what vLLM would refuse.
    """
    for key in config:
        if key not in FIELDS:
            near = difflib.get_close_matches(key, FIELDS, n=1)
            known = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(FIELDS)}"
            hint = _where_it_belongs(key) or known
            raise UsageError(f"{place}the kv-transfer-config has an unknown key {key!r}; {hint}")
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise UsageError(f"{place}kv_connector_extra_config must be a map, not {extra!r}")
    if "kv_role" not in config:
        raise UsageError(f"{place}kv_role is missing, one of {', '.join(ROLES)}")
    _one_of(place, config, "kv_role", ROLES)
    if config.get("kv_load_failure_policy") is not None:
        _one_of(place, config, "kv_load_failure_policy", POLICIES)
    connector = config.get("kv_connector")
    if connector == MULTI_CONNECTOR:
        try:
            check_children(children(connector, extra))
        except InvalidArgumentError as error:
            raise UsageError(error.message) from None
        listed = extra.get("connectors")
        for number, child in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(child, dict) and child.get("kv_connector") == CONNECTOR_NAME:
                return extra_config(child, f"connectors[{number}]: ")
        raise UsageError(f"MultiConnector's kv_connector_extra_config has no {CONNECTOR_NAME} among its connectors")
    if connector != CONNECTOR_NAME:
        raise UsageError(f"{place}kv_connector is {connector!r}, expected {CONNECTOR_NAME!r}")
    notes = [f"{key} has no effect on {CONNECTOR_NAME}" for key in UNUSED if key in config]
    if config["kv_role"] == "kv_both":
        notes.append("vLLM deprecates kv_role kv_both: use kv_producer or kv_consumer")
    return Given(extra, notes, config["kv_role"], config.get("kv_load_failure_policy") or "fail")


def _where_it_belongs(key: str) -> str | None:
    """A hint on an operator's key beside `kv_connector_extra_config`; None if it is none."""
    try:
        # A wrong variable is told where the values are looked at, and so is a library that cannot be loaded.
        with without(variables()):
            rows = settings.describe()["settings"]
    except KvferryError:
        return None
    parts = {part for row in rows if row["key"] == key and row["giver"] == "operator" for part in row["parts"]}
    if not parts:
        return None
    if parts.isdisjoint(CONNECTORS):
        return "it is for agents without a connector; leave it out"
    return "it belongs into kv_connector_extra_config"


def _shown(value: object, otherwise: str = "") -> str:
    return f"({otherwise or 'none'})" if value is None else json.dumps(value) if not isinstance(value, str) else value


def _table(rows: list[settings.Setting]) -> str:
    head = ("key", "value", "from", "default", "type", "unit")
    lines = [
        (
            row["variable"] or "" if row["giver"] == "environment" else row["key"],
            _shown(row["value"], row["otherwise"]),
            (row["variable"] or "") if row["source"] == "environment" else row["source"],
            _shown(row["default"], row["otherwise"]),
            row["type"],
            row["unit"],
        )
        for row in rows
    ]
    return columns(head, lines, texts=len(head))


def _print_all(rows: list[settings.Setting]) -> None:
    groups: dict[str, list[settings.Setting]] = {}
    for row in rows:
        alone = CONNECTORS.isdisjoint(row["parts"])
        title = {
            "operator": "Keys of agents and listeners without a connector" if alone else "Keys of the operator",
            "program": "Keys that the program sets",
            "environment": "Variables without a key",
        }[row["giver"]]
        groups.setdefault(title, []).append(row)
    for title, members in groups.items():
        print(f"{title}\n\n{_table(members)}")
        print()
        for row in members:
            name = row["variable"] if row["giver"] == "environment" else row["key"]
            variable = f" ({row['variable']})" if row["variable"] and name == row["key"] else ""
            help = f"{name}{variable}: {row['help']}"
            print(textwrap.fill(help, 118, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False))
        print()


def _print_changed(rows: list[settings.Setting]) -> None:
    changed = [row for row in rows if row["source"] != "default" and row["giver"] != "program"]
    print(f"{_table(changed)}\n" if changed else "Every key has its default.\n")


def _variable(key: str) -> str:
    return f"KVFERRY_{key.upper()}"


def _former(rows: list[settings.Setting]) -> list[str]:
    """Notes about keys that older configurations have."""
    given = [row for row in rows if row["source"] != "default"]
    traced = any(row["key"] == "trace" for row in given)
    notes = []
    for row in given:
        name = row["variable"] if row["source"] == "environment" else row["key"]
        if former := row["former"]:
            variable = row["source"] == "environment"
            notes.append(f"{_variable(former) if variable else former} is called {name} now; rename it")
        elif row["is_retired"]:
            notes.append(f"{name} has no effect; leave it out")
        elif row["key"] == "request_log" and row["value"] and traced:
            notes.append(f"{name} has no effect beside trace; leave it out")
        elif row["key"] == "request_log" and row["value"]:
            notes.append(f"{name} is taken for trace; set trace, and read its files with `kvferry trace`")
    return notes


def _verdict(given: Given) -> str:
    if given.role is None:
        return (
            "the environment's values can be used; give vLLM's --kv-transfer-config to have an engine's start checked"
        )
    return f"an engine of kv_role {given.role} starts with these values on this machine"


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    Raises `UsageError` with all that an engine would refuse.
    """
    given = Given({}, [], None) if options.config is None else extra_config(read_config(options.config))
    try:
        description = describe(given.extra)
        _, taken, left_out = translate(given.extra)
        wrong = missing_files(description["settings"]) if given.role is None else _start_problems(given, given.role)
    except InvalidArgumentError as error:
        raise UsageError(error.message.removeprefix("kvf_settings_describe: ")) from None
    if wrong:
        raise UsageError("; ".join(wrong))
    former = _former(description["settings"])
    notes = [*given.notes, *taken, *left_out, *former, *vain_variables(os.environ)]
    for unknown in description["unknown_variables"]:
        hint = f"; did you mean {unknown['nearest']}?" if unknown["nearest"] else ""
        notes.append(f"nothing reads the environment variable {unknown['name']}{hint}")
    if options.json:
        print(json.dumps({**description, "notes": notes}, indent=2))
        return 0
    (_print_all if options.all else _print_changed)(description["settings"])
    for note in notes:
        print(f"note: {note}")
    print(f"verdict: {_verdict(given)}")
    if not options.all:
        print("`kvferry config --all` shows every key and what it means.")
    return 0


def _start_problems(given: Given, role: str) -> list[str]:
    try:
        return problems(Engine(given.extra, role, given.policy))
    except (ChildError, OSError) as error:
        return [f"whether an engine would start cannot be told: {error}"]
