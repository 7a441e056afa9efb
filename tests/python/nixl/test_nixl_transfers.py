"""Stock NIXL with the plug-in: agents of two processes move bytes and notify each other; every byte is checked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hosts import Failed, Process, serve
from nixl_host import pattern
from numpy.typing import NDArray

pytestmark = pytest.mark.slow

SIZE = 1 << 20
Pair = tuple[Process, Process, int]


def copied(
    operation: str, ours: NDArray[np.uint8], theirs: NDArray[np.uint8], pairs: list[tuple[int, int, int]]
) -> None:
    """Does in numpy what a transfer of (local offset, remote offset, length) must do."""
    for here, there, length in pairs:
        if operation == "READ":
            ours[here : here + length] = theirs[there : there + length]
        else:
            theirs[there : there + length] = ours[here : here + length]


def lists(kind: str) -> list[tuple[int, int, int]]:
    """Ranges that share no byte on either side."""
    generator = random.Random(kind)
    if kind == "unequal":
        pairs, here, there = [], 0, 5
        for number in range(60):
            length = generator.choice([1, 3, 17, 512, 4096, 5000])
            pairs.append((here, there, length))
            here, there = here + length + number % 3, there + length + number % 2
        generator.shuffle(pairs)
        return pairs
    block = 4096
    ours, theirs = list(range(SIZE // block)), list(range(SIZE // block))
    if kind == "random":
        generator.shuffle(ours)
        generator.shuffle(theirs)
    return [(here * block, there * block, block) for here, there in zip(ours[:128], theirs[-128:], strict=True)]


@pytest.fixture
def connected(plugin: Path, edge: str) -> Iterator[Pair]:
    """Two agents of which the first has the second's metadata, and where the second's buffer is."""
    with ExitStack() as stack:
        a, b = (stack.enter_context(Process(edge, plugin)) for _ in range(2))
        serve(a, "a", 1, SIZE)
        address = serve(b, "b", 2, SIZE)
        assert a.add(b.metadata()) == "b"
        yield a, b, address


def move(pair: Pair, operation: str, pairs: list[tuple[int, int, int]], message: bytes = b"") -> None:
    a, b, address = pair
    ours, theirs = a.contents("cache"), b.contents("cache")
    remote = [(address + there, length, 0) for _, there, length in pairs]
    a.make("x", operation, [("cache", here, length) for here, _, length in pairs], remote, "b")
    assert a.run("x", message) == "DONE"
    a.release("x")
    copied(operation, ours, theirs, pairs)
    np.testing.assert_array_equal(a.contents("cache"), ours)
    np.testing.assert_array_equal(b.contents("cache"), theirs)


def test_every_byte_arrives_and_notifications_follow(connected: Pair) -> None:
    _, b, _ = connected
    for kind in ("random", "contiguous", "unequal"):
        for operation in ("READ", "WRITE"):
            message = f"{kind} {operation}".encode() + bytes(range(256))
            move(connected, operation, lists(kind), message)
            assert b.notified(1) == [("a", message)]
    move(connected, "READ", [(5, 7, 1)])


def test_notifications_go_alone_and_in_order(connected: Pair) -> None:
    a, b, _ = connected
    messages = [f"message {number}".encode() for number in range(200)] + [b"", b"\0\xff", b"x" * 100_000]
    for message in messages:
        a.notify("b", message)
    assert b.notified(len(messages)) == [("a", message) for message in messages]
    b.add(a.metadata())
    b.notify("a", b"back")
    assert a.notified(1) == [("b", b"back")]
    with pytest.raises(Failed, match="NOT_FOUND"):
        a.notify("nobody", b"")


def test_a_notification_does_not_wait_for_the_initiator_to_poll(connected: Pair) -> None:
    a, b, address = connected
    a.make("x", "WRITE", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b", b"written")
    assert a.post("x", b"written") in ("PROC", "DONE")
    assert b.notified(1) == [("a", b"written")]
    np.testing.assert_array_equal(b.contents("cache"), pattern(1, SIZE))
    assert a.wait("x") == "DONE"


def test_prepared_lists_and_posting_again(connected: Pair) -> None:
    a, b, address = connected
    blocks = [("cache", block * 4096, 4096) for block in range(64)]
    remote = [(address + offset, length, 0) for _, offset, length in blocks]
    ours, theirs = [3, 1, 2, 63, 10], [5, 6, 7, 0, 20]
    expected, there = a.contents("cache"), b.contents("cache")
    a.make_prepped("x", "READ", blocks, remote, "b", (ours, theirs))
    for _ in range(3):
        assert a.run("x") == "DONE"
        copied("READ", expected, there, [(i * 4096, j * 4096, 4096) for i, j in zip(ours, theirs, strict=True)])
        np.testing.assert_array_equal(a.contents("cache"), expected)


def test_regions_registered_later_are_reached_by_partial_metadata(connected: Pair) -> None:
    a, b, _ = connected
    address = b.buffer("later", 9, 8192)
    b.register("later", [("later", 0, 8192)])
    a.add(b.partial("later", False))
    a.make("x", "READ", [("cache", 100, 8192)], [(address, 8192, 0)], "b")
    assert a.run("x") == "DONE"
    np.testing.assert_array_equal(a.contents("cache")[100 : 100 + 8192], pattern(9, 8192))


def test_the_size_of_metadata_grows_with_regions_only(connected: Pair) -> None:
    _, b, _ = connected
    sizes = [len(b.metadata())]
    for number in range(64):
        b.buffer(f"r{number}", number, 4096)
        b.register(f"r{number}", [(f"r{number}", 0, 4096)])
        sizes.append(len(b.metadata()))
    grown = np.diff(sizes)
    assert grown.max() - grown.min() <= 64, grown
    assert grown.max() < 1024


def test_overlapping_registrations(connected: Pair) -> None:
    a, b, address = connected
    b.register("inner", [("cache", 4096, 8192)])
    a.register("inner", [("cache", 0, 8192)])
    a.add(b.partial("inner", False))
    move(connected, "READ", [(0, 8192, 4096), (4096, 4096, 4096)])
    b.deregister("inner")
    move(connected, "READ", [(0, 0, 4096)])
    del address


def test_transfers_within_one_agent(connected: Pair) -> None:
    a, _, _ = connected
    address = a.buffer("other", 5, 8192)
    a.register("other", [("other", 0, 8192)])
    expected = a.contents("cache")
    for operation, seed in (("READ", 5), ("WRITE", 1)):
        a.make("x", operation, [("cache", 16, 8000)], [(address + 8, 8000, 0)], "a", b"own")
        assert a.run("x", b"own") == "DONE"
        assert a.notified(1) == [("a", b"own")]
        if operation == "READ":
            copied("READ", expected, pattern(seed, 8192).copy(), [(16, 8, 8000)])
        np.testing.assert_array_equal(a.contents("cache"), expected)
        np.testing.assert_array_equal(a.contents("other")[8:8008], expected[16:8016])
        a.release("x")


def test_releasing_a_transfer_in_flight(connected: Pair) -> None:
    a, _, address = connected
    for _ in range(5):
        a.make("x", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b")
        a.post("x")
        a.release("x")
    move(connected, "READ", lists("random"))


def test_regions_that_are_gone_are_errors(connected: Pair) -> None:
    a, b, address = connected
    a.make("x", "READ", [("cache", 0, 64)], [(address, 64, 0)], "b")
    b.deregister("cache")
    with pytest.raises(Failed):
        assert a.run("x") == "DONE"


def error_of(host: Process, key: str) -> str:
    """Posts a transfer that fails, now or later; with what."""
    try:
        state = host.run(key)
    except Failed as error:
        return str(error)
    assert state == "ERR", state
    return state


def test_a_killed_peer_is_an_error_and_a_restarted_one_works(plugin: Path, version: str) -> None:
    with Process(version, plugin) as a, Process(version, plugin) as b:
        serve(a, "a", 1, SIZE)
        address = serve(b, "b", 2, SIZE)
        a.add(b.metadata())
        a.make("x", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b")
        assert a.run("x") == "DONE"
        b.kill()
        error_of(a, "x")
        with Process(version, plugin) as again:
            address = serve(again, "b", 2, SIZE)
            if version.startswith("1.5"):
                # It keeps the old metadata after a disconnection, and refuses other until that is removed.
                with pytest.raises(Failed, match="NOT_ALLOWED"):
                    a.add(again.metadata())
                a.remove("b")
            a.add(again.metadata())
            a.make("y", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b", b"done")
            assert a.run("y", b"done") == "DONE"
            assert again.notified(1) == [("a", b"done")]
            np.testing.assert_array_equal(a.contents("cache"), pattern(2, SIZE))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("package", ["nixl_cu12", "nixl_cu13"])
def test_every_version_reads_and_notifies(plugin: Path, version: str, package: str, transport: str) -> None:
    if package == "nixl_cu13" and transport == "tcp":
        return
    env = {"KVFERRY_TRANSPORT": transport}
    with (
        Process(version, plugin, package=package, env=env) as a,
        Process(version, plugin, package=package, env=env) as b,
    ):
        for host, name, seed in ((a, "a", 1), (b, "b", 2)):
            host.start(name, ["KVFERRY"])
            address = host.buffer("cache", seed, SIZE)
            host.register("cache", [("cache", 0, SIZE)])
        a.add(b.metadata())
        move((a, b, address), "READ", lists("random"), b"read")
        move((a, b, address), "WRITE", lists("unequal"), b"write")
        assert b.notified(2) == [("a", b"read"), ("a", b"write")]
