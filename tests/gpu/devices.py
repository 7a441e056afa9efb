"""Several devices of a host: a process that uses two, one that counts them otherwise, one that does not see the peer's.

As a program, the process that does not see it: prints the way that the bytes have gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cuda
import kvferry
from expect import GENEROUS, model, same, ways_of
from kvferry import Segment
from peer import Peer, allocate, register

NBYTES = 4 << 20
BLOCK = 16384
PAIRS = {"read": ((0, 0), (1, 1)), "write": ((0, 1), (1, 0))}
"""Of a region here and one there: all four pairs of the devices that they are on."""
WAY = "WAY "


def named(*devices: int) -> str:
    """Devices of this process as CUDA_VISIBLE_DEVICES has to name them for another one."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(str(device) if ours is None else ours.split(",")[device] for device in devices)


def move(driver: cuda.Driver, kind: str, here: list[int], visible: str, there: list[int]) -> str:
    """Reads and writes between two regions of this process and two of another one, which sees only the devices
    `visible`. `here` and `there` are the devices of the regions, as each process counts them."""
    memories = [allocate(kind, NBYTES, driver, device) for device in here]
    peer = Peer("auto", kind, [NBYTES, NBYTES], 1, visible, there)
    count = NBYTES // BLOCK
    forwards, backwards = list(range(count)), list(range(count))[::-1]
    with kvferry.Agent({"name": "check", "transport": "auto"}) as agent:
        for index, (memory, device) in enumerate(zip(memories, here, strict=True)):
            memory.put(cuda.pattern(50 + index, NBYTES))
            register(agent, memory, kind, device)
        connected = agent.connect(peer.metadata)
        for direction, pairs in PAIRS.items():
            segments = [Segment(0, ours, theirs, 0, 0, BLOCK, BLOCK, BLOCK) for ours, theirs in pairs]
            # What is written goes to other blocks than those that it came from.
            blocks = [(forwards, backwards if direction == "read" else forwards)]
            ours = [memory.get() for memory in memories]
            theirs = [data.copy() for data in peer.contents()]
            model(direction, segments, blocks, ours, theirs)
            start = agent.read if direction == "read" else agent.write
            start(connected, segments, blocks).wait(GENEROUS)
            same(f"{direction}, here", [memory.get() for memory in memories], ours)
            same(f"{direction}, there", peer.contents(), theirs)
        ways = ways_of(agent)
    peer.end()
    return ways


def hidden(kind: str) -> str:
    """As `move`, with device 0, by a process that does not see device 1, where the other process has its memory."""
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), kind, named(1)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": named(0)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=GENEROUS,
    )
    told = next((line for line in ran.stdout.splitlines() if line.startswith(WAY)), None)
    if ran.returncode != 0 or told is None:
        raise AssertionError(f"the process ended with status {ran.returncode}: {ran.stdout}")
    return told.removeprefix(WAY)


if __name__ == "__main__":
    print(WAY + move(cuda.Driver(), sys.argv[1], [0, 0], sys.argv[2], [0, 0]), flush=True)
