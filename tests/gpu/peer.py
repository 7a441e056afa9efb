"""The other process: an agent whose memory is read and written, and shown when the parent asks."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cuda
import kvferry
import numpy as np
from expect import GENEROUS, until

PR_SET_PDEATHSIG = 1
HANDLES = {"pieces": cuda.DESCRIPTORS, "fabric pieces": cuda.FABRIC, "sealed pieces": cuda.NO_HANDLES}


def allocate(kind: str, nbytes: int, driver: cuda.Driver | None, device: int = 0) -> cuda.Memory:
    """Memory of `kind`: "host", or of a device: "cuda"; "pooled", of the device's pool; "torch", a tensor's; several
    allocations, which other processes can map by descriptors ("pieces"), by fabric handles ("fabric pieces"), or cannot
    ("sealed pieces")."""
    if kind == "torch":
        return cuda.TorchMemory(nbytes)
    if kind == "host":
        return cuda.HostMemory(nbytes)
    assert driver is not None
    if kind == "cuda":
        return cuda.DeviceMemory(driver, nbytes, device)
    if kind == "pooled":
        return cuda.PooledMemory(driver, nbytes, device)
    return cuda.PiecewiseMemory(driver, nbytes, HANDLES[kind], device=device)


def register(agent: kvferry.Agent, memory: cuda.Memory, kind: str, device: int = 0) -> kvferry.Region:
    """Registers memory by its address."""
    if kind == "host":
        return agent.register((memory.address, memory.nbytes), kind="host")
    return agent.register((memory.address, memory.nbytes), kind="cuda", device=device)


class Registered(NamedTuple):
    """A region that the other process has registered again."""

    number: int
    """Its index."""
    metadata: bytes
    """The agent's, for a new connection."""
    region: bytes
    """For `Agent.add_region`."""


class Peer:
    """The parent's end of the pipe."""

    def __init__(
        self,
        transport: str,
        kind: str,
        sizes: list[int],
        seed: int,
        visible: str | None = None,
        devices: Sequence[int] | None = None,
        settings: Mapping[str, int] | None = None,
    ) -> None:
        """`visible` names the devices that the process sees, as CUDA_VISIBLE_DEVICES does.

        `devices` are those of the regions, as that process counts them; `settings` are further ones of its agent."""
        variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        arguments = json.dumps([transport, kind, sizes, seed, list(devices or [0] * len(sizes)), settings or {}])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # UCX would else write its messages into the middle of answers.
            env={**os.environ, "UCX_LOG_FILE": "stderr", **variables},
            text=True,
        )
        self.metadata = base64.b64decode(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER"):
                return line[7:].strip()
        raise RuntimeError(f"the peer process ended with status {self._process.wait()}")

    def _ask(self, *command: object) -> str:
        self._tell(*command)
        return self._answer()

    def _tell(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, command)) + "\n")
        self._process.stdin.flush()

    def contents(self) -> list[cuda.Bytes]:
        """The bytes of all its regions."""
        return [np.frombuffer(base64.b64decode(text), dtype=np.uint8) for text in json.loads(self._ask("dump"))]

    def fill(self, index: int, seed: int) -> None:
        """Has it fill a region with another pattern."""
        self._ask("fill", index, seed)

    def deregister(self, index: int) -> None:
        """Has it deregister a region."""
        self._ask("deregister", index)

    def free(self, index: int) -> int:
        """Has it free the memory of a region that it has deregistered; what its device has free then."""
        return int(self._ask("free", index))

    def unmap(self, index: int) -> tuple[int, int]:
        """Has it unmap the pieces of a region that it has deregistered, and keep their addresses.

        How many bytes it gave back, and what its device has free then."""
        given, free = json.loads(self._ask("unmap", index))
        return given, free

    def remap(self, index: int, seed: int) -> Registered:
        """Has it map new memory at the same addresses, fill it with a pattern and register it."""
        number, metadata, region = json.loads(self._ask("remap", index, seed))
        return Registered(number, base64.b64decode(metadata), base64.b64decode(region))

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        """It stands still meanwhile."""
        return frozen(self._process.pid)

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Lets it shut down and checks that it ends well."""
        self._tell("end")
        status = self._process.wait(GENEROUS)
        if status != 0:
            raise RuntimeError(f"the peer process ended with status {status}")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Nothing of a child process runs meanwhile, and it is not gone. It may be killed meanwhile."""
    process = os.pidfd_open(pid)
    signal.pidfd_send_signal(process, signal.SIGSTOP)
    try:
        tasks = Path(f"/proc/{pid}/task")
        until("the process has not stopped", lambda: all(map(_is_stopped, tasks.iterdir())))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGCONT)
        os.close(process)


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends: a process that stands still would not notice."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_stopped(task: Path) -> bool:
    try:
        stat = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # The thread has ended.
        return True
    # The state follows the name, which is in parentheses.
    return stat.rpartition(")")[2].split()[0] == "T"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class _Memories:
    """The child's memory; does what it is told."""

    def __init__(self, kind: str, sizes: list[int], seed: int, devices: list[int]) -> None:
        self._kind, self._devices = kind, devices
        self._driver = cuda.Driver() if kind != "host" else None
        self._memories = [allocate(kind, n, self._driver, d) for n, d in zip(sizes, devices, strict=True)]
        for index in range(len(sizes)):
            self.fill(index, seed + index)

    def register(self, agent: kvferry.Agent) -> None:
        self._agent = agent
        self._regions = [register(agent, m, self._kind, d) for m, d in zip(self._memories, self._devices, strict=True)]

    def _free_bytes(self) -> int:
        assert self._driver is not None
        return self._driver.free_bytes()

    def dump(self) -> str:
        return json.dumps([_text(memory.get().tobytes()) for memory in self._memories])

    def fill(self, index: int, seed: int) -> str:
        memory = self._memories[index]
        memory.put(cuda.pattern(seed, memory.nbytes))
        return ""

    def deregister(self, index: int) -> str:
        self._agent.deregister(self._regions[index])
        return ""

    def free(self, index: int) -> str:
        memory = self._memories[index]
        assert isinstance(memory, cuda.DeviceMemory)
        memory.free()
        return str(self._free_bytes())

    def unmap(self, index: int) -> str:
        memory = self._memories[index]
        assert isinstance(memory, cuda.PiecewiseMemory)
        given = memory.mapped_bytes
        memory.unmap()
        return json.dumps([given, self._free_bytes()])

    def remap(self, index: int, seed: int) -> str:
        memory = self._memories[index]
        assert isinstance(memory, cuda.PiecewiseMemory)
        memory.remap()
        self.fill(index, seed)
        region = register(self._agent, memory, self._kind, self._devices[index])
        self._regions[index] = region
        metadata = self._agent.metadata(), self._agent.region_metadata(region)
        return json.dumps([region.index, *map(_text, metadata)])


def main() -> None:
    """The child's life."""
    die_with_parent()
    transport, kind, sizes, seed, devices, settings = json.loads(sys.argv[1])
    memories = _Memories(kind, sizes, seed, devices)
    with kvferry.Agent({"name": "peer", "transport": transport, **settings}) as agent:
        memories.register(agent)
        print("ANSWER " + _text(agent.metadata()), flush=True)
        for line in sys.stdin:
            command, *numbers = line.split()
            if command == "end":
                break
            print("ANSWER " + getattr(memories, command)(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    main()
