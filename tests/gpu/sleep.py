"""Memory that is unmapped and mapped again at the same addresses, as in vLLM's sleep mode and PyTorch's expandable
segments."""

from __future__ import annotations

import cuda
import kvferry
import numpy as np
from expect import GENEROUS, model, same, ways_of
from kvferry import Segment
from peer import HANDLES, Peer, register

SIZES = [(5 << 20) + 1536, 3 << 20]
BLOCK = 16384
TURNS = 2
Blocks = list[tuple[list[int], list[int]]]


class _Side:
    """This process: pieces of its own, which sleep too."""

    def __init__(self, driver: cuda.Driver, kind: str, transport: str) -> None:
        self.memories = [cuda.PiecewiseMemory(driver, nbytes, HANDLES[kind]) for nbytes in SIZES]
        self.agent = kvferry.Agent({"name": "check", "transport": transport})
        self.register()

    def register(self) -> None:
        """Anew."""
        self.regions = [register(self.agent, memory, "cuda") for memory in self.memories]

    def sleep(self) -> int:
        """Unmaps everything. How many bytes that gives back."""
        given = sum(memory.mapped_bytes for memory in self.memories)
        for memory in self.memories:
            memory.unmap()
        return given

    def wake(self) -> None:
        """Maps new memory."""
        for memory in self.memories:
            memory.remap()
        self.register()

    def plan(self, remote: list[int]) -> tuple[list[Segment], Blocks]:
        """Scattered blocks of the first region, all of the second one. `remote` are the peer's regions."""
        local = [region.index for region in self.regions]
        segments = [
            Segment(0, local[0], remote[0], 512, 1536, BLOCK, BLOCK, BLOCK - 3),
            Segment(1, local[1], remote[1], 0, 0, SIZES[1], SIZES[1], SIZES[1]),
        ]
        random = np.random.default_rng(7)
        count = SIZES[0] // BLOCK
        return segments, [(random.permutation(count).tolist(), random.permutation(count).tolist()), ([0], [0])]

    def move(self, peer: Peer, connected: int, remote: list[int]) -> None:
        """Reads and writes, with every byte of both sides compared."""
        segments, blocks = self.plan(remote)
        # The model's regions are counted from 0.
        counted = [s._replace(local_region=i, remote_region=i) for i, s in enumerate(segments)]
        for seed, direction in ((50, "read"), (60, "write")):
            for index, memory in enumerate(self.memories):
                memory.put(cuda.pattern(seed + index, memory.nbytes))
            ours = [memory.get() for memory in self.memories]
            theirs = [data.copy() for data in peer.contents()]
            model(direction, counted, blocks, ours, theirs)
            start = self.agent.read if direction == "read" else self.agent.write
            start(connected, segments, blocks).wait(GENEROUS)
            same(f"{direction}, here", [memory.get() for memory in self.memories], ours)
            same(f"{direction}, there", peer.contents(), theirs)

    def refused(self, connected: int, remote: list[int]) -> None:
        """Regions that the peer has taken back are neither read nor written."""
        segments, blocks = self.plan(remote)
        before = [memory.get() for memory in self.memories]
        for segment in segments:
            for start in (self.agent.read, self.agent.write):
                try:
                    start(connected, [segment], blocks).wait(GENEROUS)
                except kvferry.NotFoundError:
                    continue
                raise AssertionError("memory that was taken back was moved")
        same("refused", [memory.get() for memory in self.memories], before)


def asleep(driver: cuda.Driver, transport: str, kind: str) -> str:
    """Both sides take their regions back, unmap them, and map them again at the same addresses with other bytes.

    Meanwhile the device has all of the memory; what was told of the regions before finds them never again."""
    here = _Side(driver, kind, transport)
    peer = Peer(transport, kind, SIZES, 1)
    with here.agent as agent:
        known, remote = peer.metadata, [0, 1]
        connected = agent.connect(known)
        here.move(peer, connected, remote)
        for turn in range(TURNS):
            for index, region in enumerate(here.regions):
                peer.deregister(index)
                agent.deregister(region)
            before = driver.free_bytes()
            given = here.sleep()
            for index in range(len(SIZES)):
                unmapped, free = peer.unmap(index)
                given += unmapped
            if free - before < given:
                raise AssertionError(f"{free - before} bytes are free after {given} were unmapped")
            here.wake()
            late = agent.connect(known)
            here.refused(connected, remote)
            here.refused(late, remote)
            seed = 10 * (turn + 2)
            woken = [peer.remap(index, seed + index) for index in range(len(SIZES))]
            # At the addresses that were told there is memory again, and not that of the regions.
            contents = peer.contents()
            for old in (connected, late, agent.connect(known)):
                here.refused(old, remote)
            same("refused, there", peer.contents(), contents)
            known, remote = woken[-1].metadata, [region.number for region in woken]
            if turn % 2:
                added = [agent.add_region(connected, region.region) for region in woken]
                if added != remote:
                    raise AssertionError(f"the regions {remote} are {added}")
            else:
                connected = agent.connect(known)
            here.move(peer, connected, remote)
        ways = ways_of(agent)
    peer.end()
    return ways
