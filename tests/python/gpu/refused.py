"""The driver does not say how a copy gets on, as while another thread records a CUDA graph. For the double, on which
copies are late and the first such questions are refused."""

from __future__ import annotations

import sys

import cuda
import kvferry
from expect import GENEROUS

NBYTES = 1 << 20


def main(transport: str) -> None:
    """Reads, and gives the memory back as soon as that is over; then shuts down, of which one is not let wait."""
    driver = cuda.Driver()
    here, there = (kvferry.Agent({"name": name, "transport": transport}) for name in ("here", "there"))
    ours, theirs = (cuda.DeviceMemory(driver, NBYTES) for _ in range(2))
    theirs.put(cuda.pattern(1, NBYTES))
    region = here.register((ours.address, NBYTES), kind="cuda", device=0)
    there.register((theirs.address, NBYTES), kind="cuda", device=0)
    peer = here.connect(there.metadata())
    blocks = list(range(NBYTES // 1024))
    here.read(peer, [kvferry.Segment(0, 0, 0, 0, 0, 1024, 1024, 1024)], [(blocks, blocks)]).wait(GENEROUS)
    assert (ours.get() == cuda.pattern(1, NBYTES)).all()
    here.deregister(region)
    # The double ends a program that frees what is still copied.
    ours.free()
    print("every byte", flush=True)
    for agent in (here, there):
        try:
            agent.shutdown()
        except kvferry.TimedOutError as error:
            print(error, flush=True)


main(sys.argv[1])
