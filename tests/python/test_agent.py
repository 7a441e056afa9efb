"""Agents of two processes move blocks of numpy arrays; every byte is checked."""

from __future__ import annotations

import gc
import time
import weakref
from multiprocessing.connection import Connection

import kvferry
import numpy as np
import pytest
from kvferry import Segment
from lab.process import GENEROUS, process, receive
from numpy.typing import NDArray

BLOCKS, LAYERS, BLOCK = 24, 3, 4096
REMOTE_STRIDE = 5000
"""The peer's blocks lie further apart than ours, with bytes between them that must stay."""


def contents(tag: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Bytes that differ by tag and by place."""
    number = np.prod(shape)
    words = np.arange(number, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(tag * 97 + 13)
    cut: NDArray[np.uint8] = (words >> np.uint64(7)).astype(np.uint8)
    return cut.reshape(shape)


def remote_cache(tag: int) -> NDArray[np.uint8]:
    return contents(tag, (LAYERS, BLOCKS, REMOTE_STRIDE))


def serve(pipe: Connection, transport: str) -> None:
    """The peer: registers a cache, tells its metadata, and shows its bytes when asked."""
    cache = remote_cache(1)
    with kvferry.Agent({"name": "server", "transport": transport}) as agent:
        for layer in cache:
            agent.register(layer)
        pipe.send(agent.metadata())
        while (question := receive(pipe)) != "end":
            if question == "bytes":
                pipe.send(cache)
            elif question == "echo":
                pipe.send("ready")
                deadline = time.monotonic() + GENEROUS
                while time.monotonic() < deadline:
                    messages = [event for event in agent.wait(1.0) if isinstance(event, kvferry.Message)]
                    for message in messages:
                        agent.send(message.peer, message.data[::-1])
                    if messages:
                        break


def segments() -> list[Segment]:
    return [
        Segment(layer % 2, 0, layer, layer * BLOCKS * BLOCK, 8, BLOCK, REMOTE_STRIDE, BLOCK - layer * 16)
        for layer in range(LAYERS)
    ]


def moved(
    local: NDArray[np.uint8], remote: NDArray[np.uint8], lists: list[tuple[list[int], list[int]]], read: bool
) -> None:
    """Does in numpy what a transfer by `segments` must do."""
    for layer in range(LAYERS):
        length = BLOCK - layer * 16
        for ours, theirs in zip(*lists[layer % 2], strict=True):
            if read:
                local[layer, ours, :length] = remote[layer, theirs, 8 : 8 + length]
            else:
                remote[layer, theirs, 8 : 8 + length] = local[layer, ours, :length]


LISTS = [([1, 2, 3, 9, 20], [4, 5, 6, 0, 23]), ([0, 7, 5], [11, 2, 3])]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_reads_and_writes_move_exactly_the_named_bytes(transport: str) -> None:
    local = contents(2, (LAYERS, BLOCKS, BLOCK))
    expected_local, expected_remote = local.copy(), remote_cache(1)
    with process(serve, transport) as pipe, kvferry.Agent({"name": "client", "transport": transport}) as agent:
        assert agent.register(local).index == 0
        peer = agent.connect(receive(pipe))

        done = agent.read(peer, segments(), LISTS).wait(GENEROUS)
        moved(expected_local, expected_remote, LISTS, read=True)
        np.testing.assert_array_equal(local, expected_local)
        total = sum((BLOCK - layer * 16) * len(LISTS[layer % 2][0]) for layer in range(LAYERS))
        assert done.bytes == total
        assert done.error is None
        assert done.operations > 0

        arrays = [(np.array(ours, dtype=np.uint32), np.array(theirs, dtype=np.uint32)) for theirs, ours in LISTS]
        agent.write(peer, segments(), arrays).wait(GENEROUS)
        moved(expected_local, expected_remote, [(ours, theirs) for theirs, ours in LISTS], read=False)
        pipe.send("bytes")
        np.testing.assert_array_equal(receive(pipe), expected_remote)
        np.testing.assert_array_equal(local, expected_local)
        stats = agent.stats()
        assert stats["transfers_done"] == 2
        assert stats["bytes_read"] == total
        pipe.send("end")


def test_a_region_is_added_later_and_a_message_follows_the_last_byte() -> None:
    ours, theirs = contents(1, (8, BLOCK)), contents(2, (8, BLOCK))
    with kvferry.Agent({"transport": "tcp"}) as agent, kvferry.Agent({"transport": "tcp"}) as other:
        agent.register(ours)
        peer = agent.connect(other.metadata())
        # Overlapping regions are regions of their own.
        other.register(theirs[4:])
        region = other.register(theirs)
        assert agent.add_region(peer, other.region_metadata(region)) == region.index == 1
        segment = Segment(0, 0, region.index, 0, 0, BLOCK, BLOCK, BLOCK)
        agent.read(peer, [segment], [([0, 1], [7, 3])], b"taken").wait(GENEROUS)
        np.testing.assert_array_equal(ours[:2], theirs[[7, 3]])
        events: list[kvferry.Event] = []
        deadline = time.monotonic() + GENEROUS
        while not any(isinstance(event, kvferry.Message) for event in events):
            assert time.monotonic() < deadline
            events += other.wait(1.0)
        assert [event.data for event in events if isinstance(event, kvferry.Message)] == [b"taken"]


def test_a_region_is_removed_and_added_again() -> None:
    ours, theirs = contents(1, (8, BLOCK)), contents(2, (8, BLOCK))
    with kvferry.Agent({"transport": "tcp"}) as agent, kvferry.Agent({"transport": "tcp"}) as other:
        agent.register(ours)
        kept, region = other.register(theirs[:4]), other.register(theirs)
        described = other.region_metadata(region)
        peer = agent.connect(other.metadata())
        segment = Segment(0, 0, region.index, 0, 0, BLOCK, BLOCK, BLOCK)
        begun = agent.read(peer, [segment], [([0, 1], [7, 3])])
        agent.remove_region(peer, region.index)
        begun.wait(GENEROUS)
        np.testing.assert_array_equal(ours[:2], theirs[[7, 3]])
        before = ours.copy()
        with pytest.raises(kvferry.NotFoundError, match=r"was removed|is not in its metadata"):
            agent.read(peer, [segment], [([2], [1])]).wait(GENEROUS)
        np.testing.assert_array_equal(ours, before)
        for index in (region.index, 2, 2**32 - 1):
            with pytest.raises(kvferry.NotFoundError, match=f"region {index} "):
                agent.remove_region(peer, index)
        with pytest.raises(kvferry.NotFoundError, match="peer"):
            agent.remove_region(peer + 999, kept.index)
        with pytest.raises(kvferry.InvalidArgumentError):
            agent.remove_region(peer, 2**32)
        for _ in range(2):
            assert agent.add_region(peer, described) == region.index
            agent.read(peer, [segment], [([2, 3], [1, 5])]).wait(GENEROUS)
            np.testing.assert_array_equal(ours[2:4], theirs[[1, 5]])
            agent.remove_region(peer, region.index)
        agent.read(peer, [Segment(0, 0, kept.index, 0, 0, BLOCK, BLOCK, BLOCK)], [([4], [2])]).wait(GENEROUS)
        np.testing.assert_array_equal(ours[4], theirs[2])


def test_messages_go_both_ways() -> None:
    with process(serve, "tcp") as pipe, kvferry.Agent({"transport": "tcp"}) as agent:
        peer = agent.connect(receive(pipe))
        pipe.send("echo")
        assert receive(pipe) == "ready"
        sent = bytes(range(256)) * 40
        agent.send(peer, sent)
        events: list[kvferry.Event] = []
        deadline = time.monotonic() + GENEROUS
        while not any(isinstance(event, kvferry.Message) for event in events):
            assert time.monotonic() < deadline
            events += agent.wait(1.0)
        assert [event.data for event in events if isinstance(event, kvferry.Message)] == [sent[::-1]]
        assert [event.name for event in events if isinstance(event, kvferry.PeerConnected)] == ["server"]
        pipe.send("end")


def test_a_dead_peer_ends_its_transfers_and_is_told() -> None:
    with kvferry.Agent({"transport": "tcp"}) as agent:
        local = np.zeros((LAYERS, BLOCKS, BLOCK), dtype=np.uint8)
        agent.register(local)
        with process(serve, "tcp") as pipe:
            peer = agent.connect(receive(pipe))
            agent.read(peer, segments(), LISTS).wait(GENEROUS)
            pipe.send("end")
        deadline = time.monotonic() + GENEROUS
        lost: list[kvferry.PeerLost] = []
        while not lost:
            assert time.monotonic() < deadline
            lost = [event for event in agent.wait(1.0) if isinstance(event, kvferry.PeerLost)]
        assert lost[0].peer == peer
        with pytest.raises(kvferry.NotFoundError):
            agent.read(peer, segments(), LISTS)


def test_bad_transfers_name_what_is_wrong_and_others_go_on() -> None:
    local = np.zeros((LAYERS, BLOCKS, BLOCK), dtype=np.uint8)
    with process(serve, "tcp") as pipe, kvferry.Agent({"transport": "tcp"}) as agent:
        region = agent.register(local)
        peer = agent.connect(receive(pipe))
        good = Segment(0, 0, 0, 0, 0, BLOCK, REMOTE_STRIDE, BLOCK)

        def fails(segment: Segment, lists: list[tuple[list[int], list[int]]]) -> kvferry.KvferryError:
            with pytest.raises(kvferry.KvferryError) as caught:
                agent.read(peer, [segment], lists).wait(GENEROUS)
            return caught.value

        out_of_range = fails(good, [([0, LAYERS * BLOCKS], [0, 1])])
        assert isinstance(out_of_range, kvferry.OutOfRangeError)
        assert str(LAYERS * BLOCKS) in out_of_range.message
        assert isinstance(fails(good, [([0], [BLOCKS])]), kvferry.OutOfRangeError)
        assert "2 local and 1 remote" in fails(good, [([0, 1], [0])]).message
        assert fails(good._replace(local_region=7), [([0], [0])]).name in ("not_found", "out_of_range")
        assert fails(good._replace(remote_region=7), [([0], [0])]).name in ("not_found", "out_of_range")
        assert fails(good._replace(list=3), [([0], [0])]).name in ("invalid_argument", "out_of_range")
        assert fails(good._replace(local_offset=2**64 - 1), [([0], [0])]).name in ("invalid_argument", "out_of_range")
        with pytest.raises(kvferry.InvalidArgumentError, match="list 0: block ids"):
            agent.read(peer, [good], [([-1], [0])])
        with pytest.raises(kvferry.InvalidArgumentError, match="list 0: block ids"):
            agent.read(peer, [good], [([2**32], [0])])
        assert not local.any()

        agent.read(peer, [good], [([1], [1])]).wait(GENEROUS)
        np.testing.assert_array_equal(local[0, 1], remote_cache(1)[0, 1, :BLOCK])

        with pytest.raises(kvferry.NotFoundError):
            agent.cancel(12345)
        with pytest.raises(kvferry.NotFoundError):
            agent.send(peer + 1000, b"x")
        agent.disconnect(peer)
        with pytest.raises(kvferry.NotFoundError):
            agent.disconnect(peer)
        agent.deregister(region)
        with pytest.raises(kvferry.NotFoundError):
            agent.deregister(region)
        pipe.send("end")


def test_bad_memory_is_refused() -> None:
    with kvferry.Agent({"transport": "tcp"}) as agent:
        cache = np.zeros(8192, dtype=np.uint8)
        agent.register(cache)
        for bad, expected in [
            ((0, 10), "null"),
            ((16, 4096), "not mapped"),
            ((cache.ctypes.data, 0), "empty"),
            (b"constant", "read-only"),
            (np.zeros((8, 8))[:, 1], "not contiguous"),
            ("text", "cannot register"),
            ((1, 2, 3), "address, nbytes"),
            ((-1, 2), "an address must be"),
        ]:
            with pytest.raises(kvferry.KvferryError, match=expected):
                agent.register(bad)
        with pytest.raises(kvferry.KvferryError):
            agent.register((cache.ctypes.data, 64), kind="cuda", device=0)


def test_bad_metadata_is_refused() -> None:
    with kvferry.Agent({"transport": "tcp"}) as agent:
        good = agent.metadata()
        for cut in (0, 1, len(good) // 2, len(good) - 1):
            with pytest.raises(kvferry.KvferryError):
                agent.connect(good[:cut])
        with pytest.raises(kvferry.CorruptError):
            agent.connect(b"GET / HTTP/1.1\r\n\r\n")
        version = good.index(b"version") + len(b"version")
        newer = good[:version] + b"\x63" + good[version + 1 :]
        with pytest.raises(kvferry.VersionMismatchError, match="version 99"):
            agent.connect(newer)
        with pytest.raises(kvferry.InvalidArgumentError):
            agent.connect("text")  # type: ignore[arg-type]
        for place in range(0, len(good), 7):
            damaged = bytearray(good)
            damaged[place] ^= 0xFF
            try:
                agent.disconnect(agent.connect(bytes(damaged)))
            except kvferry.KvferryError:
                pass
        agent.stats()


def test_bad_configs_name_the_key() -> None:
    configs: list[tuple[dict[str, object], str]] = [
        ({"transprot": "tcp"}, 'unknown key "transprot"; did you mean "transport"?'),
        ({"transport": "rdma"}, "transport must be one of auto, tcp, shm"),
        ({"window": "many"}, 'window must be a whole number from 1 to 1024 (operations), not "many"'),
        ({"window": 0}, "window must be"),
        ({"name": ""}, "name"),
        ({"name": object()}, "cannot be passed on"),
        ({"ucx": {"TLS": [3]}}, 'ucx: "TLS" must be a text'),
    ]
    for config, expected in configs:
        with pytest.raises(kvferry.InvalidArgumentError) as caught:
            kvferry.Agent(config)
        assert expected in str(caught.value)
    with pytest.raises(kvferry.InvalidArgumentError):
        kvferry.Agent("tcp")  # type: ignore[arg-type]


def test_a_missing_ucx_says_what_to_do() -> None:
    with pytest.raises(kvferry.KvferryError, match=r"/no/such/libucp\.so\.0"):
        kvferry.Agent({"ucx_lib": "/no/such/libucp.so.0"})


def test_a_stale_agent_is_an_error() -> None:
    agent = kvferry.Agent({"transport": "tcp"})
    agent.shutdown()
    agent.shutdown()
    with pytest.raises(kvferry.ShutDownError, match="agent is shut down"):
        agent.metadata()


def test_registered_memory_is_kept_alive() -> None:
    class Owned(np.ndarray):
        """An array that can be referred to weakly."""

    with kvferry.Agent({"transport": "tcp"}) as agent:
        array = np.zeros(4096, dtype=np.uint8).view(Owned)
        seen = weakref.ref(array)
        region = agent.register(array)
        del array
        gc.collect()
        assert seen() is not None
        agent.deregister(region)
        gc.collect()
        assert seen() is None


def test_a_worker_keeps_what_it_registered_alive() -> None:
    class Owner:
        """Of memory that is given by its address."""

    array, other = np.zeros(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
    owner, data = Owner(), bytearray(4096)
    seen = weakref.ref(owner)
    with kvferry.Worker({"engine_id": "owners", "transport": "tcp"}) as worker:
        assert worker.register(array.ctypes.data, array.nbytes, owner=owner) == 0
        assert worker.register(data) == 1
        assert worker.register((other.ctypes.data, other.nbytes)) == 2
        with pytest.raises(kvferry.KvferryError, match="not mapped"):
            worker.register(16, 4096, owner=Owner())
        assert sum(isinstance(part, Owner) for kept in worker._handle.owners.values() for part in as_tuple(kept)) == 1
        del owner
        gc.collect()
        assert seen() is not None
        with pytest.raises(BufferError):
            data.clear()
    gc.collect()
    assert seen() is None
    data.clear()


def as_tuple(kept: object) -> tuple[object, ...]:
    return kept if isinstance(kept, tuple) else (kept,)


def test_a_bytearray_cannot_shrink_under_a_registration() -> None:
    with kvferry.Agent({"transport": "tcp"}) as agent:
        data = bytearray(4096)
        agent.register(data)
        with pytest.raises(BufferError):
            data.clear()
    data.clear()


def test_the_side_that_is_connected_to_tells_which_path_its_bytes_take() -> None:
    # The connecting side can prove which process it is only when the other side has connected back.
    with kvferry.Agent({"name": "a", "transport": "shm"}) as a, kvferry.Agent({"name": "b", "transport": "shm"}) as b:
        a.connect(b.metadata())
        deadline = time.monotonic() + GENEROUS
        while [peer["host"] for peer in b.peers()] != ["copied (process_vm_readv)"]:
            assert time.monotonic() < deadline, b.peers()
            b.wait(0.05)


def test_a_route_is_told_once_the_peer_has_answered() -> None:
    with process(serve, "tcp") as pipe, kvferry.Agent({"transport": "tcp"}) as agent:
        peer = agent.connect(receive(pipe))
        deadline = time.monotonic() + GENEROUS
        while (route := agent.route(peer)) is None:
            assert time.monotonic() < deadline
            agent.wait(1.0)
        assert "tcp/" in route.lanes
        assert (route.host, route.device, route.mixed) == ("served by messages",) * 3
        with pytest.raises(kvferry.NotFoundError):
            agent.route(peer + 1)
        pipe.send("end")
