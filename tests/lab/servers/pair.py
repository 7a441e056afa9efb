"""The two servers of the series `vllm`: started, killed, and started again on the same ports."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.demo.options import Options
from lab.demo.run import Setting
from lab.ports import free_port
from lab.servers.connectors import Connector
from lab.servers.server import Server, ServerGroup
from lab.servers.specs import Outputs, baseline_spec, engine_spec

POLICIES = ("recompute", "fail")

# What a killed decode server had not read comes free after one lease. A prefill of the longest prompt takes less than
# a second, but the servers share two cores with one that starts.
TIMES = {
    "lease_ms": 20_000,
    "handshake_timeout_ms": 15_000,
    "transfer_timeout_ms": 60_000,
    "verdict_timeout_ms": 20_000,
}

SHUTDOWN_S = 60
GONE_WITHIN_S = 90.0
"""What a server may take to drain, which includes a lease that nobody asks for; and to be gone."""


@dataclass(frozen=True)
class FixedConnector(Connector):
    """kvferry with an engine id and a listener port that a server started again has too."""

    engine_id: str = ""
    port: int = 0
    policy: str = "fail"

    def transfer_config(self, role: str, options: Options) -> dict[str, Any]:
        """The value of --kv-transfer-config."""
        return {
            "kv_connector": "KvferryConnector",
            "kv_role": role,
            "engine_id": self.engine_id,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"port": self.port, **TIMES},
        }


class Pair:
    """The prefill and the decode server that run now."""

    prefill: Server
    decode: Server

    def __init__(self, servers: ServerGroup, setting: Setting) -> None:
        self.servers, self.setting = servers, setting
        self.policy = ""
        self.left_by_kills: list[str] = []
        self._ports = {"kv_producer": free_port(), "kv_consumer": free_port()}
        self._listener = free_port()
        self._starts = 0

    def start_baseline(self) -> Server:
        """A single server without a connector."""
        return self.servers.start(baseline_spec(self.setting.model, self.setting.options))

    def _start(self, role: str, policy: str) -> Server:
        self._starts += 1
        connector = FixedConnector("kvferry", False, engine_id=f"chaos-{role}", port=self._listener, policy=policy)
        folder = self.setting.folder
        outputs = Outputs(folder / "receives.jsonl", folder / "cache")
        spec = engine_spec(role, self.setting.model, self.setting.options, connector, outputs)
        # Each start has a log of its own. /sleep is one of vLLM's endpoints for development. Without a time for its
        # shutdown, vLLM kills its own processes at once.
        return self.servers.start(
            replace(
                spec,
                name=f"{spec.name}-{self._starts}",
                port=self._ports[role],
                arguments=[*spec.arguments, "--shutdown-timeout", str(SHUTDOWN_S)],
                environment={**spec.environment, "VLLM_SERVER_DEV_MODE": "1"},
            )
        )

    def start_prefill(self) -> Server:
        """A prefill server, on the ports of the one before."""
        self.prefill = self._start("kv_producer", "fail")
        return self.prefill

    def start_decode(self, policy: str) -> Server:
        """A decode server with another policy, on the port of the one before."""
        self.policy = policy
        self.decode = self._start("kv_consumer", policy)
        return self.decode

    async def gone(self, server: Server) -> None:
        """After SIGKILL to its process group: no process of the server is left."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while not server.reap(0) or self.servers.processes(server):
            if time.monotonic() > deadline:
                self.left_by_kills.append(f"{server.name}: {self.servers.processes(server)}")
                break
            await asyncio.sleep(0.01)
        self.servers.stop([server])


async def stop_in_order(servers: ServerGroup, running: Sequence[Server]) -> tuple[list[str], list[str]]:
    """Ends servers as an operator does, with SIGTERM to the first process of each.

    Returns what processes are left after `GONE_WITHIN_S`, and tracebacks of engines and workers in the servers' last
    logs. (vLLM's API server logs one of its own, `EngineDeadError`, where its engine has ended before it.)
    """
    for server in running:
        server.signal_first(signal.SIGTERM)
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := servers.processes()) and time.monotonic() < deadline:
        for server in running:
            server.reap(0.01)
        await asyncio.sleep(0.1)
    tracebacks = [
        f"{server.name}: {line}"
        for server in running
        for line in server.log.read_text(errors="replace").splitlines()
        if "Traceback (most recent call last)" in line and not line.startswith("(APIServer")
    ]
    return [f"process {pid} after the servers' shutdown" for pid in left], tracebacks
