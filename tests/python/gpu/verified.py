"""Reads and writes of agents that verify, on device memory. For the double.

Right bytes pass by every way. Bytes that their owner's memory has no more are refused: where the device copies, one
byte is changed between the copy and the owner's digest; by messages, the owner's memory changes all the time.
"""

from __future__ import annotations

import time

import cuda
import kvferry
from expect import GENEROUS, same, until
from kvferry import Segment
from peer import Peer, allocate, register

NBYTES = 1 << 20
BLOCK = 4096
COUNT = NBYTES // BLOCK
WHOLE = [Segment(0, 0, 0, 0, 0, BLOCK, BLOCK, BLOCK)]
FORWARDS = list(range(COUNT))
BACKWARDS = FORWARDS[::-1]


def turned(data: cuda.Bytes) -> cuda.Bytes:
    """With the last block first."""
    flat: cuda.Bytes = data.reshape(COUNT, BLOCK)[::-1].reshape(-1)
    return flat


def right(agent: kvferry.Agent, memory: cuda.Memory, peer: Peer, connected: int, seed: int) -> None:
    """Reads the peer's pattern, then writes another one."""
    peer.fill(0, seed)
    agent.read(connected, WHOLE, [(FORWARDS, BACKWARDS)]).wait(GENEROUS)
    same("read", [memory.get()], [turned(cuda.pattern(seed, NBYTES))])
    memory.put(cuda.pattern(seed + 1, NBYTES))
    agent.write(connected, WHOLE, [(FORWARDS, BACKWARDS)]).wait(GENEROUS)
    same("write", peer.contents(), [turned(cuda.pattern(seed + 1, NBYTES))])


def expect_mismatch(agent: kvferry.Agent, transfer: kvferry.Transfer) -> bool:
    """Whether a read ends with the error of a digest that differs; it may also end well."""
    until("the read has not ended", lambda: bool(agent.poll() or transfer.done))
    try:
        transfer.wait(GENEROUS)
    except kvferry.DigestMismatchError:
        return True
    return False


def change_one(agent: kvferry.Agent, memory: cuda.Memory, peer: Peer, connected: int) -> None:
    """One byte is changed when the device has copied all and the owner stands still, before its digest."""
    driver = cuda.Driver()
    single = cuda.DeviceMemory(driver, 1)
    single.put(cuda.pattern(4, 1))
    with kvferry.Agent({"name": "changer", "transport": "auto"}) as changer:
        register(changer, single, "cuda")
        other = changer.connect(peer.metadata)
        at = NBYTES // 2 + 77
        original = cuda.pattern(30, NBYTES)
        peer.fill(0, 30)
        assert original[at] != cuda.pattern(4, 1)[0]
        byte = [Segment(0, 0, 0, 0, at, 1, 1, 1)]
        # The changer has the memory mapped from here on.
        changer.read(other, [Segment(0, 0, 0, 0, at, 1, 1, 1)], [([0], [0])]).wait(GENEROUS)
        single.put(cuda.pattern(4, 1))
        with peer.frozen():
            transfer = agent.read(connected, WHOLE, [(FORWARDS, BACKWARDS)])
            wanted = turned(original)
            until("the device has not copied", lambda: bool((memory.get() == wanted).all()))
            changer.write(other, byte, [([0], [0])]).wait(GENEROUS)
            assert changer.stats()["device_copied_bytes"] == 2
        assert expect_mismatch(agent, transfer), "a byte that was changed was not noticed"


def change_all(agent: kvferry.Agent, peer: Peer, connected: int) -> None:
    """The owner's memory changes until a read finds another digest than its bytes have."""
    deadline, seed = time.monotonic() + GENEROUS, 1000
    while True:
        transfer = agent.read(connected, WHOLE, [(FORWARDS, BACKWARDS)])
        while transfer.done is None:
            seed += 1
            peer.fill(0, seed)
            agent.poll()
        if expect_mismatch(agent, transfer):
            return
        assert time.monotonic() < deadline, "no digest ever differed"


def main() -> None:
    """All ways."""
    for here, there, transport in (
        ("cuda", "cuda", "auto"),
        ("pieces", "pieces", "auto"),
        ("sealed pieces", "cuda", "tcp"),
        ("cuda", "host", "auto"),
        ("host", "cuda", "auto"),
    ):
        memory = allocate(here, NBYTES, cuda.Driver())
        peer = Peer(transport, there, [NBYTES], 1)
        with kvferry.Agent({"name": "check", "transport": transport, "verify": True}) as agent:
            register(agent, memory, here)
            connected = agent.connect(peer.metadata)
            right(agent, memory, peer, connected, 10)
            by_device = agent.stats()["device_copied_bytes"] == 2 * NBYTES
            assert by_device == (transport == "auto" and here == there), agent.stats()
            if by_device:
                change_one(agent, memory, peer, connected)
            else:
                change_all(agent, peer, connected)
            # The connection is not at fault.
            right(agent, memory, peer, connected, 20)
        peer.end()
        print(f"{here} here, {there} there, {transport}: noticed", flush=True)


if __name__ == "__main__":
    main()
