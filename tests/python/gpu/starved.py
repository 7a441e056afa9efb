"""The driver (a double) refuses pinned memory, at first or always. Argument: what comes of it, "moved" or "refused"."""

from __future__ import annotations

import sys

import cuda
import kvferry
from expect import GENEROUS, until

NBYTES = 1 << 20


def main(expected: str) -> None:
    """Reads device memory by messages until that ends well, or once."""
    device, host = cuda.DeviceMemory(cuda.Driver(), NBYTES), cuda.HostMemory(NBYTES)
    device.put(cuda.pattern(1, NBYTES))
    with (
        kvferry.Agent({"name": "here", "transport": "tcp"}) as here,
        kvferry.Agent({"name": "there", "transport": "tcp"}) as there,
    ):
        there.register((device.address, NBYTES), kind="cuda", device=0)
        here.register((host.address, NBYTES), kind="host")
        peer = here.connect(there.metadata())

        def read() -> str:
            segments = [kvferry.Segment(0, 0, 0, 0, 0, 4096, 4096, 4096)]
            blocks = list(range(NBYTES // 4096))
            try:
                here.read(peer, segments, [(blocks, blocks)]).wait(GENEROUS)
            except kvferry.KvferryError as error:
                return str(error)
            return "moved"

        if expected == "moved":
            until("the driver gives the memory now, and it is not asked", lambda: read() == "moved")
            assert (host.get() == cuda.pattern(1, NBYTES)).all()
        for _ in range(2) if expected == "refused" else ():
            why = read()
            if "cuMemHostAlloc" not in why:
                sys.exit(f"the read was to be refused: {why}")
        print(expected, flush=True)


main(sys.argv[1])
