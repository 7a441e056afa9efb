"""A CUDA graph that another thread of the process records while an agent works."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import cuda
import kvferry
from expect import GENEROUS, same, ways_of
from kvferry import Segment
from peer import Peer, register

NBYTES = 4 << 20
BLOCK = 4096
NON_BLOCKING = 1
FOR_ALL_THREADS = 0
"""CU_STREAM_CAPTURE_MODE_GLOBAL, PyTorch's default: a call that may wait for the device spoils the recording, whichever
thread makes it."""


@contextlib.contextmanager
def recorded(driver: cuda.Driver) -> Iterator[None]:
    """Records a graph meanwhile, which must come out well."""
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
    begun, go_on = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def record() -> None:
        try:
            with driver.on(0):
                driver.call("cuStreamBeginCapture_v2", stream, ctypes.c_int(FOR_ALL_THREADS))
                begun.set()
                go_on.wait()
                driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
                driver.call("cuGraphDestroy", graph)
        except Exception as error:  # also of a driver that lacks a function
            errors.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    try:
        if not begun.wait(GENEROUS):
            raise AssertionError("the recording has not begun")
        if not errors:
            yield
    finally:
        go_on.set()
        thread.join(GENEROUS)
        if thread.is_alive():
            errors.append(TimeoutError(f"the capture has not ended after {GENEROUS} s"))
        driver.call("cuStreamDestroy_v2", stream)
        # Beside what has failed meanwhile, which may have its cause here.
        if errors:
            raise AssertionError(f"the graph could not be recorded: {errors[0]}")


def beside(driver: cuda.Driver, transport: str) -> str:
    """All of an agent's life while graphs are recorded; this thread asks the driver for nothing meanwhile."""
    here = [cuda.DeviceMemory(driver, NBYTES) for _ in range(2)]
    peer = Peer(transport, "cuda", [NBYTES, NBYTES], 1)
    ids = list(range(NBYTES // BLOCK))
    with recorded(driver), kvferry.Agent({"name": "check", "transport": transport, "verify": True}) as agent:
        regions = [register(agent, memory, "cuda") for memory in here]
        connected = agent.connect(peer.metadata)
        for ours, theirs in ((0, 0), (1, 1), (0, 1)):
            segments = [Segment(0, ours, theirs, 0, 0, BLOCK, BLOCK, BLOCK)]
            agent.read(connected, segments, [(ids, ids[::-1])]).wait(GENEROUS)
        agent.write(connected, [Segment(0, 1, 0, 0, 0, 0, 0, NBYTES)], [([0], [0])]).wait(GENEROUS)
        ways = ways_of(agent)
        agent.deregister(regions[0])
    turned = cuda.pattern(2, NBYTES).reshape(-1, BLOCK)[::-1].reshape(-1)
    same("here", [memory.get() for memory in here], [turned, turned])
    same("there", peer.contents(), [turned, cuda.pattern(2, NBYTES)])
    peer.end()
    return ways
