"""Reads between device memories of two processes: kvferry by the device, kvferry by UCX, NIXL where it is installed, a
plain copy.

The engines take turns, round by round. After each round every byte of the destination is compared. As a program, in a
process of its own, because NIXL brings another UCX: prints a line for each kind of work, and what there was to compare
with. `--tiny` tests the program with few bytes.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import cuda
import kvferry
import numpy as np
from kvferry import Segment
from peer import Peer, register

ROUNDS = 9
WARM_UP = 2
GENEROUS = 120.0


class Work(NamedTuple):
    """Something to read."""

    text: str
    blocks: int
    """Half of those that there are."""
    length: int
    """Bytes of each."""
    is_scattered: bool = True
    computes: bool = False
    """Whether the device computes meanwhile."""
    requests: int = 1
    """So many reads at once, each of an equal part of the blocks."""

    @property
    def nbytes(self) -> int:
        """Of the memory that it is read from, and read to."""
        return 2 * self.blocks * self.length


WORK = (
    Work("2,048 blocks of 16 KiB at random", 2048, 16 << 10),
    Work("8,192 blocks of 4 KiB at random", 8192, 4 << 10),
    Work("32 MiB, contiguous", 2048, 16 << 10, is_scattered=False),
    Work("2,048 blocks of 16 KiB at random, while the reader computes", 2048, 16 << 10, computes=True),
)
LONG_WORK = (
    Work("16,384 blocks of 16 KiB at random", 16384, 16 << 10),
    Work("8 requests at once, each 2,048 blocks of 16 KiB at random", 16384, 16 << 10, requests=8),
)
"""As much as a long prompt has. It takes NIXL seconds, and is not read by it."""
TINY = 256
"""Tests of the benchmark itself read this part of the work, in one round."""


class Engine(Protocol):
    """One that reads blocks of another process's memory."""

    name: str
    seed: int
    numbers: type[np.integer[Any]]
    """What it takes block numbers as."""

    def read(self, work: Work, here: cuda.Numbers, there: cuda.Numbers) -> float:
        """Reads; returns the seconds of the calling thread until it could go on."""

    def end(self) -> None:
        """Lets go of everything."""


class Kvferry:
    """Two agents. Without `device_copies`, what UCX does with the same memory."""

    numbers: type[np.integer[Any]] = np.uint32

    def __init__(self, memory: cuda.Memory, device_copies: bool = True) -> None:
        self.seed = 100 if device_copies else 150
        self._peer = Peer("auto", "cuda", [memory.nbytes], self.seed)
        self._agent = kvferry.Agent({"name": "bench", "transport": "auto", "device_copies": device_copies})
        register(self._agent, memory, "cuda")
        self._connected = self._agent.connect(self._peer.metadata)
        self.name = "kvferry" if device_copies else self._name_of_ucx()
        self.moving: list[float] = []
        """Seconds from the first launch to the end, of each read."""

    def _name_of_ucx(self) -> str:
        """What carries a block."""
        self._agent.read(self._connected, [Segment(0, 0, 0, 0, 0, 4096, 4096, 4096)], [([0], [0])]).wait(GENEROUS)
        by_ucx = self._agent.stats()["one_sided_bytes"]
        return "UCX's cuda_ipc" if by_ucx else "messages (UCX has no GET by cuda_ipc here)"

    def read(self, work: Work, here: cuda.Numbers, there: cuda.Numbers) -> float:
        """See Engine."""
        segments = [Segment(0, 0, 0, 0, 0, work.length, work.length, work.length)]
        parts = list(zip(np.split(here, work.requests), np.split(there, work.requests), strict=True))
        start = time.perf_counter()
        transfers = [self._agent.read(self._connected, segments, [part]) for part in parts]
        called = time.perf_counter() - start
        self.moving.append(max(transfer.wait(GENEROUS).duration for transfer in transfers))
        return called

    def end(self) -> None:
        """See Engine."""
        self._agent.shutdown()
        self._peer.end()


def nixl_api() -> Any | None:
    """NIXL's Python module, if there is one."""
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    return None


