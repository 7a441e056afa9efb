"""What it costs to register memory with RDMA devices: prints the times by size, and of one region or many.

Run by `scripts/rdma-test`. The times are an emulated machine's; how they grow is what counts.
"""

from __future__ import annotations

import time

import numpy as np
from kvferry import Agent
from numpy.typing import NDArray

MIB = 1 << 20
ROUNDS = 5


def cost(agent: Agent, parts: list[NDArray[np.uint8]]) -> tuple[float, float, int]:
    """The shortest times to register and to deregister all parts, in seconds; bytes of metadata for all of them."""
    registering, deregistering, told = [], [], 0
    for _ in range(ROUNDS):
        begin = time.monotonic()
        regions = [agent.register(part) for part in parts]
        registering.append(time.monotonic() - begin)
        told = len(agent.metadata())
        begin = time.monotonic()
        for region in regions:
            agent.deregister(region)
        deregistering.append(time.monotonic() - begin)
    return min(registering), min(deregistering), told


def main() -> None:
    memory = np.ones(1024 * MIB, np.uint8)
    with Agent({"name": "registers", "ucx": {"TLS": "rc,self"}}) as agent:
        for mib in (16, 64, 256, 1024):
            there, back, _ = cost(agent, [memory[: mib * MIB]])
            per_gib = there * 1024 / mib * 1e3
            print(f"{mib:5} MiB, 1 region: {there * 1e3:.1f} ms ({per_gib:.0f} ms/GiB), back {back * 1e3:.1f} ms")
        for count in (1, 64, 256):
            parts = list(np.split(memory, count))
            there, back, told = cost(agent, parts)
            print(
                f" 1024 MiB, {count} regions: {there * 1e3:.1f} ms, back {back * 1e3:.1f} ms, {told} bytes of metadata"
            )


if __name__ == "__main__":
    main()
