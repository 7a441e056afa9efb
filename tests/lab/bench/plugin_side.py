"""One agent of stock NIXL with one backend, and the process that is read from."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BACKENDS = ("KVFERRY", "UCX")
LIMIT = 60.0
"""Seconds that a transfer may take, or a notification be waited for."""
LAST = b"last"
"""The notification after which there are no more."""
ROOT = Path(__file__).resolve().parents[3]


def pattern(size: int) -> NDArray[np.uint8]:
    """Bytes that differ by place."""
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    cut: NDArray[np.uint8] = words.view(np.uint8)
    return cut


class Side:
    """An agent with `size` bytes of registered memory. Without NIXL's progress thread, UCX needs polls to move on."""

    def __init__(self, name: str, backend: str, version: str, size: int, threads: bool) -> None:
        # NIXL's own messages would stand in the table.
        os.dup2(2, 1)
        if backend == "KVFERRY":
            # Alone: NIXL's own plug-ins are found where they lie.
            os.environ["NIXL_PLUGIN_DIR"] = str(Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "nixl")
        sys.path.insert(0, str(ROOT / ".deps" / "nixl" / version))
        # Older versions import PyTorch, and need it for tensors only.
        sys.path.append(str(ROOT / "tests" / "python" / "nixl" / "stubs"))
        api: Any = importlib.import_module("nixl_cu12._api")
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=threads, backends=[backend]))
        self.memory: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.agent.register_memory([(self.address, size, 0, "")], "DRAM")

    def prepare(self, remote: int, block: int, ours: list[int], theirs: list[int]) -> Any:
        """A read of blocks by their numbers."""
        count = len(ours)
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._blocks(self.address, block, count), "DRAM")
        other = self.agent.prep_xfer_dlist("owner", self._blocks(remote, block, count), "DRAM")
        return self.agent.make_prepped_xfer("READ", local, ours, other, theirs)

    @staticmethod
    def _blocks(base: int, block: int, count: int) -> list[tuple[int, int, int]]:
        return [(base + number * block, block, 0) for number in range(count)]

    def hello(self) -> tuple[bytes, int]:
        """What the other side needs to know this one and its memory."""
        return bytes(self.agent.get_agent_metadata()), self.address

    def meet(self, metadata: bytes) -> None:
        """Makes the other side known."""
        self.agent.add_remote_agent(metadata)

    def close(self) -> None:
        """What a backend does on its way out is not asked."""
        os._exit(0)


class Owner(Side):
    """The side that is read from."""

    def __init__(self, backend: str, version: str, size: int, threads: bool = True) -> None:
        super().__init__("owner", backend, version, size, threads)
        self.memory[:] = pattern(size)

    def echo(self) -> None:
        """Sends every notification back, until `LAST` comes. It also polls for agents without a progress thread."""
        while True:
            end = time.monotonic() + LIMIT
            while not self.agent.update_notifs():
                if time.monotonic() > end:
                    raise TimeoutError(f"no notification within {LIMIT:.0f} s")
            messages = [bytes(message) for message in self.agent.notifs["reader"]]
            self.agent.notifs.clear()
            if LAST in messages:
                return
            self.agent.send_notif("reader", messages[0])
