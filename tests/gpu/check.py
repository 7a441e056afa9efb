"""Device tests: two processes on one GPU, device and host memory, every byte of both sides checked; then a benchmark.

Needs a CUDA driver, Python 3.10 or newer, numpy and the kvferry package. Without a CUDA device it prints SKIPPED and
ends with status 0, or with 1 when KVFERRY_REQUIRE names cuda. `--host` uses host memory in place of device memory,
which tests this program where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import cuda
import devices
import kvferry
import numpy as np
import recording
import sleep
from expect import GENEROUS, SIZES, model, rich_plan, same, until, ways_of
from kvferry import Segment
from peer import Peer, allocate, register

TRANSPORTS = ("auto", "shm", "tcp")
PROGRAM_LIMIT = 300.0
"""Seconds that a program with a benchmark may take."""
PAIRS = (("device", "device"), ("device", "host"), ("host", "device"))
"""Of memory here and there."""


class Skipped(Exception):
    """A test needs what is not there, as the text says."""


class Checks:
    """The tests. `device` is the kind of memory that stands for the device."""

    def __init__(self, driver: cuda.Driver | None, only: str | None = None) -> None:
        self._driver = driver
        self._only = only
        self._device = "cuda" if driver is not None else "host"
        self._failed: list[str] = []
        self._passed = 0

    def run(self, name: str, test: Callable[[], str | None]) -> None:
        """Runs one test and prints how it went, unless another was asked for."""
        if self._only not in (None, name):
            return
        start = time.monotonic()
        try:
            note = test()
        except Skipped as why:
            print(f"SKIPPED: {name}: {why}", flush=True)
            return
        except Exception:  # every failure is reported, and the others still run
            traceback.print_exc()
            self._failed.append(name)
            print(f"FAILED  {name}", flush=True)
            return
        self._passed += 1
        print(f"passed  {name} ({time.monotonic() - start:.1f} s){'' if note is None else ': ' + note}", flush=True)

    def finish(self) -> int:
        """Prints the sum; the exit status."""
        if self._only is not None and not (self._passed or self._failed):
            print(f"FAILED: no test has run that is called {self._only!r}")
            return 1
        print(f"{self._passed} passed, {len(self._failed)} failed{''.join(f', {name}' for name in self._failed)}")
        return 1 if self._failed else 0

    def kind(self, name: str) -> str:
        """The kind of memory that "device" stands for; others are called what they are."""
        return self._device if name == "device" else name

    def move(self, transport: str, local: str, remote: str, compute: bool = False, visible: str | None = None) -> str:
        """Reads and writes between `local` memory and another process' `remote` memory, while computing or idle.

        `visible` names the devices that the other process sees."""
        random = np.random.default_rng(5)
        here = [allocate(self.kind(local), nbytes, self._driver) for nbytes in SIZES]
        peer = Peer(transport, self.kind(remote), SIZES, 100, visible)
        operations = 0
        with cuda.computing(compute), kvferry.Agent({"name": "check", "transport": transport}) as agent:
            for index, memory in enumerate(here):
                memory.put(cuda.pattern(index, memory.nbytes))
                register(agent, memory, self.kind(local))
            connected = agent.connect(peer.metadata)
            for direction in ("read", "write", "read", "write"):
                segments, blocks = rich_plan(random)
                ours = [memory.get() for memory in here]
                theirs = [data.copy() for data in peer.contents()]
                model(direction, segments, blocks, ours, theirs)
                start = agent.read if direction == "read" else agent.write
                done = start(connected, segments, blocks).wait(GENEROUS)
                operations += done.operations
                same(f"{direction}, here", [memory.get() for memory in here], ours)
                same(f"{direction}, there", peer.contents(), theirs)
            ways = ways_of(agent)
        peer.end()
        return f"{operations} operations, {ways}"

    def revoked(self, transport: str) -> str:
        """Memory that its owner frees is free, though it was mapped here, and is not read again."""
        nbytes = 64 << 20
        memory = allocate(self._device, nbytes, self._driver)
        whole = [[Segment(0, 0, index, 0, 0, nbytes, nbytes, nbytes)] for index in range(2)]
        peer = Peer(transport, self._device, [nbytes, nbytes], 1)
        assert self._driver is not None
        with kvferry.Agent({"name": "check", "transport": transport}) as agent:
            register(agent, memory, self._device)
            connected = agent.connect(peer.metadata)
            for index in range(2):
                agent.read(connected, whole[index], [([0], [0])]).wait(GENEROUS)
                same("before", [memory.get()], [cuda.pattern(1 + index, nbytes)])
            peer.deregister(0)
            with kvferry.Agent({"name": "late", "transport": transport}) as late:
                register(late, allocate(self._device, nbytes, self._driver), self._device)
                # By metadata that is older than the deregistration, again and for the first time.
                for reader, other in ((agent, connected), (agent, agent.connect(peer.metadata)), (late, None)):
                    known = late.connect(peer.metadata) if other is None else other
                    try:
                        reader.read(known, whole[0], [([0], [0])]).wait(GENEROUS)
                    except kvferry.KvferryError as error:
                        note = type(error).__name__
                    else:
                        raise AssertionError("memory that was deregistered was read")
            before = self._driver.free_bytes()
            grown = peer.free(0) - before
            if grown < nbytes:
                raise AssertionError(f"{grown} bytes are free after {nbytes} were freed")
            agent.read(connected, whole[1], [([0], [0])]).wait(GENEROUS)
            same("after", [memory.get()], [cuda.pattern(2, nbytes)])
        peer.end()
        return note

    def killed(self, transport: str) -> str:
        """A peer that is killed in mid-transfer ends the transfer, and a new one works."""
        nbytes = 64 << 20
        memory = allocate(self._device, nbytes, self._driver)
        ids = list(range(nbytes // 4096))
        scattered = [Segment(0, 0, 0, 0, 0, 4096, 4096, 4000)]
        with kvferry.Agent({"name": "check", "transport": transport}) as agent:
            register(agent, memory, self._device)
            peer = Peer(transport, self._device, [nbytes], 1)
            transfers = [agent.read(agent.connect(peer.metadata), scattered, [(ids, ids)]) for _ in range(8)]
            peer.kill()
            failures = 0
            for transfer in transfers:
                try:
                    transfer.wait(GENEROUS)
                except kvferry.KvferryError:
                    failures += 1
            peer = Peer(transport, self._device, [nbytes], 2)
            whole = [Segment(0, 0, 0, 0, 0, nbytes, nbytes, nbytes)]
            agent.read(agent.connect(peer.metadata), whole, [([0], [0])]).wait(GENEROUS)
            same("after", [memory.get()], [cuda.pattern(2, nbytes)])
            peer.end()
        return f"{failures} of 8 transfers failed"

    @contextlib.contextmanager
    def reader(self, transport: str, nbytes: int, **settings: int) -> Iterator[tuple[kvferry.Agent, Peer, cuda.Memory]]:
        """An agent with so much memory on the device, and a peer with as much, full of pattern 1."""
        memory = allocate(self._device, nbytes, self._driver)
        peer = Peer(transport, self._device, [nbytes], 1)
        with kvferry.Agent({"name": "check", "transport": transport, **settings}) as agent:
            register(agent, memory, self._device)
            yield agent, peer, memory
        peer.end()

    def mixed(self, transport: str) -> str:
        """Long runs and short ones in one transfer, so that a launch is full of both."""
        mib = 1 << 20
        nbytes, long, short = 80 * mib, 4 * mib, 512
        random = np.random.default_rng(3)

        def runs(number: int, length: int) -> Segment:
            return Segment(number, 0, 0, 8 * mib, 8 * mib, long, long, length)

        # In the first 8 MiB short blocks, behind them long ones; 64 MiB in one launch.
        blocks = Segment(1, 0, 0, 0, 0, 2 * short, 2 * short, short)
        segments = [runs(0, long - 4096), runs(2, 13 * mib // 4), blocks, runs(3, long - 4096)]
        with self.reader(transport, nbytes) as (agent, peer, memory):
            connected = agent.connect(peer.metadata)
            for count in (1000, 1020, 1023, 4000):
                memory.put(cuda.pattern(50, nbytes))
                ours, theirs = [cuda.pattern(50, nbytes)], [cuda.pattern(1, nbytes)]
                ids = [random.permutation(8192)[:count].tolist() for _ in range(2)]
                lists = [(list(range(15)), list(range(15))), (ids[0], ids[1]), ([15], [15]), ([16], [16])]
                model("read", segments, lists, ours, theirs)
                agent.read(connected, segments, lists).wait(GENEROUS)
                same(f"{count} short ones", [memory.get()], ours)
            return ways_of(agent)

    def layers(self, transport: str) -> str:
        """More segments than a launch takes, of all lengths, that share a list; a list longer than a launch's."""
        mib = 1 << 20
        nbytes, layers, many = 84 * mib, 1100, 9000
        random = np.random.default_rng(4)
        lengths = (512, 5120, 4999, 4100, 4096, 1)
        segments = [
            Segment(0, 0, 0, layer << 16, layer << 16, 5120, 5120, lengths[layer % len(lengths)])
            for layer in range(layers)
        ]
        segments.append(Segment(1, 0, 0, 72 * mib, 72 * mib, 1024, 1024, 512))
        lists = [
            (random.permutation(12).tolist(), random.permutation(12).tolist()),
            (random.permutation(12 * 1024)[:many].tolist(), random.permutation(12 * 1024)[:many].tolist()),
        ]
        return self.read_once(transport, nbytes, segments, lists)

    def bounded(self, transport: str) -> str:
        """Blocks that are longer than a launch takes, while operations may only be short."""
        mib = 1 << 20
        segments, lists = [Segment(0, 0, 0, 0, 0, 72 * mib, 72 * mib, 70 * mib + 4)], [([1, 0], [0, 1])]
        return self.read_once(transport, 144 * mib, segments, lists, max_operation_bytes=1 << 18)

    def read_once(
        self,
        transport: str,
        nbytes: int,
        segments: list[Segment],
        lists: list[tuple[list[int], list[int]]],
        **settings: int,
    ) -> str:
        """One read, of which every byte here must be right."""
        with self.reader(transport, nbytes, **settings) as (agent, peer, memory):
            connected = agent.connect(peer.metadata)
            memory.put(cuda.pattern(50, nbytes))
            ours, theirs = [cuda.pattern(50, nbytes)], [cuda.pattern(1, nbytes)]
            model("read", segments, lists, ours, theirs)
            done = agent.read(connected, segments, lists).wait(GENEROUS)
            same("read", [memory.get()], ours)
            return f"{done.operations} operations, {ways_of(agent)}"

    def disconnected(self, transport: str) -> str:
        """What is under way when the peer is disconnected ends before its memory is let go."""
        nbytes = 64 << 20
        ids = list(range(nbytes // 65536))
        scattered = [Segment(0, 0, 0, 0, 0, 65536, 65536, 65000)]
        ended = 0
        with self.reader(transport, nbytes) as (agent, peer, memory):
            for _ in range(5):
                connected = agent.connect(peer.metadata)
                agent.read(connected, scattered, [(ids[:1], ids[:1])]).wait(GENEROUS)
                transfers = [agent.read(connected, scattered, [(ids, ids[::-1])]) for _ in range(4)]
                agent.disconnect(connected)
                for transfer in transfers:
                    with contextlib.suppress(kvferry.KvferryError):
                        transfer.wait(GENEROUS)
                        ended += 1
            whole = [Segment(0, 0, 0, 0, 0, nbytes, nbytes, nbytes)]
            agent.read(agent.connect(peer.metadata), whole, [([0], [0])]).wait(GENEROUS)
            same("after", [memory.get()], [cuda.pattern(1, nbytes)])
        return f"{ended} of 20 transfers ended well"

    def deregistered(self, transport: str) -> str:
        """Memory that is deregistered in mid-transfer is free to be given back at once."""
        driver = self._driver
        assert driver is not None
        nbytes = 64 << 20
        ids = list(range(nbytes // 65536))
        ended = 0
        with self.reader(transport, nbytes) as (agent, peer, kept):
            connected = agent.connect(peer.metadata)
            for region in range(1, 7):
                memory = cuda.DeviceMemory(driver, nbytes)
                registered = agent.register((memory.address, nbytes), kind="cuda", device=0)
                scattered = [Segment(0, region, 0, 0, 0, 65536, 65536, 65000)]
                agent.read(connected, scattered, [(ids[:1], ids[:1])]).wait(GENEROUS)
                transfers = [agent.read(connected, scattered, [(ids, ids[::-1])]) for _ in range(4)]
                for transfer in transfers if region % 2 else []:
                    transfer.cancel()
                agent.deregister(registered)
                memory.free()
                for transfer in transfers:
                    with contextlib.suppress(kvferry.KvferryError):
                        transfer.wait(GENEROUS)
                        ended += 1
            agent.read(connected, [Segment(0, 0, 0, 0, 0, nbytes, nbytes, nbytes)], [([0], [0])]).wait(GENEROUS)
            same("what is registered", [kept.get()], [cuda.pattern(1, nbytes)])
        return f"{ended} of 24 transfers ended well"

    def unhindered(self, transport: str) -> str:
        """No transfer waits for what the engine has the device do on its own streams."""
        driver = self._driver
        assert driver is not None
        nbytes = 4 << 20
        ids = list(range(nbytes // 16384))
        segments = [Segment(0, 0, 0, 0, 0, 16384, 16384, 16384)]
        with self.reader(transport, nbytes) as (agent, peer, memory):
            connected = agent.connect(peer.metadata)
            agent.read(connected, segments, [(ids, ids[::-1])]).wait(GENEROUS)
            with driver.blocked_default_stream():
                agent.read(connected, segments, [(ids, ids)]).wait(GENEROUS)
            same("after", [memory.get()], [cuda.pattern(1, nbytes)])
            return ways_of(agent)

    def parted(self, transport: str) -> str:
        """No transfer waits for memory to be unmapped, of a peer that leaves or a region that its owner deregisters."""
        driver = self._driver
        assert driver is not None
        nbytes = 4 << 20
        whole = [[Segment(0, 0, index, 0, 0, nbytes, nbytes, nbytes)] for index in range(2)]
        with self.reader(transport, nbytes) as (agent, staying, memory):
            # They wait for their memory as long as the stream is blocked.
            patience = {"cancel_grace_ms": int(GENEROUS * 4000), "deregister_timeout_ms": int(GENEROUS * 8000)}
            leaving, changing = (
                Peer(transport, self._device, [nbytes, nbytes], seed, settings=patience) for seed in (2, 4)
            )
            stays, leaves, changes = (agent.connect(peer.metadata) for peer in (staying, leaving, changing))
            for peer, region in ((stays, 0), (leaves, 0), (leaves, 1), (changes, 0), (changes, 1)):
                agent.read(peer, whole[region], [([0], [0])]).wait(GENEROUS)

            def is_withdrawn() -> bool:
                try:
                    agent.read(changes, whole[0], [([0], [0])]).wait(GENEROUS)
                except kvferry.NotFoundError:
                    return True
                return False

            with driver.blocked_default_stream():
                agent.disconnect(leaves)
                deregistered = threading.Thread(target=changing.deregister, args=(0,))
                deregistered.start()
                until("the region is there after its deregistration", is_withdrawn)
                for _ in range(3):
                    agent.read(stays, whole[0], [([0], [0])]).wait(GENEROUS)
                if os.environ.get("KVFERRY_CUDA_DOUBLE_CALLS_WAIT") == "1":
                    # Time for what should not happen.
                    deregistered.join(1.0)
                    if not deregistered.is_alive():
                        raise AssertionError("the owner was told of the region before it was unmapped")
            deregistered.join(GENEROUS)
            if deregistered.is_alive():
                raise AssertionError("the owner was not told that the region is unmapped")
            same("after", [memory.get()], [cuda.pattern(1, nbytes)])
            leaving.end()
            changing.end()
            return ways_of(agent)

    def program(self, name: str, *options: str) -> str:
        """A program with NIXL, in processes without this one's UCX. Its last line."""
        program = [sys.executable, str(Path(__file__).resolve().with_name(name)), *options]
        ran = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=PROGRAM_LIMIT)
        # Among lines of NIXL's log.
        for line in ran.stdout.splitlines():
            if line.startswith("SKIPPED: "):
                raise Skipped(line.removeprefix("SKIPPED: "))
        told = [line for line in ran.stdout.splitlines() if line.startswith("  ")]
        print("\n".join(told[:-1]))
        if ran.returncode != 0 or not told:
            raise AssertionError(f"{name} ended with status {ran.returncode} after {len(told)} lines")
        return told[-1].strip()

    def fabric(self) -> str:
        """Pieces that are passed on by the machine's service for that, where it has one."""
        assert self._driver is not None
        try:
            cuda.PiecewiseMemory(self._driver, 1, cuda.FABRIC).free()
        except RuntimeError as error:
            raise Skipped(f"the device has no memory with fabric handles ({error})") from None
        return self.move("auto", "fabric pieces", "fabric pieces")

    def refusals(self) -> str:
        """Memory that is not what it is said to be is refused with an explanation."""
        driver = self._driver
        assert driver is not None
        device, host = cuda.DeviceMemory(driver, 1 << 20), cuda.HostMemory(1 << 20)
        # The driver calls all that is reserved one range.
        inner, last = (cuda.PiecewiseMemory(driver, 8 << 20, cuda.DESCRIPTORS, missing) for missing in (2, 4))
        texts = []
        with kvferry.Agent({"name": "check"}) as agent:
            for address, nbytes, kind, ordinal, text in (
                (device.address, 4096, "host", 0, "CUDA device"),
                (host.address, 4096, "cuda", 0, "does not know"),
                (device.address, 1 << 40, "cuda", 0, "after its allocation"),
                (device.address, 4096, "cuda", 99, "CUDA device 99"),
                (inner.address, inner.nbytes, "cuda", 0, "nothing is mapped"),
                (last.address, last.nbytes, "cuda", 0, "nothing is mapped"),
            ):
                try:
                    if kind == "cuda":
                        agent.register((address, nbytes), kind="cuda", device=ordinal)
                    else:
                        agent.register((address, nbytes), kind="host")
                except kvferry.KvferryError as error:
                    if text not in str(error):
                        raise AssertionError(f"expected {text!r} in {error}") from error
                    texts.append(type(error).__name__)
                else:
                    raise AssertionError(f"{nbytes} bytes of {kind} memory at {address:#x} were accepted")
            register(agent, device, "cuda")
        return ", ".join(texts)

    def benchmark(self, transport: str, local: str, remote: str, nbytes: int = 256 << 20) -> str:
        """The best of five reads of `nbytes`, per block size, in GB/s."""
        memory = allocate(self.kind(local), nbytes, self._driver)
        peer = Peer(transport, self.kind(remote), [nbytes], 7)
        rates = []
        with kvferry.Agent({"name": "check", "transport": transport}) as agent:
            register(agent, memory, self.kind(local))
            connected = agent.connect(peer.metadata)
            for block in (16 << 10, 256 << 10, nbytes):
                memory.put(cuda.pattern(8, nbytes))
                count = nbytes // block
                # Not one neighbour of another, so that nothing merges.
                ids = [i * 7919 % count for i in range(count)]
                segments = [Segment(0, 0, 0, 0, 0, block, block, block)]
                best = min(agent.read(connected, segments, [(ids, ids)]).wait(GENEROUS).duration for _ in range(5))
                same("benchmark", [memory.get()], [cuda.pattern(7, nbytes)])
                rates.append(f"{block >> 10} KiB blocks {nbytes / best / 1e9:.2f} GB/s")
        peer.end()
        return ", ".join(rates)


def torch_checks(checks: Checks) -> None:
    """Tensors, under PyTorch's allocators, while it computes and while it does not."""
    if importlib.util.find_spec("torch") is None:
        print("SKIPPED: no torch, so no tensors under its allocators")
        return
    name = "PYTORCH_CUDA_ALLOC_CONF"
    checks.run("auto: tensors here and there", lambda: checks.move("auto", "torch", "torch"))
    checks.run("auto: tensors, while computing", lambda: checks.move("auto", "torch", "torch", compute=True))
    checks.run("tcp: tensors, while computing", lambda: checks.move("tcp", "torch", "torch", compute=True))
    # The allocator is chosen when a process begins: the peer's, here.
    os.environ[name] = "expandable_segments:True"
    checks.run("auto: tensors here, in expandable segments there", lambda: checks.move("auto", "torch", "torch"))
    del os.environ[name]


def benchmarks(checks: Checks, driver: cuda.Driver | None, transports: list[str], is_tiny: bool = False) -> None:
    """Of all pairs of memory."""
    if driver is not None:
        tiny = ["--tiny"] if is_tiny else []
        checks.run("benchmark between device memories", lambda: checks.program("beside.py", *tiny))
    nbytes = (1 if is_tiny else 256) << 20
    for transport in transports:
        for local, remote in PAIRS:
            checks.run(
                f"benchmark, {transport}: read into {local} from {remote}",
                lambda t=transport, a=local, b=remote: checks.benchmark(t, a, b, nbytes),  # type: ignore[misc]
            )


def device_checks(checks: Checks, driver: cuda.Driver) -> None:
    """Between two devices."""
    one, other = devices.named(0), devices.named(1)
    checks.run("auto: device 0 here, device 1 there", lambda: checks.move("auto", "device", "device", visible=other))
    checks.run(
        "auto: pieces of device 0 here, of device 1 there",
        lambda: checks.move("auto", "pieces", "pieces", visible=other),
    )
    for number, device in enumerate((one, other)):
        name = f"auto: two devices here, device {number} there"
        checks.run(name, lambda d=device: devices.move(driver, "cuda", [0, 1], d, [0, 0]))  # type: ignore[misc]
    turned = devices.named(1, 0)
    for kind, called in (("cuda", "devices"), ("pieces", "pieces")):
        name = f"auto: two {called} here, two that are counted otherwise there"
        checks.run(name, lambda k=kind: devices.move(driver, k, [0, 1], turned, [0, 1]))  # type: ignore[misc]
    for kind, called in (("cuda", "device"), ("pieces", "pieces")):
        name = f"auto: {called} here, a hidden device's there"
        checks.run(name, lambda k=kind: devices.hidden(k))  # type: ignore[misc]


def main() -> int:
    """Runs everything; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--host", action="store_true", help="use host memory in place of device memory")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="which to test, with commas")
    parser.add_argument("--short", action="store_true", help="only the first test between device memories")
    parser.add_argument("--only", metavar="NAME", help="only the test of this name")
    parser.add_argument("--no-benchmark", action="store_true", help="leave out the benchmark")
    parser.add_argument("--tiny-benchmark", action="store_true", help="only the benchmark, of few bytes, to test it")
    options = parser.parse_args()
    driver: cuda.Driver | None = None
    if not options.host:
        try:
            driver = cuda.Driver()
        except cuda.NoCuda as why:
            if "cuda" in os.environ.get("KVFERRY_REQUIRE", "").replace(" ", "").split(","):
                print(f"FAILED: KVFERRY_REQUIRE names cuda, but there is no CUDA device: {why}")
                return 1
            print(f"SKIPPED: no CUDA device: {why}")
            return 0
        print(driver.describe())
    if os.environ.get("KVFERRY_LOG") is None:
        os.environ["KVFERRY_LOG"] = "info"
    checks = Checks(driver, options.only)
    if options.tiny_benchmark:
        benchmarks(checks, driver, options.transports.split(","), is_tiny=True)
        return checks.finish()
    if options.short:
        checks.run("auto: device here, device there", lambda: checks.move("auto", "device", "device"))
        return checks.finish()
    if driver is not None:
        checks.run("refusals", checks.refusals)
        for kind in ("pieces", "sealed pieces"):
            checks.run(f"auto: {kind} here and there", lambda k=kind: checks.move("auto", k, k))  # type: ignore[misc]
        checks.run("auto: fabric pieces here and there", checks.fabric)
        checks.run("auto: memory of pools here and there", lambda: checks.move("auto", "pooled", "pooled"))
        if driver.devices > 1:
            device_checks(checks, driver)
        for transport in ("auto", "tcp"):
            checks.run(f"{transport}: beside a stream that waits", lambda t=transport: checks.unhindered(t))  # type: ignore[misc]
        checks.run("auto: beside memory that is unmapped and waits", lambda: checks.parted("auto"))
        for transport in ("auto", "tcp"):
            name = f"{transport}: deregistered in mid-transfer"
            checks.run(name, lambda t=transport: checks.deregistered(t))  # type: ignore[misc]
        for transport in ("auto", "tcp"):
            name = f"{transport}: while a graph is recorded"
            checks.run(name, lambda t=transport: recording.beside(driver, t))  # type: ignore[misc]
        checks.run("auto: memory that is freed", lambda: checks.revoked("auto"))
        checks.run("tcp: memory that is freed", lambda: checks.revoked("tcp"))
        for transport in ("auto", "tcp"):
            for kind in ("pieces", "sealed pieces"):
                name = f"{transport}: {kind} that sleep and wake"
                checks.run(name, lambda t=transport, k=kind: sleep.asleep(driver, t, k))  # type: ignore[misc]
        torch_checks(checks)
        without = ["--no-benchmark"] if options.no_benchmark else []
        checks.run("stock NIXL with kvferry's plug-in", lambda: checks.program("plugin.py", *without))
    for transport in options.transports.split(","):
        for local, remote in PAIRS:
            checks.run(
                f"{transport}: {local} here, {remote} there",
                lambda t=transport, a=local, b=remote: checks.move(t, a, b),  # type: ignore[misc]
            )
        checks.run(f"{transport}: long and short runs", lambda t=transport: checks.mixed(t))  # type: ignore[misc]
        checks.run(f"{transport}: many layers", lambda t=transport: checks.layers(t))  # type: ignore[misc]
        checks.run(f"{transport}: long blocks", lambda t=transport: checks.bounded(t))  # type: ignore[misc]
        checks.run(f"{transport}: disconnected", lambda t=transport: checks.disconnected(t))  # type: ignore[misc]
        checks.run(f"{transport}: killed peer", lambda t=transport: checks.killed(t))  # type: ignore[misc]
    if not options.no_benchmark:
        benchmarks(checks, driver, options.transports.split(","))
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
