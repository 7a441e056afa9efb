"""The two engines of the fault matrix: started, restored, and looked at."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from lab.demo.options import parse_options
from lab.demo.run import Setting
from lab.matrix.judge import EngineAfter, judge_engine
from lab.matrix.peers import LEASE_S, POOL_TOKENS, TOKEN_BYTES, Peer, Placed
from lab.network import Network
from lab.servers import pair
from lab.servers.client import LIMIT_S
from lab.servers.pair import KV_ROLES, ROLES, START_LIMIT_S, TIMED_OUT
from lab.servers.server import ServerFailed, ServerSpec
from lab.servers.specs import engine_spec

DRAIN_LIMIT_S = LEASE_S + 25.0
"""Blocks must be back by then: the lease of every connector, and a margin for a slow machine."""


class Pair(pair.Pair):
    """A prefill and a decode engine with one connector."""

    def __init__(self, setting: Setting, network: Network, peer: Peer) -> None:
        super().__init__(setting, {role: network.hosts[role] for role in ROLES})
        self.network, self.peer = network, peer
        # What engines that are started from now on are given: block sizes, None for vLLM's own, and engine ids.
        self.blocks: dict[str, int | None] = dict.fromkeys(ROLES)
        self.engine_ids: dict[str, str | None] = dict.fromkeys(ROLES)
        self._running_blocks: dict[str, int | None] = {}
        self._up: set[str] = set()

    def spec(self, role: str) -> ServerSpec:
        """As the row wants it, with a pool that a few prompts of others go round in."""
        placed = Placed(self.peer, self.hosts[role], self.side_ports[role], self.engine_ids[role])
        block = self._running_blocks[role] = self.blocks[role]
        options = parse_options([] if block is None else [f"--{role}", f"block={block}"])
        cache_bytes = POOL_TOKENS * TOKEN_BYTES
        found = engine_spec(KV_ROLES[role], self.setting.model, options, placed, self.outputs, cache_bytes)
        found.name = f"{self.peer.name}-{role}"
        return found

    def is_up(self, role: str) -> bool:
        """Whether the engine has come up and was not killed by a row."""
        return role in self._up

    async def start(self, *roles: str) -> None:
        """Starts engines that do not run, waits until they answer, and gives each a plain request."""
        for role in roles:
            if role not in self.running:
                self.launch(role)
        await self.servers.wait_ready([self.running[role] for role in roles], self.session, START_LIMIT_S)
        self._up.update(roles)
        for role in roles:
            answer = await self.plain(role, 10 * LIMIT_S)
            if answer.error is not None:
                raise ServerFailed(f"a new {role} engine failed a plain request: {answer.error}")

    async def restore(self) -> bool:
        """Replaces engines that do not run or answer, keep blocks that nobody uses, or have another block size; whether
        any was."""
        for role in list(self.running):
            if self._running_blocks[role] != self.blocks[role] or judge_engine(await self.drained(role)) is not None:
                await self.kill(role)
        missing = [role for role in ROLES if role not in self.running]
        if missing:
            await self.start(*missing)
        return bool(missing)

    async def kill(self, role: str) -> None:
        """SIGKILL to all processes of an engine, and waits until they are gone."""
        self._up.discard(role)
        await super().kill(role)

    def stop(self) -> None:
        """Ends both engines."""
        self._up.clear()
        super().stop()

    async def look(self, role: str) -> EngineAfter:
        """Whether an engine lives, and what it has in use."""
        try:
            self.running[role].check_alive()
        except ServerFailed as failure:
            return EngineAfter(role, dead=str(failure).split(";", 1)[0])
        answer = await self.plain(role)
        if answer.hung:
            return EngineAfter(role, stuck=True)
        if answer.error is not None:
            return EngineAfter(role, dead=f"a plain request fails: {answer.error[:200]}")
        try:
            return EngineAfter(role, in_use=await self.in_use(role))
        except (aiohttp.ClientError, *TIMED_OUT) as problem:
            return EngineAfter(role, dead=f"no metrics: {type(problem).__name__}")

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
        except (aiohttp.ClientError, *TIMED_OUT) as problem:
            raise ServerFailed(f"{words}: {type(problem).__name__}: {problem}") from problem

    def tail(self, role: str) -> str:
        """The end of an engine's log."""
        return self.running[role].tail() if role in self.running else ""
