"""Mooncake's transfer engine over TCP, from a package of its own (`mooncake-transfer-engine-non-cuda` and others).

Memory is registered per layer. The blocks of all requests go into one call of `batch_transfer_sync_read` or `_write`,
with lists of addresses made beforehand; into several, one after the other, where they are more than a call takes. The
call returns at the end. vLLM makes it in threads of its own, so what it takes from the caller's is not measured. The
other side is not told of the end.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from kvferry.bench.engines.engine import Setup, Stopwatch, Took
from kvferry.bench.memory import Memory

BLOCKS_PER_CALL = 65_535
"""The most that the engine queues for a peer. Further blocks of a call fail."""
MOONCAKE_LANES = (4, 16)
"""How many kept connections to a peer are tried: the engine's default, and more."""
_ENVIRONMENT = {
    # Without it each block makes a connection of its own.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(BLOCKS_PER_CALL),
    "MC_LOG_LEVEL": "ERROR",
}


def missing() -> str | None:
    """Why the package cannot be used, with the remedy; None when it can."""
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return (
            f"Mooncake's transfer engine is not here ({error}): run `scripts/setup mooncake`, add .deps/mooncake to "
            "PYTHONPATH, and install libibverbs.so.1 (Debian's package libibverbs1)"
        )
    return None


def _engine(setup: Setup, memory: Memory) -> Any:
    os.environ.update(_ENVIRONMENT, MC_TCP_LANES_PER_PEER=str(setup.options["lanes"]))
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    # Until it has read MC_LOG_LEVEL it logs to stderr, also that it finds no RDMA device.
    stderr = os.dup(2)
    with open(os.memfd_create("log"), "w+b") as log:
        os.dup2(log.fileno(), 2)
        try:
            code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        if code != 0:
            log.seek(0)
            raise RuntimeError(f"Mooncake's engine does not start ({code}):\n{log.read().decode(errors='replace')}")
    for layer in range(setup.work.layers):
        if engine.register_memory(*memory.layer(layer)) != 0:
            raise RuntimeError("Mooncake refused to register memory")
    return engine


class Starter:
    """See `engines.Starter`."""

    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        self._setup, self._memory = setup, memory
        self._pids = (os.getpid(), other)
        self._engine = _engine(setup, memory)
        reads = setup.work.direction == "read"
        self._move = self._engine.batch_transfer_sync_read if reads else self._engine.batch_transfer_sync_write
        self._target = ""
        self._calls: list[tuple[list[int], list[int], list[int]]] = []

    def meet(self, hello: Any) -> None:
        self._target, address = hello
        work, memory = self._setup.work, self._memory
        layers = np.arange(work.layers, dtype=np.uint64)[:, None] * np.uint64(memory.layer_bytes)
        written, read = (np.concatenate(ids).astype(np.uint64) for ids in zip(*work.ids(), strict=True))
        ours, theirs = (written, read) if work.direction == "read" else (read, written)
        local, remote = (
            (layers + ids[None, :] * np.uint64(work.block_bytes) + np.uint64(base)).ravel().tolist()
            for ids, base in ((ours, memory.address), (theirs, address))
        )
        for first in range(0, len(local), BLOCKS_PER_CALL):
            some = slice(first, first + BLOCKS_PER_CALL)
            self._calls.append((local[some], remote[some], [work.block_bytes] * len(local[some])))

    def _call(self, local: list[int], remote: list[int], sizes: list[int]) -> None:
        code = self._move(self._target, local, remote, sizes)
        if code != 0:
            raise RuntimeError(f"a Mooncake transfer of {len(sizes)} blocks failed ({code})")

    def warm(self) -> None:
        local, remote, sizes = self._calls[0]
        self._call(local[:1], remote[:1], sizes[:1])

    def run(self, prepared: Any) -> Took:
        watch = Stopwatch(self._pids)
        for call in self._calls:
            self._call(*call)
        return watch.took(None)

    def close(self) -> None:
        """The process's end gives everything back."""


class Other:
    """See `engines.Other`."""

    def __init__(self, setup: Setup, memory: Memory) -> None:
        self._engine = _engine(setup, memory)
        self._address = memory.address

    def hello(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._address

    def expect(self) -> Any:
        return None

    def known(self, timeout: float) -> float | None:
        return None

    def close(self) -> None:
        """The process's end gives everything back."""


starter, other = Starter, Other
