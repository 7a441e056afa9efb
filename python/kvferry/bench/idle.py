"""What a process with many connected peers costs while nothing is moved."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import Agent
from ..agent import PeerConnected
from .engines.engine import cpu_of
from .engines.nixl import NIXL_THREADS, plain_agent
from .figures import Row, columns, number, row
from .remote import Remote

_BYTES = 1 << 20
_LIMIT_S = 120.0
SETTLE_S = 2.0


class _Peers:
    """Agents in one process, each with memory of its own. It stands for as many engines."""

    def __init__(self, transport: str, count: int) -> None:
        self._agents = [Agent({"name": f"peer {index}", "transport": transport}) for index in range(count)]
        for agent in self._agents:
            agent.register(np.zeros(_BYTES, dtype=np.uint8))

    def metadata(self) -> list[bytes]:
        return [agent.metadata() for agent in self._agents]

    def connected(self) -> int:
        """How many of them have heard of the one that connects."""
        deadline, heard = time.monotonic() + _LIMIT_S, 0
        for agent in self._agents:
            while not any(isinstance(event, PeerConnected) for event in agent.wait(1.0)):
                if time.monotonic() > deadline:
                    return heard
            heard += 1
        return heard

    def close(self) -> None:
        for agent in self._agents:
            agent.shutdown()


class _One:
    """The agent that is connected to all of them, and what its process costs."""

    def __init__(self, transport: str) -> None:
        self._agent = Agent({"name": "one", "transport": transport})
        self._agent.register(np.zeros(_BYTES, dtype=np.uint8))

    def connect(self, metadata: Sequence[bytes]) -> None:
        for one in metadata:
            self._agent.connect(one)

    def close(self) -> None:
        self._agent.shutdown()


class _Nixl:
    """A NIXL agent as vLLM makes it, with registered memory; `meet` connects it to another."""

    def __init__(self, transport: str, threads: int) -> None:
        self._memory = np.zeros(_BYTES, dtype=np.uint8)
        self._agent = plain_agent(transport, threads)
        self._agent.register_memory(self._agent.get_reg_descs([(self._memory.ctypes.data, _BYTES, 0, "")], "DRAM"))

    def metadata(self) -> Any:
        return self._agent.get_agent_metadata()

    def connect(self, metadata: Any) -> None:
        self._agent.add_remote_agent(metadata)

    def close(self) -> None:
        """The process's end gives everything back."""


class Held(NamedTuple):
    """What a process holds (bytes of memory of its own, open descriptors) and has used (processor seconds)."""

    memory: float
    descriptors: float
    cpu_s: float


class Idle(NamedTuple):
    """Processor seconds of the one process over `seconds`, kvferry's and NIXL's (by `num_threads`), and what each of
    kvferry's peers costs it: memory and descriptors for as long as it is connected, processor time for connecting."""

    peers: int
    seconds: float
    ours: float
    nixl: dict[int, float]
    each: Held


def measure(transport: str, peers: int, seconds: float, peer: bool) -> Idle:
    """kvferry's agent with `peers` connections; with `peer` also NIXL's with one connection."""
    with ExitStack() as stack:
        others = stack.enter_context(Remote("peers", _Peers, transport, peers))
        one = stack.enter_context(Remote("the one agent", _One, transport))
        metadata = others.ask("metadata")
        before = _held(one.pid)
        one.ask("connect", metadata)
        heard = others.ask("connected")
        if heard != peers:
            raise TimeoutError(f"{heard} of {peers} connections were made within {_LIMIT_S:.0f} s")
        each = Held(*((now - then) / peers for now, then in zip(_held(one.pid), before, strict=True)))
        ours = _cost(one.pid, seconds)
    nixl = {}
    for threads in NIXL_THREADS if peer else ():
        with ExitStack() as stack:
            first, second = (
                stack.enter_context(Remote(f"NIXL, num_threads {threads}", _Nixl, transport, threads)) for _ in range(2)
            )
            first.ask("connect", second.ask("metadata"))
            second.pause()
            nixl[threads] = _cost(first.pid, seconds)
    return Idle(peers, seconds, ours, nixl, each)


def _held(pid: int) -> Held:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (memory,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
    return Held(memory, len(os.listdir(f"/proc/{pid}/fd")), cpu_of(pid))


def _cost(pid: int, seconds: float) -> float:
    time.sleep(SETTLE_S)
    before = cpu_of(pid)
    time.sleep(seconds)
    return cpu_of(pid) - before


def summary(idle: Idle, transport: str) -> Row:
    """The row: processor milliseconds of the process as a whole."""
    peer = min(idle.nixl.values(), default=None)
    return row(
        f"idle for {idle.seconds:g} s, {idle.peers} peers connected: processor time",
        transport,
        ours_ms=idle.ours * 1e3,
        peer_ms=None if peer is None else peer * 1e3,
    )


def table(idle: Idle, transport: str) -> str:
    """All engines."""
    lines = [(f"kvferry, {idle.peers} peers", number(idle.ours * 1e3), number(idle.ours / idle.seconds))]
    for threads, cost in idle.nixl.items():
        lines.append((f"NIXL, num_threads {threads}, 1 peer", number(cost * 1e3), number(cost / idle.seconds)))
    each = idle.each
    under = (
        f"each of kvferry's peers: {number(each.memory / 1024)} KiB, {number(each.descriptors)} descriptors, "
        f"{number(each.cpu_s * 1e3)} ms of processor time to connect"
    )
    title = f"idle for {idle.seconds:g} s, {transport}, {len(os.sched_getaffinity(0))} processors"
    return f"{title}\n{columns(('', 'processor ms', 'cores'), lines)}\n{under}"
