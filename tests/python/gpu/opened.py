"""Reads two regions of another process fifty times, and counts how often the driver is asked to open and close them.

For the double: `KVFERRY_CUDA_DOUBLE_CALLS` names the file of its calls. The argument is the kind of memory.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import cuda
import kvferry
from expect import GENEROUS, same
from kvferry import Segment
from peer import Peer, allocate, register

NBYTES = 3 << 20
BLOCK = 8192
READS = 50
OPENS = {"cuda": ("cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"), "pieces": ("cuMemMap", "cuMemUnmap")}
"""What maps a region, or a piece of one, and what undoes that."""


def calls(process: int | None) -> Counter[str]:
    """Of a process or of all, by function."""
    lines = Path(os.environ["KVFERRY_CUDA_DOUBLE_CALLS"]).read_text().splitlines()
    return Counter(line.split()[1] for line in lines if process in (None, int(line.split()[0])))


def main() -> None:
    """The reader; its own memory is one allocation."""
    kind = sys.argv[1]
    opening, closing = OPENS[kind]
    here = [allocate("cuda", NBYTES, cuda.Driver()) for _ in range(2)]
    peer = Peer("auto", kind, [NBYTES, NBYTES], 1)
    # Each region lies across the end of a piece, in two.
    handles = 2 if kind == "cuda" else 4
    ids = list(range(NBYTES // BLOCK))
    with kvferry.Agent({"name": "check", "transport": "auto"}) as agent:
        for memory in here:
            register(agent, memory, "cuda")
        connected = agent.connect(peer.metadata)
        for turn in range(READS):
            blocks = [(ids, ids[turn:] + ids[:turn])]
            segments = [Segment(0, i, i, 0, 0, BLOCK, BLOCK, BLOCK) for i in range(2)]
            agent.read(connected, segments, blocks).wait(GENEROUS)
            for index, memory in enumerate(here):
                expected = cuda.pattern(1 + index, NBYTES).reshape(-1, BLOCK)[blocks[0][1]].reshape(-1)
                same(f"read {turn}", [memory.get()], [expected])
        assert agent.stats()["device_copied_bytes"] == READS * 2 * NBYTES, agent.stats()
        made = calls(os.getpid())
        assert (made[opening], made[closing]) == (handles, 0), made
    made = calls(os.getpid())
    assert (made[opening], made[closing]) == (handles, handles), made
    # What was taken to map pieces is given back too.
    assert made["cuMemImportFromShareableHandle"] == made["cuMemRelease"], made
    assert made["cuMemAddressReserve"] == made["cuMemAddressFree"], made
    peer.end()
    if kind == "cuda":
        everywhere = calls(None)
        assert everywhere[opening] == everywhere[closing] == handles, everywhere
    print(f"{kind}: {handles} opened and closed", flush=True)


if __name__ == "__main__":
    main()
