"""A device that does not end a copy keeps the agent from nothing else. For the double, on which copies begin an hour
late."""

from __future__ import annotations

import os

import cuda
import kvferry
from expect import GENEROUS

NBYTES = 1 << 16


def main() -> None:
    """Begins to write device memory by messages and then reads host memory."""
    here, there = (kvferry.Agent({"name": name, "transport": "tcp"}) for name in ("here", "there"))
    device = cuda.DeviceMemory(cuda.Driver(), NBYTES)
    near, far = cuda.HostMemory(NBYTES), cuda.HostMemory(2 * NBYTES)
    far.put(cuda.pattern(1, 2 * NBYTES))
    here.register((device.address, NBYTES), kind="cuda", device=0)
    here.register((near.address, NBYTES), kind="host")
    there.register((far.address, 2 * NBYTES), kind="host")
    peer = here.connect(there.metadata())
    write = here.write(peer, [kvferry.Segment(0, 0, 0, 0, 0, 0, 0, NBYTES)], [([0], [0])])
    here.read(peer, [kvferry.Segment(0, 1, 0, 0, NBYTES, 0, 0, NBYTES)], [([0], [0])]).wait(GENEROUS)
    assert (near.get() == cuda.pattern(1, 2 * NBYTES)[NBYTES:]).all()
    # The device may still read for it.
    write.cancel()
    try:
        write.wait(1.0)
    except TimeoutError:
        print("the read is over, the write is not", flush=True)
    os._exit(0)


main()
