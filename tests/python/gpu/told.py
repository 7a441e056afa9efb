"""An agent with device memory gets a message of another process, which may have written there. For the double."""

from __future__ import annotations

import subprocess
import sys

import cuda
import kvferry
from expect import GENEROUS

NBYTES = 1 << 16


def write(metadata: bytes) -> None:
    """The other process: says that it has written, and ends when it is told to."""
    with kvferry.Agent({"name": "writer"}) as agent:
        agent.send(agent.connect(metadata), b"written")
        sys.stdin.read()


def main() -> None:
    """Takes the message."""
    device = cuda.DeviceMemory(cuda.Driver(), NBYTES)
    with kvferry.Agent({"name": "owner"}) as agent:
        agent.register((device.address, NBYTES), kind="cuda", device=0)
        program = [sys.executable, __file__, agent.metadata().hex()]
        with subprocess.Popen(program, stdin=subprocess.PIPE) as writer:
            told = False
            while not told:
                events = agent.wait(GENEROUS)
                told = any(isinstance(event, kvferry.Message) for event in events)
                if not events:
                    writer.kill()
                    sys.exit("no message came")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(bytes.fromhex(sys.argv[1]))
    else:
        main()
