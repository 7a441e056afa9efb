"""The engines of the link benchmark: what is measured, and how its servers are started on the two hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lab.common import free_port
from lab.network import Network
from lab.servers.connectors import KVFERRY_OPTIONS, placed
from lab.servers.proxy import Proxy
from lab.servers.server import Server, ServerGroup, ServerSpec
from lab.servers.specs import base_arguments, server_environment

CHUNK = 128
"""Tokens that a prefill engine computes in a step, so that a prompt of 2,048 takes 16."""
BLOCK = 32
LONGEST = 8192
TOKEN_BYTES = 4096
"""Of the tiny model's cache: 4 layers, K and V, 4 heads of 32 float32."""
START_LIMIT_S = 900.0


@dataclass(frozen=True)
class Variant:
    """One way to hand over."""

    name: str
    # Which of its family's decode engines it uses.
    decode: str = "decode"
    at_once: bool = False


@dataclass(frozen=True)
class Family:
    """Variants that share a prefill engine; the engines of one family run at a time."""

    name: str
    config: Mapping[str, Any]
    variants: tuple[Variant, ...]
    # What each decode engine is configured with beside.
    decodes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"decode": {}})

    @property
    def is_kvferry(self) -> bool:
        """Whether it is this project's."""
        return self.name == "kvferry"


CHUNKED: dict[str, Any] = {}
"""Settings of the decode engine that reads in chunks."""
_NIXL = {"kv_connector_module_path": "lab.probes.nixl", "kv_buffer_device": "cpu"}
FAMILIES = (
    Family(
        "kvferry",
        {"kv_connector": "KvferryConnector"},
        (
            Variant("kvferry in chunks", "chunks", at_once=True),
            Variant("kvferry whole, at once", "whole", at_once=True),
            Variant("kvferry whole", "whole"),
        ),
        {"chunks": CHUNKED, "whole": {"chunk_tokens": 0}},
    ),
    Family("pull", {"kv_connector": "QuietNixlConnector", **_NIXL}, (Variant("stock pull"),)),
    Family("push", {"kv_connector": "NixlPushConnector", "kv_buffer_device": "cpu"}, (Variant("stock push"),)),
)
"""The stock pull connector without its progress thread, which takes a processor for itself. The push connector asks
NIXL from two threads, and without that thread NIXL ends its process now and then."""


class Engines:
    """The servers of one family."""

    def __init__(self, family: Family, network: Network, group: ServerGroup, model: Path) -> None:
        self.family = family
        self._network, self._group, self._model = network, group, model
        self._servers: dict[str, Server] = {}
        self.proxies: dict[str, Proxy] = {}
        self.steps = group.folder / f"steps-{family.name}.jsonl"

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Starts all, with a proxy for each variant, and waits until they answer."""
        for name in ("prefill", *self.family.decodes):
            self._servers[name] = self._start(name)
        await self._group.wait_ready(list(self._servers.values()), session, START_LIMIT_S)
        for variant in self.family.variants:
            proxy = Proxy(self._servers["prefill"].url, self._servers[variant.decode].url, variant.at_once)
            await proxy.start()
            self.proxies[variant.name] = proxy

    def url(self, name: str) -> str:
        """Where a server answers."""
        return self._servers[name].url

    async def stop(self) -> None:
        """Ends all."""
        for proxy in self.proxies.values():
            await proxy.stop()
        self._group.stop(list(self._servers.values()))
        self.proxies, self._servers = {}, {}

    def _start(self, name: str) -> Server:
        host = self._network.prefill if name == "prefill" else self._network.decode
        port, side = free_port(), free_port()
        extra: dict[str, Any] = dict(self.family.decodes.get(name, {}))
        environment = server_environment() | placed(host, side, self.family.is_kvferry)
        config = dict(self.family.config)
        if self.family.is_kvferry:
            extra |= {**KVFERRY_OPTIONS, "port": side, "transport": "tcp"}
            if name == "prefill":
                config |= {
                    "kv_connector": "StepsKvferryConnector",
                    "kv_connector_module_path": "lab.probes.kvferry",
                }
                environment["KVFERRY_DEMO_STEPS"] = str(self.steps)
        config["kv_role"] = "kv_producer" if name == "prefill" else "kv_consumer"
        config |= {"kv_connector_extra_config": extra, "kv_load_failure_policy": "fail"}
        arguments = base_arguments(self._model, longest=LONGEST + 256)
        arguments += ["--hf-overrides", json.dumps({"max_position_embeddings": 16384})]
        arguments += ["--block-size", str(BLOCK), "--enforce-eager", "--max-num-batched-tokens", str(CHUNK)]
        arguments += ["--enable-chunked-prefill", "--no-enable-prefix-caching"]
        arguments += ["--kv-transfer-config", json.dumps(config)]
        log = self._group.numbered(f"{self.family.name}-{name}")
        return self._group.start(ServerSpec(log, arguments, environment, port, host))
