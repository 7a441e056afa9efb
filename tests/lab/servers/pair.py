"""A prefill and a decode server that are frozen, killed, and started again on the same ports."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod

from lab.common import free_port
from lab.demo.run import Setting
from lab.network import LOOPBACK, Host
from lab.servers.client import LIMIT_S, Answer, body, post, prompt_of
from lab.servers.metrics import fetch_metrics, open_requests, total
from lab.servers.server import Server, ServerSpec
from lab.servers.specs import Outputs

ROLES = ("prefill", "decode")
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
START_LIMIT_S = 900.0
GONE_WITHIN_S = 90.0


class Pair(ABC):
    """The two servers that run now, by role."""

    def __init__(self, setting: Setting, hosts: dict[str, Host] | None = None) -> None:
        self.setting, self.servers, self.session = setting, setting.servers, setting.session
        self.hosts = hosts or dict.fromkeys(ROLES, LOOPBACK)
        self.ports, self.side_ports = ({role: free_port() for role in ROLES} for _ in range(2))
        self.running: dict[str, Server] = {}
        self._asked = 0

    @abstractmethod
    def spec(self, role: str) -> ServerSpec:
        """What is started, without the name of its log, its port and its host."""

    @property
    def outputs(self) -> Outputs:
        """Files that nobody reads."""
        return Outputs(self.setting.folder / "receives.jsonl", self.setting.folder / "cache")

    def url(self, role: str) -> str:
        """Where an engine answers, whether or not it runs."""
        return f"http://{self.hosts[role].address}:{self.ports[role]}"

    def launch(self, role: str) -> Server:
        """Starts a server that does not run, without waiting for it. /sleep and /reset_prefix_cache are endpoints of
        vLLM's for development."""
        spec = self.spec(role)
        spec.name, spec.port, spec.host = self.servers.numbered(spec.name), self.ports[role], self.hosts[role]
        spec.environment["VLLM_SERVER_DEV_MODE"] = "1"
        self.running[role] = self.servers.start(spec)
        return self.running[role]

    async def kill(self, role: str) -> None:
        """SIGKILL to all processes of a server, and waits until they are gone."""
        await self.servers.kill(self.running.pop(role), GONE_WITHIN_S)

    def freeze(self, role: str) -> None:
        """SIGSTOP to all processes of a server."""
        self.running[role].child.signal_group(signal.SIGSTOP)

    def thaw(self, role: str) -> None:
        """SIGCONT."""
        if role in self.running:
            self.running[role].child.signal_group(signal.SIGCONT)

    def stop(self) -> None:
        """Ends both."""
        for role in ROLES:
            self.thaw(role)
        self.servers.stop(self.running.values())
        self.running.clear()

    async def plain(self, role: str, limit_s: float = LIMIT_S) -> Answer:
        """A request without any connector's work."""
        self._asked += 1
        request = body(prompt_of("plain", 20, 2))
        return await post(self.session, self.url(role), request, f"plain-{self._asked}", limit_s)

    async def in_use(self, role: str) -> tuple[float, float]:
        """Requests open, and the share of the KV cache in use. vLLM writes these figures when it steps, as it does in a
        plain request."""
        text = await fetch_metrics(self.session, self.url(role))
        return open_requests(text), total(text, "vllm:kv_cache_usage_perc")


TIMED_OUT = (TimeoutError, asyncio.TimeoutError)
"""The same from Python 3.11 on."""
