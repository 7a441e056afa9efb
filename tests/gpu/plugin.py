"""Stock NIXL with kvferry's plug-in: device and host memory of two processes, every byte of both sides compared.

A program of its own, so that the only UCX of its processes is NIXL's. Prints `SKIPPED` and why where NIXL or the
plug-in is not there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from typing import Any

import beside
import cuda
import numpy as np
from kvferry._find import library_path
from peer import allocate

GENEROUS = 120.0
"""Seconds that anything may take."""
SIZES = [6 * 64 * 1024, 64 * 4096]
PAIRS = (("cuda", "cuda"), ("cuda", "host"), ("host", "cuda"), ("pieces", "pieces"), ("sealed pieces", "cuda"))
"""Of memory here and there, by the names of `peer.allocate`."""
Piece = tuple[int, int, int, int, int]
"""A region here and an offset in it, one there and an offset, and a length."""


def name_of(kind: str) -> str:
    """NIXL's name of the memory."""
    return "DRAM" if kind == "host" else "VRAM"


def make_agent(name: str, kind: str, seed: int) -> tuple[Any, list[cuda.Memory]]:
    """An agent with memory of `kind`, full of patterns."""
    driver = cuda.Driver()
    memories = [allocate(kind, nbytes, driver) for nbytes in SIZES]
    api = beside.nixl_api()
    assert api is not None
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["KVFERRY"]))
    for index, memory in enumerate(memories):
        memory.put(cuda.pattern(seed + index, memory.nbytes))
        agent.register_memory([(memory.address, memory.nbytes, 0, "")], name_of(kind))
    return agent, memories


def own(pipe: Any, kind: str) -> None:
    """The other process: tells its metadata and addresses, and its bytes whenever it is asked."""
    agent, memories = make_agent("owner", kind, 100)
    pipe.send((agent.get_agent_metadata(), [memory.address for memory in memories]))
    while pipe.recv():
        pipe.send([memory.get() for memory in memories])


def pieces(random: np.random.Generator) -> list[Piece]:
    """Of odd lengths and at odd offsets, none of which touches another on either side."""
    chosen = []
    for region, nbytes in enumerate(SIZES):
        slot = 2048
        ours, theirs = random.permutation(nbytes // slot), random.permutation(nbytes // slot)
        for here, there in zip(ours[: len(ours) // 2].tolist(), theirs.tolist(), strict=False):
            shift, length = int(random.integers(0, 300)), int(random.integers(1, 1700))
            chosen.append((region, here * slot + shift, region, there * slot + (shift * 7) % 300, length))
    return chosen


def move(here: str, there: str) -> str:
    """Reads and writes of many pieces, twice each."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    owner = spawn.Process(target=own, args=(theirs, there), daemon=True)
    owner.start()
    agent, memories = make_agent("reader", here, 200)
    if not pipe.poll(GENEROUS):
        raise AssertionError("the owner told nothing")
    metadata, addresses = pipe.recv()
    remote = agent.add_remote_agent(metadata)
    random = np.random.default_rng(6)

    def contents() -> list[cuda.Bytes]:
        pipe.send(True)
        told: list[cuda.Bytes] = pipe.recv()
        return told

    count = 0
    for operation in ("READ", "WRITE", "READ", "WRITE"):
        chosen = pieces(random)
        count += len(chosen)
        ours, others = [memory.get() for memory in memories], [data.copy() for data in contents()]
        for a, at, b, off, length in chosen:
            if operation == "READ":
                ours[a][at : at + length] = others[b][off : off + length]
            else:
                others[b][off : off + length] = ours[a][at : at + length]
        local = [(memories[a].address + at, length, 0) for a, at, _, _, length in chosen]
        far = [(addresses[b] + off, length, 0) for _, _, b, off, length in chosen]
        handle = agent.initialize_xfer(
            operation, agent.get_xfer_descs(local, name_of(here)), agent.get_xfer_descs(far, name_of(there)), remote
        )
        state, deadline = agent.transfer(handle), time.monotonic() + GENEROUS
        while state == "PROC" and time.monotonic() < deadline:
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise AssertionError(f"{operation} ended as {state}")
        agent.release_xfer_handle(handle)
        for side, actual, expected in (
            ("here", [memory.get() for memory in memories], ours),
            ("there", contents(), others),
        ):
            for region, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
                wrong = np.flatnonzero(found != wanted)
                if len(wrong):
                    raise AssertionError(f"{operation}, {side}: {len(wrong)} wrong bytes in region {region}")
    pipe.send(False)
    owner.join(GENEROUS)
    if owner.exitcode != 0:
        raise AssertionError(f"the owner ended with {owner.exitcode}")
    return f"{count} descriptors"


def move_within(here: str, there: str) -> str:
    """Reads and writes of many pieces between memories of one agent."""
    agent, ours = make_agent("reader", here, 200)
    theirs = [allocate(there, nbytes, cuda.Driver()) for nbytes in SIZES]
    for index, memory in enumerate(theirs):
        memory.put(cuda.pattern(100 + index, memory.nbytes))
        agent.register_memory([(memory.address, memory.nbytes, 0, "")], name_of(there))
    random = np.random.default_rng(7)
    count = 0
    for operation in ("READ", "WRITE"):
        chosen = pieces(random)
        count += len(chosen)
        expected = [[memory.get().copy() for memory in side] for side in (ours, theirs)]
        to, source = (0, 1) if operation == "READ" else (1, 0)
        for a, at, b, off, length in chosen:
            offsets = ((a, at), (b, off))
            (into, start), (out, begin) = offsets[to], offsets[source]
            expected[to][into][start : start + length] = expected[source][out][begin : begin + length]
        near = agent.get_xfer_descs(
            [(ours[a].address + at, length, 0) for a, at, _, _, length in chosen], name_of(here)
        )
        far = agent.get_xfer_descs(
            [(theirs[b].address + off, length, 0) for _, _, b, off, length in chosen], name_of(there)
        )
        handle = agent.initialize_xfer(operation, near, far, "reader")
        state = agent.transfer(handle)
        if state != "DONE":
            raise AssertionError(f"{operation} within one agent ended as {state}")
        agent.release_xfer_handle(handle)
        for side, wanted in zip((ours, theirs), expected, strict=True):
            for region, memory in enumerate(side):
                wrong = np.flatnonzero(memory.get() != wanted[region])
                if len(wrong):
                    raise AssertionError(f"{operation} within one agent: {len(wrong)} wrong bytes in region {region}")
    return f"{count} descriptors"


def why_not() -> str | None:
    """Why nothing can be tested here."""
    api = beside.nixl_api()
    if api is None:
        return "no NIXL"
    if "KVFERRY" not in api.nixl_agent("look", api.nixl_agent_config(backends=[])).get_plugin_list():
        return "NIXL finds no plug-in of kvferry"
    return None


def main() -> int:
    """Moves between all pairs of memory; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-benchmark", action="store_true", help="leave out the benchmark")
    options = parser.parse_args()
    os.environ.setdefault("KVFERRY_LIBRARY", str(library_path()))
    reason = why_not()
    if reason is not None:
        print(f"SKIPPED: {reason}", flush=True)
        return 0
    for here, there in PAIRS:
        print(f"  nixl with kvferry, {here} here, {there} there: {move(here, there)}", flush=True)
    for here, there in PAIRS[:3]:
        print(f"  nixl with kvferry, {here} and {there} of one agent: {move_within(here, there)}", flush=True)
    if not options.no_benchmark:
        beside.benchmark_plugin(cuda.Driver(), beside.WORK[:3], print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
