"""The other process: an agent whose memory is read and written, and shown when the parent asks."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import cuda
import kvferry
import numpy as np


def allocate(kind: str, nbytes: int, driver: cuda.Driver | None) -> cuda.Memory:
    """Memory of `kind`: "host", or of device 0: "cuda"; "torch", a tensor's; several allocations, which other processes
    can map ("pieces") or cannot ("sealed pieces")."""
    if kind == "torch":
        return cuda.TorchMemory(nbytes)
    if kind != "host":
        assert driver is not None
        if kind == "cuda":
            return cuda.DeviceMemory(driver, nbytes)
        return cuda.PiecewiseMemory(driver, nbytes, kind == "pieces")
    return cuda.HostMemory(nbytes)


def register(agent: kvferry.Agent, memory: cuda.Memory, kind: str) -> kvferry.Region:
    """Registers memory by its address."""
    if kind == "host":
        return agent.register((memory.address, memory.nbytes), kind="host")
    return agent.register((memory.address, memory.nbytes), kind="cuda", device=0)


class Peer:
    """The parent's end of the pipe."""

    def __init__(self, transport: str, kind: str, sizes: list[int], seed: int, device: int | None = None) -> None:
        """With `device`, that is the only one that the process sees, as its device 0."""
        visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
        arguments = json.dumps([transport, kind, sizes, seed])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # UCX would else write its messages into the middle of answers.
            env={**os.environ, "UCX_LOG_FILE": "stderr", **visible},
            text=True,
        )
        self.metadata = base64.b64decode(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER"):
                return line[7:].strip()
        raise RuntimeError(f"the peer process ended with status {self._process.wait()}")

    def contents(self) -> list[cuda.Bytes]:
        """The bytes of all its regions."""
        self._ask("dump")
        return [np.frombuffer(base64.b64decode(text), dtype=np.uint8) for text in json.loads(self._answer())]

    def deregister(self, index: int) -> None:
        """Has it deregister a region."""
        self._ask(f"deregister {index}")
        self._answer()

    def free(self, index: int) -> int:
        """Has it free the memory of a region that it has deregistered; what its device has free then."""
        self._ask(f"free {index}")
        return int(self._answer())

    def _ask(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Lets it shut down and checks that it ends well."""
        self._ask("end")
        status = self._process.wait(60)
        if status != 0:
            raise RuntimeError(f"the peer process ended with status {status}")


def main() -> None:
    """The child's life."""
    transport, kind, sizes, seed = json.loads(sys.argv[1])
    driver = cuda.Driver() if kind != "host" else None
    memories = [allocate(kind, nbytes, driver) for nbytes in sizes]
    regions = []
    with kvferry.Agent({"name": "peer", "transport": transport}) as agent:
        for index, memory in enumerate(memories):
            memory.put(cuda.pattern(seed + index, memory.nbytes))
            regions.append(register(agent, memory, kind))
        print("ANSWER " + base64.b64encode(agent.metadata()).decode(), flush=True)
        for line in sys.stdin:
            if line.strip() == "end":
                break
            if line.startswith("deregister"):
                agent.deregister(regions[int(line.split()[1])])
                print("ANSWER", flush=True)
                continue
            if line.startswith("free"):
                memory = memories[int(line.split()[1])]
                assert driver is not None
                assert isinstance(memory, cuda.DeviceMemory)
                memory.free()
                print(f"ANSWER {driver.free_bytes()}", flush=True)
                continue
            dumps = [base64.b64encode(memory.get().tobytes()).decode() for memory in memories]
            print("ANSWER " + json.dumps(dumps), flush=True)


if __name__ == "__main__":
    main()
