"""A process with an agent of stock NIXL, which does what a test tells it over a pipe.

Run as a program with the descriptor of a `multiprocessing` connection and the package (nixl_cu12 or nixl_cu13).
"""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

GENEROUS = 60.0
"""Seconds that anything may take on a busy machine."""
Range = tuple[str, int, int]
"""A buffer's name, an offset in it and a length."""


def pattern(seed: int, size: int) -> NDArray[np.uint8]:
    """Bytes that differ by seed and by place."""
    words = np.arange((size + 7) // 8, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    return words.view(np.uint8)[:size]


def digest(content: NDArray[np.uint8]) -> bytes:
    """Of every byte, where the bytes themselves are too many to be sent over a pipe."""
    return hashlib.blake2b(content).digest()


def pause(since: float) -> None:
    """Between two looks, which follow each other at first as an engine's do. One that waits for a peer to be stopped or
    lost leaves the processor to it."""
    if time.monotonic() - since > 0.02:
        time.sleep(0.001)


def tried(call: Callable[[], object]) -> str:
    """What a call returns, or its error, as text."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Host:
    """What tests may ask for: each method is one command."""

    def __init__(self, package: str) -> None:
        self.api: Any = importlib.import_module(f"{package}._api")
        self.buffers: dict[str, NDArray[np.uint8]] = {}
        self.registered: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}
        self.notifications: list[tuple[str, bytes]] = []
        self.agent: Any = None
        self.thread = ThreadPoolExecutor(1)
        self.begun: Future[Any]

    def start(self, name: str, backends: list[str], params: dict[str, str] | None = None) -> list[str]:
        # As vLLM does.
        config = self.api.nixl_agent_config(backends=[] if params is not None else backends, capture_telemetry=True)
        self.agent = self.api.nixl_agent(name, config)
        if params is not None:
            for backend in backends:
                self.agent.create_backend(backend, params)
        return list(self.agent.backends)

    def end(self) -> float:
        """Ends the agent. How many seconds that took."""
        since = time.monotonic()
        self.handles.clear()
        self.registered.clear()
        self.agent = None
        return time.monotonic() - since

    def send_and_end(self, metadata: bytes, name: str, message: bytes) -> None:
        """Adds a remote agent, sends it a message, and ends the agent, without a pause."""
        self.agent.add_remote_agent(metadata)
        self.agent.send_notif(name, message)
        self.end()

    def begin(self, command: str, *arguments: object) -> None:
        """Has another thread do what `command` says; `finish` returns what comes of it."""
        self.begun = self.thread.submit(getattr(self, command), *arguments)

    def finish(self) -> Any:
        return self.begun.result(GENEROUS)

    def sockets(self) -> int:
        """Sockets that this process has open."""
        kinds = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path))
        return sum(kind.startswith("socket:") for kind in kinds)

    def buffer(self, name: str, seed: int, size: int) -> int:
        self.buffers[name] = pattern(seed, size).copy()
        return int(self.buffers[name].ctypes.data)

    def fill(self, name: str, seed: int) -> None:
        self.buffers[name][:] = pattern(seed, self.buffers[name].size)

    def contents(self, name: str) -> NDArray[np.uint8]:
        return self.buffers[name]

    def digest(self, name: str) -> bytes:
        return digest(self.buffers[name])

    def _places(self, ranges: list[Range]) -> list[tuple[int, int, int]]:
        return [(int(self.buffers[name].ctypes.data) + offset, length, 0) for name, offset, length in ranges]

    def register(self, key: str, ranges: list[Range]) -> None:
        places = [(*place, "") for place in self._places(ranges)]
        self.registered[key] = self.agent.register_memory(places, "DRAM")

    def register_device(self, key: str, device: int) -> None:
        """Registers memory of the host as if it were of a device."""
        places = [(int(self.buffers[key].ctypes.data), self.buffers[key].size, device, "")]
        self.registered[key] = self.agent.register_memory(places, "VRAM")

    def deregister(self, key: str) -> None:
        self.agent.deregister_memory(self.registered.pop(key))

    def metadata(self) -> bytes:
        return bytes(self.agent.get_agent_metadata())

    def partial(self, key: str, connection: bool) -> bytes:
        return bytes(self.agent.get_partial_agent_metadata(self.registered[key], connection, ["KVFERRY"]))

    def add(self, metadata: bytes) -> str:
        name = self.agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        self.agent.remove_remote_agent(name)

    def make(
        self,
        key: str,
        operation: str,
        local: list[Range],
        remote: list[tuple[int, int, int]],
        name: str,
        message: bytes = b"",
        backends: Sequence[str] = (),
    ) -> None:
        ours = self.agent.get_xfer_descs(self._places(local), "DRAM")
        theirs = self.agent.get_xfer_descs(remote, "DRAM")
        self.handles[key] = self.agent.initialize_xfer(operation, ours, theirs, name, message, list(backends))

    def make_prepped(
        self, key: str, operation: str, local: list[Range], remote: list[tuple[int, int, int]], name: str, indices: Any
    ) -> None:
        ours = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._places(local), "DRAM")
        theirs = self.agent.prep_xfer_dlist(name, remote, "DRAM")
        self.handles[key] = self.agent.make_prepped_xfer(operation, ours, indices[0], theirs, indices[1])

    def post(self, key: str, message: bytes = b"") -> str:
        return str(self.agent.transfer(self.handles[key], message))

    def wait(self, key: str) -> str:
        since = time.monotonic()
        while (state := self.agent.check_xfer_state(self.handles[key])) == "PROC":
            assert time.monotonic() < since + GENEROUS, "the transfer did not end"
            pause(since)
        return str(state)

    def run(self, key: str, message: bytes = b"") -> str:
        state = self.post(key, message)
        return self.wait(key) if state == "PROC" else state

    def release(self, key: str) -> None:
        self.agent.release_xfer_handle(self.handles[key])
        del self.handles[key]

    def forked(self, key: str) -> list[str]:
        """How a transfer stands and what notifications there are in a process that is forked off: results or errors."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            try:
                state = tried(lambda: self.agent.check_xfer_state(self.handles[key]))
                theirs.send([state, tried(self.agent.get_new_notifs)])
            finally:
                os._exit(0)
        try:
            assert ours.poll(GENEROUS), "no answer"
            return list(ours.recv())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def telemetry(self, key: str) -> tuple[int, int]:
        """NIXL's own figures of a transfer that is over: its bytes and its descriptors."""
        found = self.agent.get_xfer_telemetry(self.handles[key])
        return int(found.totalBytes), int(found.descCount)

    def notify(self, name: str, message: bytes) -> None:
        self.agent.send_notif(name, message)

    def notify_many(self, name: str, message: bytes, count: int) -> int:
        """How many were refused."""
        refused = 0
        for _ in range(count):
            try:
                self.agent.send_notif(name, message)
            except Exception:
                refused += 1
        return refused

    def look(self) -> None:
        """Takes the notifications that there are."""
        for name, messages in self.agent.get_new_notifs().items():
            self.notifications += [(name, bytes(message)) for message in messages]

    def notified(self, count: int) -> list[tuple[str, bytes]]:
        since = time.monotonic()
        while len(self.notifications) < count:
            assert time.monotonic() < since + GENEROUS, f"only {self.notifications}"
            pause(since)
            self.look()
        taken, self.notifications = self.notifications[:count], self.notifications[count:]
        return taken


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    host = Host(sys.argv[2])
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(host, command)(*arguments))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pipe.send(answer)


if __name__ == "__main__":
    main()
