"""A peer that is killed while a process that it forked has its sockets: nothing is closed, so nothing reports it."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

import kvferry
import numpy as np
import pytest
from kvferry.agent import PeerLost, Segment
from lab.process import GENEROUS, process, receive

BLOCKS, BLOCK = 16, 1 << 16


def _pattern() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(11).integers(0, 256, (BLOCKS, BLOCK), dtype=np.uint8)


def _owner(pipe: Connection) -> None:
    agent = kvferry.Agent({"name": "owner", "transport": "tcp"})
    memory = _pattern()
    agent.register(memory)
    pipe.send((os.getpid(), agent.metadata()))
    while not pipe.poll():
        agent.wait(0.05)
    child = os.fork()
    if child == 0:
        time.sleep(10 * GENEROUS)
        os._exit(0)
    pipe.send(child)
    while True:
        agent.wait(1)


def test_killed_peer_whose_child_has_its_sockets_is_lost() -> None:
    whole = Segment(
        list=0,
        local_region=0,
        remote_region=0,
        local_offset=0,
        remote_offset=0,
        local_stride=BLOCK,
        remote_stride=BLOCK,
        length=BLOCK,
    )
    ids = np.arange(BLOCKS, dtype=np.uint32)
    memory = np.zeros((BLOCKS, BLOCK), np.uint8)
    with (
        process(_owner, ends=-signal.SIGKILL) as owner,
        kvferry.Agent({"name": "reader", "transport": "tcp"}) as agent,
    ):
        pid, metadata = receive(owner)
        agent.register(memory)
        peer = agent.connect(metadata)
        agent.read(peer, [whole], [(ids, ids)]).wait(timeout=GENEROUS)
        assert np.array_equal(memory, _pattern())
        owner.send("fork")
        child = receive(owner)
        try:
            os.kill(pid, signal.SIGKILL)
            read = agent.read(peer, [whole], [(ids, ids)])
            events: list[object] = []
            deadline = time.monotonic() + GENEROUS
            while not any(isinstance(event, PeerLost) for event in events):
                assert time.monotonic() < deadline, "nobody noticed"
                events += agent.wait(0.1)
            lost = next(event for event in events if isinstance(event, PeerLost))
            os.kill(child, 0)
            assert f"process {pid} of agent owner has ended" in str(lost.error), lost
            with pytest.raises(kvferry.PeerDiedError):
                read.wait(timeout=GENEROUS)
        finally:
            os.kill(child, signal.SIGKILL)
