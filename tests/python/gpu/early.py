"""A CUDA graph is recorded while an agent that is older than the process' first use of CUDA connects and moves host
memory. For the double."""

from __future__ import annotations

import sys

import cuda
import kvferry
from expect import GENEROUS, same, ways_of
from kvferry import Segment
from peer import Peer, register
from recording import recorded

NBYTES = 1 << 20


def main(transport: str) -> None:
    """Here and there only host memory, so that nothing but UCX has a reason to ask the driver."""
    with kvferry.Agent({"name": "early", "transport": transport}) as agent:
        memory = cuda.HostMemory(NBYTES)
        register(agent, memory, "host")
        peer = Peer(transport, "host", [NBYTES], 1)
        with recorded(cuda.Driver()):
            connected = agent.connect(peer.metadata)
            agent.read(connected, [Segment(0, 0, 0, 0, 0, 0, 0, NBYTES)], [([0], [0])]).wait(GENEROUS)
        same("read", [memory.get()], [cuda.pattern(1, NBYTES)])
        print(ways_of(agent), flush=True)
    peer.end()


main(sys.argv[1])
