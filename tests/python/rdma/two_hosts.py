"""Two hosts joined by both of their RDMA devices: run on each by `scripts/rdma-vm --hosts 2`, which sets RDMA_HOST.

Host 1 has an agent and does with it what host 2 says. Host 2 reads and writes its memory over rc and ud, with a key and
without, and cuts the network again and again. After each cut all works again, and every byte is compared. Exit status 0
if all of that was as it should be.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import numpy as np
from kvferry import Segment
from rdma_side import Side, copied, pattern, sent_packets

PORT = 19_875
LENGTH = 8 << 20
BLOCK = 16 << 10
ALL = list(range(LENGTH // BLOCK))
BLOCKS = 400
"""That are read, and that are written."""
WHOLE = Segment(0, 0, 0, 0, 0, BLOCK, BLOCK, BLOCK)
PACKET_BYTES = 4096
"""At most, of soft RoCE."""
NOTICED_S = 10.0
"""A third of the lease that engines have by default."""
CUTS = {"rc": [(0, False), (0, True), (1, True)], "ud": [(0, False), (0, True)]}
"""Which device is cut off, and whether memory is read meanwhile. The second is not missed before it is used."""
KEY = bytes(range(32)).hex()


def side(name: str, tls: str, seed: int, keyed: bool, folder: Path) -> Side:
    config: dict[str, object] = {"name": name, "ucx": {"TLS": f"{tls},self"}, "connect_timeout_ms": 100_000}
    if keyed:
        config["key_file"] = str(folder / "key")
    return Side(config, seed, LENGTH)


def serve(pipes: list[Connection], folder: Path) -> None:
    """Does what the other host says, until that ends."""
    one: Side | None = None
    while True:
        for pipe in wait(pipes):
            assert isinstance(pipe, Connection)
            name, *arguments = pipe.recv()
            if name == "end":
                return
            if name == "start":
                one = side("owner", *arguments, folder)
                pipe.send(None)
            elif name == "packets":
                pipe.send(sent_packets())
            else:
                begin = time.monotonic()
                answer = getattr(one, name)(*arguments)
                pipe.send((time.monotonic() - begin, answer))


class Owner:
    """The agent of host 1. `pipes` are over the networks of both devices, since one may be cut."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes

    def ask(self, name: str, *arguments: object) -> Any:
        self.pipes[1].send((name, *arguments))
        answer = self.pipes[1].recv()
        return answer[1] if isinstance(answer, tuple) else answer


class User:
    """The agent of this host, and what both memories must be."""

    def __init__(self, owner: Owner, tls: str, keyed: bool, folder: Path) -> None:
        self.owner, self.tls, self.name = owner, tls, f"{tls}{', key' if keyed else ''}"
        owner.ask("start", tls, 1, keyed)
        self.theirs, self.ours = pattern(1, LENGTH), pattern(2, LENGTH)
        self.side = side("user", tls, 2, keyed, folder)
        self.metadata = owner.ask("metadata")
        self.peer = self.side.connect(self.metadata)
        self.dice = random.Random(self.name)

    def check(self) -> None:
        np.testing.assert_array_equal(self.side.bytes(), self.ours)
        np.testing.assert_array_equal(self.owner.ask("bytes"), self.theirs)

    def move(self, direction: str, seed: int) -> None:
        """Blocks at random by both devices, every byte of both sides."""
        ours, theirs = (self.dice.sample(ALL, BLOCKS) for _ in "ab")
        self.side.fill(seed)
        self.ours = pattern(seed, LENGTH)
        count = sent_packets if direction == "write" else lambda: self.owner.ask("packets")
        before = count()
        outcome = self.side.move(direction, self.peer, WHOLE, ours, theirs)
        assert "error" not in outcome, outcome
        packets = {name: after - before[name] for name, after in count().items()}
        if direction == "write":
            self.theirs = copied(self.theirs, self.ours, WHOLE, theirs, ours)
        else:
            self.ours = copied(self.ours, self.theirs, WHOLE, ours, theirs)
        self.check()
        print(f"{self.name}: {direction} {outcome}, packets with bytes {packets}")
        # UD's messages take one.
        if self.tls == "rc":
            assert set(packets) == {"rxe0", "rxe1"}
            assert all(number > BLOCKS * BLOCK / PACKET_BYTES / 3 for number in packets.values()), packets

    def cut(self, device: int, busy: bool) -> None:
        """The network of one device takes nothing to the other host. Both notice; afterwards all is well again."""
        other = self.owner.pipes[1 - device]
        other.send(("lost", 100.0))
        # To an address that nobody has. Neither packets nor acknowledgements get to the other side.
        address = [f"10.99.{device}.1", "dev", f"eth{device}"]
        nobody = [*address, "lladdr", "02:00:00:00:00:01", "nud", "permanent"]
        subprocess.run(["ip", "neigh", "replace", *nobody], check=True)
        begin = time.monotonic()
        found = self.side.read_until_it_fails(self.peer, WHOLE, ALL, 100.0) if busy else self.side.lost(100.0)
        assert found is not None, "not noticed within 100 s"
        theirs, answer = other.recv()
        assert answer is not None, "not noticed by the other side within 100 s"
        subprocess.run(["ip", "neigh", "del", *address], check=True)
        what = f"{self.name}: the loss of device {device}{', reading' if busy else ''}"
        print(f"{what}: noticed after {found[0] - begin:.1f} s ({found[1]}), by the other side after {theirs:.1f} s")
        assert max(found[0] - begin, theirs) < NOTICED_S
        np.testing.assert_array_equal(self.owner.ask("bytes"), self.theirs)
        self.peer = self.side.connect(self.metadata)


def use(owner: Owner, folder: Path) -> None:
    for tls, cuts in CUTS.items():
        for keyed in (False, True):
            user = User(owner, tls, keyed, folder)
            seed = 3
            for device, busy in [*cuts, (None, False)]:
                for direction in ("read", "write"):
                    seed += 1
                    user.move(direction, seed)
                if device is not None:
                    user.cut(device, busy)
            user.side.close()
            owner.ask("close")
    owner.pipes[0].send(("end",))


def reached(address: tuple[str, int]) -> Connection:
    until = time.monotonic() + 100
    while True:
        try:
            return Client(address, authkey=b"rig")
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def main() -> int:
    # UCX 1.22 remembers the network interface of a device by its place on the PCI bus. Soft RoCE has none, so where
    # routes are asked, as by default, both devices have the interface of the first: nothing is reached by the second.
    os.environ["UCX_IB_ROCE_REACHABILITY_MODE"] = "local_subnet"
    addresses = [(f"10.99.{device}.1", PORT) for device in (0, 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "key").write_text(KEY)
        (folder / "key").chmod(0o600)
        if os.environ["RDMA_HOST"] == "1":
            pipes = []
            for address in addresses:
                with Listener(address, authkey=b"rig") as listener:
                    pipes.append(listener.accept())
            serve(pipes, folder)
        else:
            use(Owner([reached(address) for address in addresses]), folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
