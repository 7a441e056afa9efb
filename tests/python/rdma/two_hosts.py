"""Two hosts over both of their RDMA devices: run on each by `scripts/rdma-vm --hosts 2`, which sets RDMA_HOST.

Host 1 serves memory; host 2 reads and writes it over rc and ud, and both compare every byte. Over rc both devices carry
their part, and then host 2 loses the network of one device. Exit status 0 if all of that was as it should be on this host.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from multiprocessing.connection import Client, Connection, Listener

import numpy as np
from kvferry import Segment
from rdma_side import Side, copied, pattern, sent_packets

PORT = 19_875
LENGTH = 16 << 20
BLOCK = 16 << 10
WHOLE = Segment(0, 0, 0, 0, 0, BLOCK, BLOCK, BLOCK)
NOTICED_S = 10.0
"""A third of the lease that engines have by default."""


BLOCKS = 700
"""That are read, and that are written."""
PACKET_BYTES = 4096
"""At most, of soft RoCE."""


def side(name: str, tls: str, seed: int) -> Side:
    return Side({"name": name, "ucx": {"TLS": f"{tls},self"}}, seed, LENGTH)


def assert_both_sent(before: dict[str, int], what: str) -> None:
    """Each device has sent at least a third of the packets that BLOCKS need, since there were those of `before`."""
    packets = {name: after - before[name] for name, after in sent_packets().items()}
    print(f"rc: packets of {what}: {packets}")
    assert set(packets) == {"rxe0", "rxe1"}
    assert all(number > BLOCKS * BLOCK / PACKET_BYTES / 3 for number in packets.values()), packets


def serve(pipe: Connection) -> None:
    for tls in ("rc", "ud"):
        one = side("owner", tls, 1)
        before = sent_packets()
        pipe.send(one.metadata())
        assert pipe.recv() == "read"
        if tls == "rc":
            assert_both_sent(before, "the memory that was read")
        pipe.send("counted")
        written, read = pipe.recv()
        expected = copied(pattern(1, LENGTH), pattern(4, LENGTH), WHOLE, written, read)
        np.testing.assert_array_equal(one.bytes(), expected)
        pipe.send("right")
        if tls == "rc":
            pipe.recv()
            begin = time.monotonic()
            found = one.lost(100.0)
            assert found is not None, "not noticed within 100 s"
            pipe.send(found[0] - begin)
        one.close()


def use(pipe: Connection) -> None:
    dice = random.Random(7)
    blocks = list(range(LENGTH // BLOCK))
    for tls in ("rc", "ud"):
        one = side("user", tls, 2)
        peer = one.connect(pipe.recv())
        written, read = dice.sample(blocks, BLOCKS), dice.sample(blocks, BLOCKS)
        outcome = one.move("read", peer, WHOLE, written, read)
        assert "error" not in outcome, outcome
        expected = copied(pattern(2, LENGTH), pattern(1, LENGTH), WHOLE, written, read)
        np.testing.assert_array_equal(one.bytes(), expected)
        print(f"{tls}: read {outcome}, {one.route(peer)}")
        pipe.send("read")
        assert pipe.recv() == "counted"
        one.fill(4)
        before = sent_packets()
        outcome = one.move("write", peer, WHOLE, read, written)
        assert "error" not in outcome, outcome
        if tls == "rc":
            assert_both_sent(before, "the memory that was written")
        pipe.send((written, read))
        assert pipe.recv() == "right"
        print(f"{tls}: wrote {outcome}")
        if tls == "rc":
            lose_the_network(one, pipe)
        one.close()


def lose_the_network(one: Side, pipe: Connection) -> None:
    """Both sides notice that the first device's network is gone; they tell each other by that of the second."""
    pipe.send(time.monotonic())
    # To an address that nobody has. Neither packets nor acknowledgements get to the other side.
    neighbour = ["10.99.0.1", "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent"]
    subprocess.run(["ip", "neigh", "replace", *neighbour], check=True)
    begin = time.monotonic()
    found = one.lost(100.0)
    assert found is not None, "not noticed within 100 s"
    print(f"rc: the loss of the network was noticed after {found[0] - begin:.1f} s: {found[1]}")
    assert found[0] - begin < NOTICED_S
    theirs = pipe.recv()
    print(f"rc: and by the other side after {theirs:.1f} s")
    assert theirs < NOTICED_S
    subprocess.run(["ip", "neigh", "del", "10.99.0.1", "dev", "eth0"], check=True)


def main() -> int:
    # UCX 1.22 remembers the network interface of a device by its place on the PCI bus. Soft RoCE has none, so where routes
    # are asked, as by default, both devices have the interface of the first, and nothing is reached from the second.
    os.environ["UCX_IB_ROCE_REACHABILITY_MODE"] = "local_subnet"
    host = int(os.environ["RDMA_HOST"])
    if host == 1:
        with Listener(("10.99.1.1", PORT), authkey=b"rig") as listener, listener.accept() as pipe:
            serve(pipe)
        return 0
    until = time.monotonic() + 100
    while True:
        try:
            pipe = Client(("10.99.1.1", PORT), authkey=b"rig")
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    use(pipe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
