"""The stock `nixl` package, used as vLLM's NixlConnector uses it.

Memory is registered per layer, descriptors for all blocks of both sides are prepared once, and each request is
`make_prepped_xfer` with its descriptor numbers, `transfer`, and `check_xfer_state` until it says DONE. The notification
rides on the transfer. Where vLLM spends more, this does not: no telemetry, no logging, numbers ready as int32 arrays,
handles released outside the timed part.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import numpy as np
from kvferry.bench.engines.engine import CallerClock, Setup, Stopwatch, Took
from kvferry.bench.memory import Memory

NIXL_THREADS = (0, 4)
"""The settings of `num_threads` that are tried: none, and what vLLM sets."""
LIMIT_S = 120.0
_MEMORY = {"host": "DRAM", "cuda": "VRAM"}
TARGET_POLL_S = 0.001
"""How often the other side looks for notifications. vLLM does so once per step, which takes longer."""
TARGET_POLL_FINE_S = 0.0002
"""The same where the time until it knows is what is measured."""

# Read by UCX when the agent is made. Nothing for shared memory: NIXL's own choice between processes of a host is the
# best that it has there.
UCX_TLS = {"tcp": "tcp"}


def missing() -> str | None:
    """Why the package cannot be used, with the remedy; None when it can."""
    try:
        import nixl  # noqa: F401
    except ImportError as error:
        return (
            f"the nixl package is not here ({error}); install it, as `pip install nixl==1.5.1` or `scripts/setup vllm` "
            "do"
        )
    return None


def plain_agent(transport: str, threads: int, progress: bool = True) -> Any:
    """An agent as vLLM makes it: UCX, a progress thread, and `threads` worker threads."""
    os.environ.pop("UCX_TLS", None)
    if transport in UCX_TLS:
        os.environ["UCX_TLS"] = UCX_TLS[transport]
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(backends=["UCX"], num_threads=threads, enable_prog_thread=progress)
    return nixl_agent(str(uuid.uuid4()), config)


def _agent(setup: Setup, memory: Memory) -> Any:
    agent = plain_agent(setup.transport, setup.options.get("num_threads", 0))
    layers = [(*memory.layer(layer), 0, "") for layer in range(setup.work.layers)]
    agent.register_memory(agent.get_reg_descs(layers, _MEMORY[memory.kind]))
    return agent


def block_table(address: int, layer_bytes: int, layers: int, blocks: int, block_bytes: int) -> Any:
    """Descriptors of all blocks as `[layer * blocks + block] = (address, bytes, device)`."""
    starts = np.arange(layers, dtype=np.uint64)[:, None] * np.uint64(layer_bytes)
    starts = starts + np.arange(blocks, dtype=np.uint64)[None, :] * np.uint64(block_bytes) + np.uint64(address)
    table = np.zeros((layers * blocks, 3), dtype=np.uint64)
    table[:, 0] = starts.ravel()
    table[:, 1] = block_bytes
    return table


class Starter:
    """See `engines.Starter`. It spins on `check_xfer_state`; with `poll_s` it looks at intervals."""

    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        self._setup, self._memory = setup, memory
        self._pids = (os.getpid(), other)
        work = setup.work
        self._agent = _agent(setup, memory)
        self._local = self._prepare("NIXL_INIT_AGENT", memory.address)
        self._remote: Any = None
        read = work.direction == "read"
        self._op = "READ" if read else "WRITE"
        layers = np.arange(work.layers, dtype=np.int32)[:, None] * np.int32(work.pool_blocks)
        both = [tuple((layers + ids.astype(np.int32)[None, :]).ravel() for ids in pair) for pair in work.ids()]
        self._numbers = [(w, r) if read else (r, w) for w, r in both]

    def _prepare(self, agent: str, address: int) -> Any:
        work = self._setup.work
        table = block_table(address, self._memory.layer_bytes, work.layers, work.pool_blocks, work.block_bytes)
        return self._agent.prep_xfer_dlist(agent, self._agent.get_xfer_descs(table, _MEMORY[self._memory.kind]))

    def meet(self, hello: Any) -> None:
        metadata, address = hello
        self._remote = self._prepare(self._agent.add_remote_agent(metadata), address)

    def warm(self) -> None:
        ours, theirs = self._numbers[0]
        handle = self._agent.make_prepped_xfer(self._op, self._local, ours[:1], self._remote, theirs[:1])
        state = self._agent.transfer(handle)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("a NIXL transfer failed")
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)

    def run(self, prepared: Any) -> Took:
        agent, op, local, remote, poll_s = self._agent, self._op, self._local, self._remote, self._setup.poll_s
        caller = CallerClock()
        watch = Stopwatch(self._pids)

        def post() -> list[Any]:
            handles = []
            for ours, theirs in self._numbers:
                handle = agent.make_prepped_xfer(op, local, ours, remote, theirs, b"done")
                if agent.transfer(handle) == "ERR":
                    raise RuntimeError("NIXL refused the transfer")
                handles.append(handle)
            return handles

        def states() -> list[tuple[Any, str]]:
            return [(handle, agent.check_xfer_state(handle)) for handle in left]

        handles = caller.call(post)
        left = list(handles)
        while left:
            if poll_s:
                time.sleep(poll_s)
            found = caller.call(states)
            now = time.monotonic()
            if any(state == "ERR" for _, state in found):
                raise RuntimeError("a NIXL transfer failed")
            left = [handle for handle, state in found if state != "DONE"]
            if now - watch.start > LIMIT_S:
                raise TimeoutError(f"{len(left)} NIXL transfers have not ended within {LIMIT_S:.0f} s")
        took = watch.took(caller)
        for handle in handles:
            agent.release_xfer_handle(handle)
        return took

    def close(self) -> None:
        self._local.release()
        if self._remote is not None:
            self._remote.release()


class Other:
    """See `engines.Other`."""

    def __init__(self, setup: Setup, memory: Memory) -> None:
        self._agent = _agent(setup, memory)
        self._address = memory.address
        self.expected = setup.work.requests
        self._poll_s = TARGET_POLL_FINE_S if setup.poll_s else TARGET_POLL_S

    def hello(self) -> Any:
        return self._agent.get_agent_metadata(), self._address

    def expect(self) -> Any:
        return None

    def known(self, timeout: float) -> float | None:
        seen, deadline = 0, time.monotonic() + timeout
        while time.monotonic() < deadline:
            seen += sum(map(len, self._agent.get_new_notifs().values()))
            now = time.monotonic()
            if seen >= self.expected:
                return now
            time.sleep(self._poll_s)
        raise TimeoutError(f"{seen} of {self.expected} notifications came within {timeout:.0f} s")

    def close(self) -> None:
        """The process's end gives everything back."""


starter, other = Starter, Other
