"""vLLM's configuration of the connector: `--kv-transfer-config` and its `kv_connector_extra_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import settings
from .stock import translate

HOST_IP = "VLLM_HOST_IP"
"""vLLM's own word for "this node's address as the others know it"."""

CONNECTOR_KEYS = ("multi_turn", "push_dialect", "bootstrap_port", "bind", "host", "telemetry")
"""Keys that the connector itself reads."""


@dataclass(frozen=True)
class Options:
    """Checked options by the side that uses them. The library takes options that are not given from the environment,
    then from its defaults."""

    worker: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    multi_turn: bool = False
    push_dialect: bool = False
    bootstrap_port: int | None = None
    bind: str | None = None
    host: str | None = None
    telemetry: bool = True


def describe(extra: Mapping[str, Any]) -> settings.Description:
    """Checks `kv_connector_extra_config` and describes every key with the value that it has under vLLM. Keys of
    `NixlConnector` count as `stock.translate` says.

    Raises `InvalidArgumentError` that names the key, its value and what was expected; for an unknown key, the nearest
    known one.
    """
    description = settings.describe(translate(extra)[0])
    host_ip = os.environ.get(HOST_IP)
    for setting in description["settings"]:
        if host_ip and setting["key"] == "host" and setting["source"] == "default":
            setting["value"], setting["source"], setting["variable"] = host_ip, "environment", HOST_IP
    return description


def parse_options(extra: Mapping[str, Any]) -> Options:
    """Checks options as `describe` does, and returns those that were given, by the side that uses them."""
    sides: dict[str, dict[str, Any]] = {"worker": {}, "scheduler": {}}
    here: dict[str, Any] = {}
    for setting in describe(extra)["settings"]:
        if setting["key"] in CONNECTOR_KEYS:
            here[setting["key"]] = setting["value"]
        if setting["source"] == "given" or setting["variable"] == HOST_IP:
            for part in set(setting["parts"]) & set(sides):
                # Under its earlier name the library warns of it.
                sides[part][setting["former"] or setting["key"]] = setting["value"]
    return Options(worker=sides["worker"], scheduler=sides["scheduler"], **here)


def multi_turn_refusal(sends: bool, loads: bool, policy: str) -> str | None:
    """Tells why an engine of this `kv_role` and `kv_load_failure_policy` cannot serve `multi_turn`; None if it can."""
    if not loads:
        return (
            "KvferryConnector does not serve multi_turn (bidirectional_kv_xfer) with kv_role kv_producer: vLLM keeps a "
            "freed block from steps in flight only in an engine that loads (defer_block_free). Set kv_role to kv_both "
            "on prefill engines; decode engines may stay kv_consumer"
        )
    if sends and policy != "recompute":
        return (
            "KvferryConnector serves multi_turn (bidirectional_kv_xfer) on a prefill engine with "
            f"kv_load_failure_policy recompute only, not {policy}: a decode engine evicts old "
            "conversations, and their next turns would fail"
        )
    return None
