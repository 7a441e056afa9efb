"""The engines of the link benchmark: what is measured, and how its servers are started on the two hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lab.matrix.network import Network
from lab.ports import free_port
from lab.probes.kvferry import STEP_LOG
from lab.servers.client import SERVED_NAME
from lab.servers.connectors import KVFERRY_OPTIONS
from lab.servers.launcher import ForkedServer, Launcher
from lab.servers.proxy import Proxy
from lab.servers.server import ServerGroup, ServerSpec
from lab.servers.specs import server_environment

CHUNK = 128
"""Tokens that a prefill engine computes in a step, so that a prompt of 2,048 takes 16."""
BLOCK = 32
LONGEST = 8192
TOKEN_BYTES = 4096
"""Of the tiny model's cache: 4 layers, K and V, 4 heads of 32 float32."""
CACHE_BYTES = 256 << 20
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


PORTIONS: dict[str, Any] = {}
"""Settings of the decode engine that reads in portions."""
_NIXL = {"kv_connector_module_path": "lab.probes.nixl", "kv_buffer_device": "cpu"}
FAMILIES = (
    Family(
        "kvferry",
        {"kv_connector": "KvferryConnector"},
        (
            Variant("kvferry in portions", "portions", at_once=True),
            Variant("kvferry whole, at once", "whole", at_once=True),
            Variant("kvferry whole", "whole"),
        ),
        {"portions": PORTIONS, "whole": {"portion_tokens": 0}},
    ),
    Family("pull", {"kv_connector": "QuietNixlConnector", **_NIXL}, (Variant("stock pull"),)),
    Family("push", {"kv_connector": "NixlPushConnector", "kv_buffer_device": "cpu"}, (Variant("stock push"),)),
)
"""The stock pull connector without its progress thread, which takes a processor for itself. The push connector asks
NIXL from two threads, and without that thread NIXL ends its process now and then."""


class Engines:
    """The servers of one family."""

    def __init__(self, family: Family, network: Network, launcher: Launcher, group: ServerGroup, model: Path) -> None:
        self.family = family
        self._network, self._launcher, self._group, self._model = network, launcher, group, model
        self._servers: dict[str, ForkedServer] = {}
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

    def _start(self, name: str) -> ForkedServer:
        host = self._network.prefill if name == "prefill" else self._network.decode
        port, side = free_port(), free_port()
        extra: dict[str, Any] = dict(self.family.decodes.get(name, {}))
        environment = server_environment()
        environment |= {"VLLM_HOST_IP": host.address, "UCX_NET_DEVICES": host.device}
        config = dict(self.family.config)
        if self.family.is_kvferry:
            extra |= {**KVFERRY_OPTIONS, "port": side, "transport": "tcp"}
            if name == "prefill":
                config |= {
                    "kv_connector": "StepsKvferryConnector",
                    "kv_connector_module_path": "lab.probes.kvferry",
                }
                environment[STEP_LOG] = str(self.steps)
        else:
            environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host.address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
            environment["UCX_TLS"] = "tcp,self"
        config["kv_role"] = "kv_producer" if name == "prefill" else "kv_consumer"
        config |= {"kv_connector_extra_config": extra, "kv_load_failure_policy": "fail"}
        arguments = ["--model", str(self._model), "--served-model-name", SERVED_NAME, "--dtype", "float32"]
        arguments += [
            "--max-model-len",
            str(LONGEST + 256),
            "--hf-overrides",
            json.dumps({"max_position_embeddings": 16384}),
        ]
        arguments += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--block-size", str(BLOCK), "--enforce-eager"]
        arguments += ["--max-num-batched-tokens", str(CHUNK), "--enable-chunked-prefill", "--no-enable-prefix-caching"]
        arguments += ["--disable-uvicorn-access-log", "--kv-transfer-config", json.dumps(config)]
        number = len(list(self._group.folder.glob(f"{self.family.name}-{name}-*.log"))) + 1
        spec = ServerSpec(f"{self.family.name}-{name}-{number}", arguments, environment, port, host.address)
        return self._launcher.start(spec, host)
