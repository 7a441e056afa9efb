"""What a process with many connected peers costs while nothing is moved."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import Agent
from ..agent import PeerConnected
from .engines.engine import cpu_of
from .errors import BenchError
from .figures import Row, columns, number
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


class Held(NamedTuple):
    """What a process holds (bytes of memory of its own, open descriptors) and has used (processor seconds)."""

    memory: float
    descriptors: float
    cpu_s: float


class Idle(NamedTuple):
    """Processor seconds of the one process over `seconds`, and what each peer costs it: memory and descriptors for as
    long as it is connected, processor time for connecting."""

    peers: int
    seconds: float
    cpu_s: float
    each: Held


def measure(transport: str, peers: int, seconds: float) -> Idle:
    """An agent with `peers` connections."""
    with ExitStack() as stack:
        others = stack.enter_context(Remote("peers", _Peers, transport, peers))
        one = stack.enter_context(Remote("the one agent", _One, transport))
        metadata = others.ask("metadata")
        before = _held(one.pid)
        one.ask("connect", metadata)
        heard = others.ask("connected")
        if heard != peers:
            raise BenchError(f"{heard} of {peers} connections were made within {_LIMIT_S:.0f} s")
        each = Held(*((now - then) / peers for now, then in zip(_held(one.pid), before, strict=True)))
        return Idle(peers, seconds, cost(one.pid, seconds), each)


def _held(pid: int) -> Held:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (memory,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
    return Held(memory, len(os.listdir(f"/proc/{pid}/fd")), cpu_of(pid))


def cost(pid: int, seconds: float) -> float:
    """Processor seconds that a process takes in `seconds`, after it has settled."""
    time.sleep(SETTLE_S)
    before = cpu_of(pid)
    time.sleep(seconds)
    return cpu_of(pid) - before


def summary(idle: Idle, transport: str) -> Row:
    """The row: processor milliseconds of the process as a whole."""
    work = f"idle for {idle.seconds:g} s, {idle.peers} peers connected: processor time"
    return {"work": work, "transport": transport, "ours_ms": idle.cpu_s * 1e3}


def table(idle: Idle, transport: str, others: Mapping[str, float] | None = None) -> str:
    """Our process, and the processor seconds of `others` by name."""
    costs = {f"kvferry, {idle.peers} peers": idle.cpu_s, **(others or {})}
    lines = [(name, number(cpu_s * 1e3), number(cpu_s / idle.seconds)) for name, cpu_s in costs.items()]
    each = idle.each
    under = (
        f"each of kvferry's peers: {number(each.memory / 1024)} KiB, {number(each.descriptors)} descriptors, "
        f"{number(each.cpu_s * 1e3)} ms of processor time to connect"
    )
    title = f"idle for {idle.seconds:g} s, {transport}, {len(os.sched_getaffinity(0))} processors"
    return f"{title}\n{columns(('', 'processor ms', 'cores'), lines)}\n{under}"
