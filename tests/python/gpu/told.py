"""An agent with device memory gets a message, which may say that the sender has written there. For the double."""

from __future__ import annotations

import sys

import cuda
import kvferry

NBYTES = 1 << 16
LIMIT_S = 60.0


def main() -> None:
    """Sends one and takes it."""
    owner, writer = (kvferry.Agent({"name": name, "transport": "tcp"}) for name in ("owner", "writer"))
    device = cuda.DeviceMemory(cuda.Driver(), NBYTES)
    owner.register((device.address, NBYTES), kind="cuda", device=0)
    writer.send(writer.connect(owner.metadata()), b"written")
    told = False
    while not told:
        events = owner.wait(LIMIT_S)
        told = any(isinstance(event, kvferry.Message) for event in events)
        if not events:
            sys.exit("no message came")
    writer.shutdown()
    owner.shutdown()


if __name__ == "__main__":
    main()
