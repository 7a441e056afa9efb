"""What is of the wrong type is refused by its name, with what to pass in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvferry
import numpy as np
import pytest
from kvferry import Agent, Aggregator, InvalidArgumentError, Scheduler, Segment, Worker
from kvferry.agent import Transfer

GOOD = Segment(0, 0, 0, 0, 0, 4096, 4096, 4096)
RELEASED = memoryview(bytearray(8))
RELEASED.release()


@pytest.fixture
def agent() -> Any:
    with Agent({"transport": "tcp"}) as agent:
        yield agent


def refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    for part in parts:
        assert part in caught.value.message, caught.value.message


def test_transfers(agent: Any) -> None:
    region = agent.register(np.zeros(8192, np.uint8))
    lists = [([0], [0])]

    def read(segments: Any, blocks: Any = lists, peer: Any = 1) -> Callable[[], object]:
        return lambda: agent.read(peer, segments, blocks)

    refused(read([GOOD._replace(remote_region=region)]), "segments[0].remote_region", "not Region", "pass its index")
    refused(read([GOOD, GOOD._replace(length=1.5)]), "segments[1].length", "not 1.5")
    refused(read([GOOD._replace(list=-1)]), "segments[0].list", "0 to 4294967295", "not -1")
    refused(read(GOOD), "a list of Segment", "pass [segment]")
    refused(read(7), "a list of Segment", "not int")
    refused(read([(1, 2)]), "segments[0] must be a Segment")
    refused(read([GOOD], 7), "blocks must be a list of pairs", "not int")
    refused(read([GOOD], ([0], [0])), "blocks must be a list of pairs", "blocks[0] is [0]")
    refused(read([GOOD], [(0, 0)]), "blocks must be a list of pairs", "blocks[0] is (0, 0)")
    refused(read([GOOD], [([0.5], [0])]), "local blocks, list 0", "numpy uint32 array")
    refused(read([GOOD], [(np.zeros((2, 2), np.uint32), [0, 0])]), "local blocks, list 0", "flat numpy uint32 array")
    times = np.zeros(1, "M8[s]")
    refused(read([GOOD], [(times, [0])]), "local blocks, list 0: block ids must be", "numpy uint32 array")
    refused(read([GOOD], [([0], times)]), "remote blocks, list 0: block ids must be", "numpy uint32 array")
    refused(read([GOOD], [(RELEASED, [0])]), "blocks must be a list of pairs", "blocks[0] is (<released memory")
    refused(read([GOOD], [([0, 1], [0])]), "block list 0 names 2 local and 1 remote blocks")
    refused(read([GOOD], peer="p"), "peer must be a whole number", "not 'p'")
    refused(lambda: agent.disconnect(None), "peer must be a whole number", "not NoneType")
    refused(lambda: agent.route(region), "peer must be", "not Region")
    refused(lambda: agent.cancel("t"), "transfer must be")
    refused(lambda: agent.send(1, "text"), "a message must be bytes, not str")
    refused(lambda: agent.connect("text"), "metadata must be bytes, not str")
    refused(lambda: agent.deregister(region.id), "region must be the Region", "not int")
    refused(lambda: agent.shutdown("soon"), "a timeout must be a number of seconds")
    agent.deregister(region)


@pytest.mark.parametrize("given", ["5", [5], float("nan"), 10**400])
def test_timeouts(agent: Any, given: Any) -> None:
    running, ended = Transfer(agent, 1), Transfer(agent, 2)
    ended._done = kvferry.TransferDone(2, 1, 0, 0, 0.0, None)
    shown = f"not {given!r:.80}"
    refused(lambda: agent.wait(given), "timeout must be a number of seconds", shown)
    for transfer in (running, ended):
        refused(lambda t=transfer: t.wait(given), "timeout must be a number of seconds", shown, "None")


def test_a_wait_for_events_has_an_end(agent: Any) -> None:
    refused(lambda: agent.wait(None), "timeout must be a number of seconds", "not None")
    assert agent.wait(-1) == []
    assert agent.wait(np.float32(0.01)) == []


def test_memory(agent: Any) -> None:
    refused(lambda: agent.register(np.zeros(0, np.uint8)), "the buffer of the ndarray is empty", "is allocated")
    whole = np.zeros((8, 64), np.uint8)
    refused(lambda: agent.register(whole[:, ::2]), "shape (8, 32) and strides (64, 2)", "by offset and stride")
    times = np.zeros(8, "M8[s]")
    refused(lambda: agent.register(times), "type ndarray", "dtype 'M'", "memory.view(numpy.uint8)")
    agent.deregister(agent.register(times.view(np.uint8)))
    refused(lambda: agent.register(RELEASED), "type memoryview", "released")
    refused(lambda: agent.register(whole, kind=["host"]), "memory kind")
    refused(lambda: agent.register((whole.ctypes.data, 64.0)), "(address, nbytes)")
    refused(lambda: agent.register((whole.ctypes.data, -1)), "nbytes must be a whole number", "not -1")
    refused(lambda: agent.register((whole.ctypes.data, 64), kind="cuda", device=-1), "device must be a whole number")


def test_sides_of_an_engine() -> None:
    with Worker({"engine_id": "e", "transport": "tcp"}) as worker:
        refused(lambda: worker.register(16, "many"), "nbytes must be", "not 'many'")  # type: ignore[arg-type]
        refused(lambda: worker.register("x", 1), "an address must be an int")  # type: ignore[arg-type]
        refused(lambda: worker.set_geometry([1]), "geometry must be a mapping")  # type: ignore[arg-type]
        refused(lambda: worker.submit("step"), "a step must be bytes, not str")  # type: ignore[arg-type]
        refused(lambda: worker.push_metadata("h", 70000, 1), "port must be a whole number from 0 to 65535, not 70000")
        refused(lambda: worker.push_metadata("h", 1, "one"), "expected must be")  # type: ignore[arg-type]
    groups = [{"kind": "full", "block_size": 16}]
    params: dict[str, object] = {"do_remote_prefill": True}
    with Scheduler({"engine_id": "e", "groups": groups, "port": 0}) as scheduler:
        any_scheduler: Any = scheduler
        refused(lambda: any_scheduler.serve([b"x"]), "ranks must map (pp_rank, tp_rank)", "not list")
        refused(lambda: any_scheduler.serve({0: b"x"}), "the key 0 must be a pair (pp_rank, tp_rank)")
        refused(lambda: any_scheduler.serve({(0, 0): "x"}), "must be bytes, not str")
        refused(lambda: any_scheduler.matched("r", params, "many", 0), "prompt_tokens must be", "not 'many'")
        refused(lambda: any_scheduler.allocated("r", params, 7, 1, 1), "blocks must be lists of block ids, not int")
        refused(lambda: any_scheduler.allocated("r", params, [7], 1, 1), "blocks, list 0: block ids must be")
        for ids in (np.zeros(1, "M8[s]"), RELEASED):
            refused(lambda ids=ids: any_scheduler.allocated("r", params, [ids], 1, 1), "list 0: block ids must be")
        refused(lambda: any_scheduler.allocated("r", params, [[0]], 1, -1), "external_tokens must be")
        refused(lambda: any_scheduler.finished("r", params, None, [[0]], 1), "unknown outcome None")
        refused(lambda: any_scheduler.report(None), "a report must be bytes", "not NoneType")
        refused(lambda: any_scheduler.note({}), "a report must be bytes", "not dict")
        refused(lambda: any_scheduler.over(7, "sending"), "request id must be str, not int")
        refused(lambda: any_scheduler.over("r", "both"), "unknown side 'both'")
        refused(lambda: any_scheduler.arrived(7, params), "request id must be str, not int")
    refused(lambda: Aggregator([0, 1]), "ranks must be pairs (pp_rank, tp_rank)")  # type: ignore[list-item]
    with Aggregator([(0, 0)]) as aggregator:
        aggregator.expect("r", "sending", 1)
        refused(lambda: aggregator.expect("r", "sending", 1.5), "count must be")  # type: ignore[arg-type]
    refused(lambda: kvferry.Agent([1]), "config must be a mapping")  # type: ignore[arg-type]
