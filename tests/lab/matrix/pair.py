"""The two engines of the fault matrix: started, frozen, killed, started again on the same ports, and looked at."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace

import aiohttp

from lab.demo.options import parse_options
from lab.demo.run import Setting
from lab.matrix.client import LIMIT_S, Prompt, Reply, body, post
from lab.matrix.judge import EngineAfter, judge_engine
from lab.matrix.network import Network
from lab.matrix.peers import LEASE_S, Peer, Placed
from lab.ports import free_port
from lab.servers.launcher import ForkedServer, Launcher
from lab.servers.metrics import fetch_metrics, open_requests, total
from lab.servers.server import ServerFailed
from lab.servers.specs import Outputs, engine_spec

POOL_BLOCKS = 48
POOL_TOKENS = POOL_BLOCKS * 128
_TOKEN_BYTES = 4096
"""Of the tiny model: 4 layers, K and V, 4 heads of 32 float32. A pool that a few prompts of others go round in."""

START_LIMIT_S = 900.0
GONE_WITHIN_S = 60.0
DRAIN_LIMIT_S = LEASE_S + 25.0
"""Blocks must be back by then: the lease of every connector, and a margin for a slow machine."""

ROLES = ("prefill", "decode")
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Pair:
    """A prefill and a decode engine with one connector."""

    def __init__(
        self,
        setting: Setting,
        network: Network,
        launcher: Launcher,
        peer: Peer,
    ) -> None:
        self.setting, self.network, self.launcher, self.peer = setting, network, launcher, peer
        # What engines that are started from now on are given: block sizes, None for vLLM's own, and engine ids.
        self.blocks: dict[str, int | None] = dict.fromkeys(ROLES)
        self.engine_ids: dict[str, str | None] = dict.fromkeys(ROLES)
        self._running_blocks: dict[str, int | None] = {}
        ports = _distinct_ports(4)
        self.ports = dict(zip(ROLES, ports[:2], strict=True))
        self.side_ports = dict(zip(ROLES, ports[2:], strict=True))
        self._servers: dict[str, ForkedServer] = {}
        self._up: set[str] = set()
        self._asked = 0

    @property
    def session(self) -> aiohttp.ClientSession:
        """For requests to both engines."""
        return self.setting.session

    def url(self, role: str) -> str:
        """Where an engine answers, whether or not it runs."""
        host = self.network.prefill if role == "prefill" else self.network.decode
        return f"http://{host.address}:{self.ports[role]}"

    def running(self, role: str) -> bool:
        """Whether the engine has come up and was not killed by a row."""
        return role in self._up

    def _start(self, role: str) -> ForkedServer:
        host = self.network.prefill if role == "prefill" else self.network.decode
        connector = Placed(
            self.peer.name,
            True,
            peer=self.peer,
            address=host.address,
            side_port=self.side_ports[role],
            device=host.device,
            engine_id=self.engine_ids[role],
        )
        block = self.blocks[role]
        options = parse_options([] if block is None else [f"--{role}", f"block={block}"])
        self._running_blocks[role] = block
        folder = self.setting.folder
        outputs = Outputs(folder / "receives.jsonl", folder / "cache")
        spec = engine_spec(_KV_ROLES[role], self.setting.model, options, connector, outputs)
        number = len(list(folder.glob(f"{self.peer.name}-{role}-*.log"))) + 1
        return self.launcher.start(
            replace(
                spec,
                name=f"{self.peer.name}-{role}-{number}",
                port=self.ports[role],
                host=host.address,
                arguments=_with_pool(spec.arguments),
                # For /reset_prefix_cache, one of vLLM's endpoints for development.
                environment={**spec.environment, "VLLM_SERVER_DEV_MODE": "1"},
            ),
            host,
        )

    async def start(self, *roles: str) -> None:
        """Starts engines that do not run, waits until they answer, and gives each a plain request."""
        for role in roles:
            if role not in self._servers:
                self._servers[role] = self._start(role)
        servers = [self._servers[role] for role in roles]
        await self.setting.servers.wait_ready(servers, self.session, START_LIMIT_S)
        self._up.update(roles)
        for role in roles:
            reply = await self.plain(role, 10 * LIMIT_S)
            if reply.error is not None:
                raise ServerFailed(f"a new {role} engine failed a plain request: {reply.error}")

    async def restore(self) -> bool:
        """Replaces engines that do not run or answer, keep blocks that nobody uses, or have another block size; whether
        any was."""
        for role in [role for role in ROLES if role in self._servers]:
            if self._running_blocks[role] != self.blocks[role] or judge_engine(await self.drained(role)) is not None:
                await self.kill(role)
        missing = [role for role in ROLES if role not in self._servers]
        if missing:
            await self.start(*missing)
        return bool(missing)

    async def kill(self, role: str) -> None:
        """SIGKILL to all processes of an engine, and waits until they are gone."""
        server = self._servers.pop(role)
        self._up.discard(role)
        server.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + GONE_WITHIN_S
        while not server.reap(0) or not server.reap_group() or self.setting.servers.processes(server):
            if time.monotonic() > deadline:
                raise ServerFailed(f"{server.name} is not gone {GONE_WITHIN_S:.0f} s after SIGKILL")
            await asyncio.sleep(0.01)
        self.setting.servers.stop([server])

    def freeze(self, role: str) -> None:
        """SIGSTOP to all processes of an engine."""
        self._servers[role].signal_group(signal.SIGSTOP)

    def thaw(self, role: str) -> None:
        """SIGCONT."""
        if role in self._servers:
            self._servers[role].signal_group(signal.SIGCONT)

    def stop(self) -> None:
        """Ends both engines."""
        for role in ROLES:
            self.thaw(role)
        self.setting.servers.stop(list(self._servers.values()))
        self._servers.clear()
        self._up.clear()

    async def plain(self, role: str, limit_s: float = LIMIT_S) -> Reply:
        """A request without any connector's work."""
        self._asked += 1
        prompt = Prompt("plain", 20, 2)
        return await post(self.session, self.url(role), body(prompt), f"plain-{self._asked}", limit_s)

    async def look(self, role: str) -> EngineAfter:
        """Whether an engine lives, and what it has in use."""
        server = self._servers[role]
        try:
            server.check_alive()
        except ServerFailed as failure:
            return EngineAfter(role, dead=str(failure).split(";", 1)[0])
        reply = await self.plain(role)
        if reply.hung:
            return EngineAfter(role, stuck=True)
        if reply.error is not None:
            return EngineAfter(role, dead=f"a plain request fails: {reply.error[:200]}")
        # vLLM writes these figures when it steps, which the plain request made it do.
        try:
            text = await fetch_metrics(self.session, self.url(role))
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as problem:
            return EngineAfter(role, dead=f"no metrics: {type(problem).__name__}")
        return EngineAfter(role, in_use=(open_requests(text), total(text, "vllm:kv_cache_usage_perc")))

    async def drained(self, role: str, limit_s: float = DRAIN_LIMIT_S) -> EngineAfter:
        """Looks at an engine until it has nothing in use, for `limit_s` at most."""
        deadline = time.monotonic() + limit_s
        while True:
            found = await self.look(role)
            if found.dead is not None or found.stuck or judge_engine(found) is None or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.5)

    async def forget(self, role: str) -> None:
        """Empties an engine's prefix cache, so that the next request with a known prompt loads it."""
        words = f"/reset_prefix_cache on the {role} engine"
        limit = aiohttp.ClientTimeout(total=LIMIT_S)
        try:
            async with self.session.post(f"{self.url(role)}/reset_prefix_cache", timeout=limit) as answer:
                if answer.status != 200:
                    raise ServerFailed(f"{words}: HTTP {answer.status}")
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as problem:
            raise ServerFailed(f"{words}: {type(problem).__name__}: {problem}") from problem

    def tail(self, role: str) -> str:
        """The end of an engine's log."""
        return self._servers[role].tail() if role in self._servers else ""


def _with_pool(arguments: list[str]) -> list[str]:
    """A server's arguments, with this module's size of the KV cache."""
    place = arguments.index("--kv-cache-memory-bytes") + 1
    return [*arguments[:place], str(POOL_TOKENS * _TOKEN_BYTES), *arguments[place + 1 :]]


def _distinct_ports(count: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        port = free_port()
        if port not in ports:
            ports.append(port)
    return ports
