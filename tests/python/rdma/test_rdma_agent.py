"""Two agents over RDMA devices, in processes of their own: `scripts/rdma-test` runs this in a virtual machine."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvferry import Segment
from kvferry.cli import main
from lab.process import Remote
from rdma_side import Side, copied, pattern, sent_packets

pytestmark = pytest.mark.skipif(
    "RDMA_HOST" not in os.environ, reason="it takes a network down: scripts/rdma-test has machines for that"
)

LENGTH = 4 << 20
BLOCK = 16 << 10
BLOCKS = LENGTH // BLOCK
WHOLE = Segment(0, 0, 0, 0, 0, BLOCK, BLOCK, BLOCK)
ALL = list(range(BLOCKS))
NOTICED_S = 10.0
"""A third of the lease that engines have by default."""


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts one side; all end with the test."""
    with ExitStack() as stack:

        def make(name: str, tls: str, seed: int, length: int = LENGTH, **more: object) -> Any:
            config = {"name": name, "ucx": {"TLS": f"{tls},self"}, "connect_timeout_ms": 100_000, **more}
            return stack.enter_context(Remote(Side, config, seed, length, name=name, limit_s=300))

        yield make


def key(tmp_path: Path) -> dict[str, object]:
    assert main(["key", str(tmp_path / "key")]) == 0
    return {"key_file": str(tmp_path / "key")}


@pytest.mark.parametrize(
    ("tls", "keyed"),
    [
        ("rc", False),
        ("ud", True),
        pytest.param("rc", True, marks=pytest.mark.long),
        pytest.param("ud", False, marks=pytest.mark.long),
    ],
    ids=["rc-open", "ud-key", "rc-key", "ud-open"],
)
def test_every_byte_of_every_pattern(start: Callable[..., Any], tmp_path: Path, tls: str, keyed: bool) -> None:
    more = key(tmp_path) if keyed else {}
    owner, user = start("owner", tls, 1, **more), start("user", tls, 2, **more)
    peer = user.ask("connect", owner.ask("metadata"))
    dice = random.Random(3)
    theirs, ours = pattern(1, LENGTH), pattern(2, LENGTH)
    # Whole blocks at random, odd pieces with other strides on either side, runs that are one piece, tiny ones.
    patterns = [
        (WHOLE, dice.sample(ALL, 100), dice.sample(ALL, 100)),
        (Segment(0, 0, 0, 24, 8, 10_007, 7_001, 6_999), dice.sample(range(400), 60), dice.sample(range(400), 60)),
        (WHOLE, list(range(7, 107)), list(range(100, 200))),
        (Segment(0, 0, 0, 1, 3, 64, 128, 5), dice.sample(range(9_000), 500), dice.sample(range(9_000), 500)),
    ]
    for segment, written, read in patterns:
        ours = copied(ours, theirs, segment, written, read)
        outcome = user.ask("move", "read", peer, segment, written, read)
        assert "error" not in outcome, outcome
        np.testing.assert_array_equal(user.ask("bytes"), ours)
        np.testing.assert_array_equal(owner.ask("bytes"), theirs)
    # RC reads memory by itself, and UD cannot: UCX would emulate that, which is not asked for.
    lanes, how = user.ask("route", peer)
    assert f"{tls}_" in lanes
    assert ("one-sided" in how) == (tls == "rc"), how
    user.ask("fill", 4)
    ours = pattern(4, LENGTH)
    for segment, written, read in patterns:
        back = segment._replace(
            local_offset=segment.remote_offset,
            remote_offset=segment.local_offset,
            local_stride=segment.remote_stride,
            remote_stride=segment.local_stride,
        )
        theirs = copied(theirs, ours, back, read, written)
        outcome = user.ask("move", "write", peer, segment, written, read)
        assert "error" not in outcome, outcome
        np.testing.assert_array_equal(owner.ask("bytes"), theirs)
        np.testing.assert_array_equal(user.ask("bytes"), ours)