def _nixl_owner(pipe: Any, backend: str, seed: int, nbytes: int) -> None:
    """NIXL's other process."""
    driver = cuda.Driver()
    memory = cuda.DeviceMemory(driver, nbytes)
    memory.put(cuda.pattern(seed, nbytes))
    api = nixl_api()
    assert api is not None
    agent = api.nixl_agent("owner", api.nixl_agent_config(backends=[backend]))
    agent.register_memory([(memory.address, nbytes, 0, "")], "VRAM")
    pipe.send((agent.get_agent_metadata(), memory.address))
    pipe.recv()


class Nixl:
    """Two agents of NIXL, used as vLLM does: prepared descriptors, and a look at the state without a pause."""

    seed = 200
    numbers: type[np.integer[Any]] = np.int32

    def __init__(self, memory: cuda.Memory, backend: str, name: str) -> None:
        self.name = name
        api = nixl_api()
        assert api is not None
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._owner = spawn.Process(target=_nixl_owner, args=(theirs, backend, self.seed, memory.nbytes), daemon=True)
        self._owner.start()
        self._agent = api.nixl_agent("reader", api.nixl_agent_config(backends=[backend]))
        self._agent.register_memory([(memory.address, memory.nbytes, 0, "")], "VRAM")
        metadata, self._there = self._pipe.recv()
        self._here, self._nbytes = memory.address, memory.nbytes
        self._remote = self._agent.add_remote_agent(metadata)
        self._lists: dict[int, tuple[Any, Any]] = {}

    def _prepared(self, length: int) -> tuple[Any, Any]:
        if length not in self._lists:
            count = self._nbytes // length
            here = [(self._here + block * length, length, 0) for block in range(count)]
            there = [(self._there + block * length, length, 0) for block in range(count)]
            own = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "VRAM")
            self._lists[length] = (own, self._agent.prep_xfer_dlist(self._remote, there, "VRAM"))
        return self._lists[length]

    def prepare(self, length: int) -> None:
        """Before the clock runs."""
        self._prepared(length)

    def read(self, work: Work, here: cuda.Numbers, there: cuda.Numbers) -> float:
        """See Engine."""
        own, other = self._prepared(work.length)
        start = time.perf_counter()
        handle = self._agent.make_prepped_xfer("READ", own, here, other, there, b"")
        state = self._agent.transfer(handle)
        called = time.perf_counter() - start
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("NIXL failed")
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        return called

    def end(self) -> None:
        """See Engine."""
        self._pipe.send(None)
        self._owner.join(30)
        self._owner.kill()


class Plain:
    """One copy of the same size within this process, which no engine can be faster than."""

    name = "plain copy"
    seed = 300
    numbers: type[np.integer[Any]] = np.int32

    def __init__(self, driver: cuda.Driver, memory: cuda.Memory) -> None:
        self._driver, self._memory = driver, memory
        self._source = cuda.DeviceMemory(driver, memory.nbytes)
        self._source.put(cuda.pattern(self.seed, memory.nbytes))
        self._stream = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(1))

    def read(self, work: Work, here: cuda.Numbers, there: cuda.Numbers) -> float:
        """Copies as many bytes, from the beginning, in a piece per request."""
        nbytes = work.length * len(here) // work.requests
        start = time.perf_counter()
        for request in range(work.requests):
            self._driver.call(
                "cuMemcpyDtoDAsync_v2",
                ctypes.c_uint64(self._memory.address + request * nbytes),
                ctypes.c_uint64(self._source.address + request * nbytes),
                ctypes.c_size_t(nbytes),
                self._stream,
            )
        called = time.perf_counter() - start
        self._driver.call("cuStreamSynchronize", self._stream)
        return called

    def end(self) -> None:
        """See Engine."""
        self._source.free()


@functools.lru_cache(maxsize=4)
def _pattern(seed: int, nbytes: int) -> cuda.Bytes:
    return cuda.pattern(seed, nbytes)


def _expected(seed: int, work: Work, here: cuda.Numbers, there: cuda.Numbers) -> cuda.Bytes:
    expected = _pattern(8, work.nbytes).copy().reshape(-1, work.length)
    expected[here] = _pattern(seed, work.nbytes).reshape(-1, work.length)[there]
    flat: cuda.Bytes = expected.reshape(-1)
    return flat


def _columns(times: dict[str, list[tuple[float, float]]]) -> Iterator[tuple[str, Iterable[tuple[float, ...]]]]:
    """Per engine, all first figures and all second ones."""
    return ((name, zip(*all, strict=True)) for name, all in times.items())


