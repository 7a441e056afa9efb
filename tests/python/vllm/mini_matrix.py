"""The fault matrix on two engines that only answer as a test says: no server, no network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from lab.matrix import case as matrix_case
from lab.matrix import rows_servers as matrix_rows_servers
from lab.matrix import run as matrix
from lab.matrix.judge import Cell, EngineAfter
from lab.matrix.peers import PEERS
from lab.matrix.rows import Row, all_rows
from lab.matrix.run import Matrix
from lab.servers.client import Answer as Reply
from lab.servers.client import Prompt
from lab.servers.pair import ROLES

TOKENS = (5, 6, 7, 8)
KEYS = 14
"""Keys of `PARAMS` that the rows of keys go through, as many as kvferry's own params have."""

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    **{f"key_{number}": number for number in range(1, KEYS)},
}

RIGHT = Reply(200, (TOKENS,), PARAMS)
WRONG = Reply(200, ((5, 6, 9, 8),), PARAMS)
SHORT = Reply(200, (), PARAMS)
FAILED = Reply(500, error="the load failed")
GONE = Reply(error="ClientConnectorError: connection refused")
HUNG = Reply(error="no end within 60 s", hung=True)


class MiniNetwork:
    """A link that carries and drops what the test says."""

    why_not = None

    def __init__(self) -> None:
        self.sent, self.dropped_packets = 0, 0

    def slow(self) -> None: ...

    def restore(self) -> None: ...

    def firewall(self, open_ports: Sequence[int]) -> None: ...

    def bytes_from_prefill(self) -> int:
        return self.sent

    def dropped(self) -> int:
        return self.dropped_packets


class MiniPair:
    """As much of `Pair` as rows and cells need. `engines` is how the engines are found after the fault."""

    def __init__(self) -> None:
        self.peer, self.session, self.network = PEERS["kvferry"], None, MiniNetwork()
        self.ports, self.side_ports = dict.fromkeys(ROLES, 1), dict.fromkeys(ROLES, 2)
        self.engines = {role: EngineAfter(role) for role in ROLES}
        self.killed: list[str] = []
        self.frozen = False
        # Whether anything was done to an engine.
        self.struck = False
        # What `restore` says in turn: whether engines were started, or why they were not.
        self.restored: list[bool | Exception] = []

    def url(self, role: str) -> str:
        return role

    def is_up(self, role: str) -> bool:
        return role not in self.killed

    async def restore(self) -> bool:
        self.killed.clear()
        found = self.restored.pop(0) if self.restored else False
        if isinstance(found, Exception):
            raise found
        return found

    async def start(self, *roles: str) -> None:
        for role in roles:
            self.killed.remove(role)

    async def kill(self, role: str) -> None:
        self.killed.append(role)
        self.struck = True

    def freeze(self, role: str) -> None:
        self.frozen = self.struck = True

    def thaw(self, role: str) -> None:
        self.frozen = False

    async def look(self, role: str) -> EngineAfter:
        return self.engines[role]

    async def drained(self, role: str) -> EngineAfter:
        await asyncio.sleep(0.01)
        return self.engines[role]

    async def forget(self, role: str) -> None: ...

    def stop(self) -> None: ...

    def tail(self, role: str) -> str:
        return ""


class MiniMatrix:
    """A matrix with such a pair."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair = MiniPair()
        # What the engines say to the two requests of hand-overs and to plain requests, in turn; then all is right.
        self.replies: dict[str, Iterator[Reply]] = {}
        # When a streaming request has given its first token, its end waits for this.
        self.rest: Callable[[], Awaitable[None]] = self.thawed
        # How long a request takes that hangs.
        self.hang_s = 0.0
        self.asked: list[str] = []
        self._matrix = Matrix(None, self.pair.network, self)
        monkeypatch.setattr(self._matrix, "pair_for", lambda *_: self.pair)
        monkeypatch.setattr(matrix_case, "post", self._post)
        monkeypatch.setattr(matrix_rows_servers, "LEASE_S", 0)
        monkeypatch.setattr(matrix_rows_servers, "FIREWALLED_S", 0, raising=False)
        monkeypatch.setattr(matrix, "PAUSE_S", 0.0)

    async def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """As the oracle: what the answer must be."""
        return TOKENS

    async def thawed(self) -> None:
        """Until the fault has come, and the engines are not frozen."""
        while self.pair.frozen or not self.pair.struck:
            await asyncio.sleep(0.001)

    async def _post(
        self,
        session: None,
        url: str,
        request: dict[str, Any],
        request_id: str,
        limit_s: float = 0.0,
        begun: Callable[[], None] | None = None,
    ) -> Reply:
        kind = url if "kv_transfer_params" in request else f"plain {url}"
        self.asked.append(kind)
        reply = next(self.replies.get(kind, iter(())), RIGHT)
        await asyncio.sleep(self.hang_s if reply.hung else 0)
        if begun is not None and reply.choices:
            begun()
            await self.rest()
        return reply

    def cell(self, row: str | Row) -> Cell:
        """One round of a row."""
        found = all_rows()[row] if isinstance(row, str) else row
        return asyncio.run(self._matrix.cell(self.pair.peer, found, 1))
