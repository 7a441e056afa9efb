"""One agent of stock NIXL with one backend."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BACKENDS = ("KVFERRY", "UCX")
ROOT = Path(__file__).resolve().parents[2]


def pattern(size: int) -> NDArray[np.uint8]:
    """Bytes that differ by place."""
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    cut: NDArray[np.uint8] = words.view(np.uint8)
    return cut


class Side:
    """An agent with `size` bytes of registered memory. Without NIXL's progress thread, UCX needs polls to move on."""

    def __init__(self, name: str, backend: str, version: str, size: int, threads: bool) -> None:
        if backend == "KVFERRY":
            # Alone: NIXL's own plug-ins are found where they lie.
            os.environ["NIXL_PLUGIN_DIR"] = str(Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "nixl")
        sys.path.insert(0, str(ROOT / ".deps" / "nixl" / version))
        # Older versions import PyTorch, and need it for tensors only.
        sys.path.append(str(ROOT / "tests" / "python" / "nixl" / "stubs"))
        api: Any = importlib.import_module("nixl_cu12._api")
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=threads, backends=[backend]))
        self.backend = backend
        self.memory: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.agent.register_memory([(self.address, size, 0, "")], "DRAM")

    def metadata(self) -> bytes:
        """What the other side loads."""
        return bytes(self.agent.get_agent_metadata())

    def prepare(self, remote: int, block: int, ours: list[int], theirs: list[int]) -> Any:
        """A read of blocks by their numbers."""
        count = len(ours)
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._blocks(self.address, block, count), "DRAM")
        other = self.agent.prep_xfer_dlist("owner", self._blocks(remote, block, count), "DRAM")
        return self.agent.make_prepped_xfer("READ", local, ours, other, theirs)

    @staticmethod
    def _blocks(base: int, block: int, count: int) -> list[tuple[int, int, int]]:
        return [(base + number * block, block, 0) for number in range(count)]


def spawn(role: str, *arguments: str, session: bool = False) -> tuple[Connection, subprocess.Popen[bytes]]:
    """A process of this program, in a session of its own if `session`, and a pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", "bench_nixl", role, str(descriptor), *arguments]
    # An engine's file of metrics is not for the agents of a measurement.
    variables = {**os.environ, "KVFERRY_METRICS_FILE": ""}
    child = subprocess.Popen(
        command, env=variables, pass_fds=[descriptor], stdout=sys.stderr, start_new_session=session
    )
    theirs.close()
    return ours, child
