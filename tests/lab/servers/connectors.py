"""What differs between the connectors that the demo can run: vLLM's arguments and the servers' environment."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.common import free_port
from lab.demo.cache_check import DUMP_FOLDER
from lab.demo.options import Options
from lab.network import Host

# Where each rank of the decode engine tells of its receives: kvferry's in a trace of its own, the observer of the stock
# connector's in a line each.
TRACE = "KVFERRY_TRACE"
REQUEST_LOG = "KVFERRY_REQUEST_LOG"

# UCX's names for what --transport means to NIXL's agents. `self` is for an agent's connection to itself; `shm` stands
# for all shared memory, reading another process's memory (CMA) included. Shared memory alone does not connect
# ("Destination is unreachable"): NIXL's endpoints ask to be told of a peer's death, which needs TCP for that.
UCX_TLS = {"tcp": "tcp,self", "shm": "shm,tcp,self"}

# The folder of the plug-in for NIXL; scripts/demo sets it.
PLUGINS = "KVFERRY_DEMO_PLUGINS"

# A free port, so that two demos do not meet. The times are ten times the defaults, because here a slow machine is no
# failure: with two tensor-parallel engines on two busy cores, the default lease of 30 s can run out before the read is
# confirmed, and kvferry then rightly fails the request.
KVFERRY_OPTIONS = {
    "port": 0,
    "lease_ms": 300_000,
    "handshake_timeout_ms": 300_000,
    "transfer_timeout_ms": 1_200_000,
    "verdict_timeout_ms": 100_000,
}


class Connector(ABC):
    """What a server is given of its connector."""

    @abstractmethod
    def transfer_config(self, role: str, options: Options) -> dict[str, Any]:
        """The value of --kv-transfer-config."""

    def arguments(self, role: str, options: Options) -> list[str]:
        """vLLM's arguments for this connector."""
        return ["--kv-transfer-config", json.dumps(self.transfer_config(role, options))]

    def environment(self, role: str, options: Options, request_log: Path, dump: Path) -> dict[str, str]:
        """What to add to a server's environment."""
        return {}


@dataclass(frozen=True)
class Selectable(Connector):
    """One that the demo can be told to run."""

    name: str
    # Whether its engines get a plain request and a hand-over that does not count before the first one that does.
    # Stock's first one often fails: its handshake gives up after 5 s, which a cold engine on a CPU may exceed. Side by
    # side, all get both.
    warm_up: bool
    # Whether the proxy asks both engines at the same time.
    at_once: bool = False

    @property
    def is_kvferry(self) -> bool:
        """Whether it is this project's."""
        return self.name.startswith("kvferry")

    def transfer_config(self, role: str, options: Options) -> dict[str, Any]:
        """The value of --kv-transfer-config."""
        config: dict[str, Any] = {"kv_role": role}
        if self.is_kvferry:
            config["kv_connector_extra_config"] = dict(KVFERRY_OPTIONS)
            if options.transport is not None:
                config["kv_connector_extra_config"]["transport"] = options.transport
            if not options.check_bytes:
                return {"kv_connector": "KvferryConnector", **config}
            return {
                "kv_connector": "DumpedKvferryConnector",
                "kv_connector_module_path": "lab.probes.kvferry",
                **config,
            }
        name = "QuietNixlConnector" if self.name == "stock-quiet" else "ObservedNixlConnector"
        if options.check_bytes:
            name = "DumpedQuietNixlConnector" if self.name == "stock-quiet" else "DumpedNixlConnector"
        return {
            "kv_connector": name,
            "kv_connector_module_path": "lab.probes.nixl",
            "kv_buffer_device": "cpu",
            **({"kv_connector_extra_config": {"backends": ["KVFERRY"]}} if self.name == "stock-plugin" else {}),
            **config,
        }

    def environment(self, role: str, options: Options, request_log: Path, dump: Path) -> dict[str, str]:
        """What to add to a server's environment."""
        result: dict[str, str] = {}
        if options.check_bytes:
            result[DUMP_FOLDER] = str(dump)
        if role == "kv_consumer":
            result[TRACE if self.is_kvferry else REQUEST_LOG] = str(request_log)
        if not self.is_kvferry:
            result["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
            result["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            if self.name == "stock-plugin":
                result["NIXL_PLUGIN_DIR"] = os.environ[PLUGINS]
                if options.transport is not None:
                    result["KVFERRY_TRANSPORT"] = options.transport
            elif options.transport is not None:
                result["UCX_TLS"] = UCX_TLS[options.transport]
        return result


CONNECTORS = {
    "kvferry": Selectable("kvferry", warm_up=False),
    "kvferry-at-once": Selectable("kvferry-at-once", warm_up=False, at_once=True),
    "stock": Selectable("stock", warm_up=True),
    "stock-quiet": Selectable("stock-quiet", warm_up=True),
    "stock-plugin": Selectable("stock-plugin", warm_up=True),
}


def placed(host: Host, side_port: int, is_kvferry: bool) -> dict[str, str]:
    """The environment of an engine on a host: all move bytes over TCP, as between two hosts."""
    found = {"VLLM_HOST_IP": host.address, "UCX_NET_DEVICES": host.device}
    if is_kvferry:
        return found
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host.address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    return {**found, **side, "UCX_TLS": "tcp,self"}