def test_deregistering_ends_access_and_other_connections_go_on(start: Callable[..., Any]) -> None:
    owner, user, other = (start(name, "rc", seed) for seed, name in enumerate(("owner", "user", "other"), 1))
    bystander, reader = start("bystander", "rc", 9), start("reader", "rc", 8)
    peer = user.ask("connect", owner.ask("metadata"))
    read_from = reader.ask("connect", owner.ask("metadata"))
    assert reader.ask("move", "read", read_from, WHOLE, ALL[:1], ALL[:1])["one_sided_bytes"] == BLOCK
    reader.ask("fill", 8)
    unrelated = other.ask("connect", bystander.ask("metadata"))
    assert user.ask("move", "write", peer, WHOLE, ALL, ALL)["one_sided_bytes"] == LENGTH
    np.testing.assert_array_equal(owner.ask("bytes"), pattern(2, LENGTH))
    owner.ask("deregister")
    owner.ask("fill", 5)
    user.ask("fill", 6)
    # Each by a connection of its own: it is lost with the first refusal.
    assert "error" in user.ask("move", "write", peer, WHOLE, ALL, ALL)
    assert "error" in reader.ask("move", "read", read_from, WHOLE, ALL, ALL)
    np.testing.assert_array_equal(owner.ask("bytes"), pattern(5, LENGTH))
    np.testing.assert_array_equal(reader.ask("bytes"), pattern(8, LENGTH))
    # Neither that of others, nor the owner itself.
    assert other.ask("move", "read", unrelated, WHOLE, ALL, ALL)["one_sided_bytes"] == LENGTH
    np.testing.assert_array_equal(other.ask("bytes"), pattern(9, LENGTH))
    back = owner.ask("connect", bystander.ask("metadata"))
    assert "was deregistered" in owner.ask("move", "read", back, WHOLE, ALL, ALL)["message"]
    assert owner.ask("route", back)[0]


@pytest.mark.long
def test_the_time_of_a_transfer_is_the_time_that_it_took(start: Callable[..., Any]) -> None:
    owner, user = start("owner", "rc", 1), start("user", "rc", 2)
    peer = user.ask("connect", owner.ask("metadata"))
    for direction in ("read", "write"):
        # Other work of the machine may come before the transfer and after it, so the best of some counts.
        outcomes = [user.ask("move", direction, peer, WHOLE, ALL, ALL) for _ in range(10)]
        assert max(outcome["told"] / outcome["seconds"] for outcome in outcomes) > 0.5, outcomes
        assert all(outcome["told"] <= outcome["seconds"] for outcome in outcomes)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["owner", "user"])
@pytest.mark.parametrize("busy", [True, False], ids=["reading", "idle"])
@pytest.mark.parametrize("tls", ["rc", "ud"])
def test_a_killed_peer_is_noticed_within_a_third_of_the_lease(
    start: Callable[..., Any], tls: str, busy: bool, victim: str
) -> None:
    sides = {"owner": start("owner", tls, 1), "user": start("user", tls, 2)}
    owner, user = sides.values()
    peer = user.ask("connect", owner.ask("metadata"))
    assert "error" not in user.ask("move", "read", peer, WHOLE, ALL, ALL)
    survivor, asked = sides["user" if victim == "owner" else "owner"], "lost"
    if busy:
        user.tell("read_until_it_fails", peer, WHOLE, ALL, 100.0)
    if busy and survivor is user:
        asked = "read_until_it_fails"
    else:
        survivor.tell("lost", 100.0)
    time.sleep(1.0)
    begin = time.monotonic()
    sides[victim].kill()
    noticed = survivor.answer(asked)
    assert noticed is not None, "not noticed within 100 s"
    print(f"noticed after {noticed[0] - begin:.1f} s: {noticed[1]}")
    assert noticed[0] - begin < NOTICED_S, noticed


def test_large_reads_use_both_devices_and_outlive_the_loss_of_one(start: Callable[..., Any]) -> None:
    length = 16 << 20
    owner, user = (start(name, "rc", seed, length) for seed, name in enumerate(("owner", "user"), 1))
    peer = user.ask("connect", owner.ask("metadata"))
    blocks = list(range(length // BLOCK))
    before = sent_packets()
    assert user.ask("move", "read", peer, WHOLE, blocks, blocks)["one_sided_bytes"] == length
    packets = {name: after - before[name] for name, after in sent_packets().items()}
    print(f"packets of {length} bytes: {packets}")
    # Of 4096 bytes at most; a third of the whole is no chance.
    assert set(packets) == {"rxe0", "rxe1"}
    assert all(number > length / 4096 / 3 for number in packets.values()), packets
    np.testing.assert_array_equal(user.ask("bytes"), pattern(1, length))
    subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
    try:
        begin = time.monotonic()
        outcome = user.ask("move", "read", peer, WHOLE, blocks, blocks)
        print(f"after the loss: {outcome} within {time.monotonic() - begin:.1f} s")
        assert outcome.get("one_sided_bytes") == length or outcome["error"] == "peer_died", outcome
        assert time.monotonic() - begin < 30
    finally:
        subprocess.run(["ip", "link", "set", "eth1", "up"], check=True)