def _rounds(
    engines: list[Engine], memory: cuda.Memory, work: Work, rounds: int = ROUNDS
) -> dict[str, tuple[float, float]]:
    """Medians in seconds of each engine: until the bytes are there, and of the calling thread."""
    random = np.random.default_rng(11)
    times: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
    length, count, whole = work.length, work.blocks, work.nbytes // work.length
    fresh = _pattern(8, work.nbytes)
    for turn in range(WARM_UP + rounds):
        for engine in engines if turn % 2 else engines[::-1]:
            is_plain = isinstance(engine, Plain)
            here: cuda.Numbers = random.permutation(whole)[:count].astype(engine.numbers)
            there: cuda.Numbers = random.permutation(whole)[:count].astype(engine.numbers)
            if not work.is_scattered or is_plain:
                here = there = np.arange(count, dtype=engine.numbers)
            if isinstance(engine, Nixl):
                engine.prepare(length)
            memory.put(fresh)
            # What is first after a pause finds clocks that are low.
            time.sleep(0.005)
            start = time.perf_counter()
            called = engine.read(work, here, there)
            taken = time.perf_counter() - start
            if not np.array_equal(memory.get(), _expected(engine.seed, work, here, there)):
                raise AssertionError(f"{engine.name}: wrong bytes")
            if turn >= WARM_UP:
                times[engine.name].append((taken, called))
    return {name: (statistics.median(t), statistics.median(c)) for name, (t, c) in _columns(times)}


def _line(work: Work, medians: dict[str, tuple[float, float]], notes: Iterable[str] = ()) -> str:
    """What was measured; the first engine is compared with the others."""
    nbytes = work.blocks * work.length
    first, *others = medians
    parts = [
        f"{name} {taken * 1e6:.0f} us ({nbytes / taken / 1e9:.1f} GB/s, caller {called * 1e6:.0f} us)"
        for name, (taken, called) in medians.items()
    ]
    ratios = [f"{medians[first][0] / medians[name][0]:.3f} of {name}'s time" for name in others]
    return f"  {work.text}: {'; '.join((*parts, *notes))}; {first} takes {' and '.join(ratios)}"


def _compare(
    driver: cuda.Driver, works: Iterable[Work], with_others: bool, say: Callable[[str], None], is_tiny: bool
) -> list[str]:
    """Prints a line for each; they are alike in their bytes. Returns what there was to compare with."""
    works = [work for work in works if not work.computes or importlib.util.find_spec("torch") is not None]
    rounds = 1 if is_tiny else ROUNDS
    if is_tiny:
        works = [work._replace(text=f"a {TINY}th of {work.text}", blocks=work.blocks // TINY) for work in works]
    memory = cuda.DeviceMemory(driver, works[0].nbytes)
    ours = Kvferry(memory)
    engines: list[Engine] = [ours, Plain(driver, memory)]
    if with_others:
        engines.append(Kvferry(memory, device_copies=False))
    if with_others and nixl_api() is not None:
        engines.append(Nixl(memory, "UCX", "nixl"))
    for work in works:
        with cuda.computing(work.computes):
            medians = _rounds(engines, memory, work, rounds)
        moving = statistics.median(ours.moving[-rounds:])
        say(_line(work, medians, [f"{moving * 1e6:.0f} us of kvferry's from the first launch on"]))
    for engine in engines:
        engine.end()
    memory.free()
    return [engine.name for engine in engines[1:]]


def benchmark_plugin(driver: cuda.Driver, works: Iterable[Work], say: Callable[[str], None]) -> None:
    """Prints a line for each of what stock NIXL moves with kvferry's plug-in, beside a plain copy."""
    memory = cuda.DeviceMemory(driver, WORK[0].nbytes)
    engines: list[Engine] = [Nixl(memory, "KVFERRY", "nixl with kvferry"), Plain(driver, memory)]
    for work in works:
        say(_line(work, _rounds(engines, memory, work)))
    for engine in engines:
        engine.end()
    memory.free()


def main() -> None:
    """Prints a line for each kind of work."""
    driver, is_tiny = cuda.Driver(), "--tiny" in sys.argv[1:]

    def say(line: str) -> None:
        print(line, flush=True)

    beside = _compare(driver, WORK, True, say, is_tiny)
    _compare(driver, LONG_WORK, False, say, is_tiny)
    say(f"  beside {', '.join(beside)}")


if __name__ == "__main__":
    main()
