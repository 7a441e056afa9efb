"""Two engines, a process each, hand over requests between KV caches in device memory. For the double.

`workers.py handed-over`, `workers.py asleep`, `workers.py killed`. Every byte of both caches is compared each time.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import cuda
import numpy as np
from expect import GENEROUS, same, until
from kvferry import Scheduler, Worker, stats
from lab import process
from peer import allocate

LAYERS, TOKENS, HEADS, CONTENT = 2, 2048, 2, 512
"""Of a cache, in a region per layer; bytes of a token and head."""
NBYTES = TOKENS * HEADS * CONTENT
Blocks = list[int]
Caches = list[cuda.Bytes]


class Engine:
    """An engine of one rank: its cache, its worker and its scheduler side."""

    def __init__(self, name: str, kind: str, block: int, seed: int, keys: Mapping[str, object]) -> None:
        self.name, self.kind, self.block, self.keys = name, kind, block, keys
        self.driver = cuda.Driver() if kind != "host" else None
        self.memories = [allocate(kind, NBYTES, self.driver) for _ in range(LAYERS)]
        self.outcomes: list[Any] = []
        self.quiet, self.scribbler = threading.Event(), threading.Thread(target=self.scribbling, daemon=True)
        self.groups = [{"kind": "full", "block_size": block}]
        self.fill(seed)
        self.start()
        place = {"engine_id": name, "host": "127.0.0.1", "port": 0}
        self.scheduler = Scheduler({**place, "groups": self.groups, "null_block": None})
        self.scheduler.serve(self.ranks())

    def fill(self, seed: int) -> None:
        for layer, memory in enumerate(self.memories):
            memory.put(cuda.pattern(seed + layer, NBYTES))

    def start(self) -> None:
        self.worker = Worker({"engine_id": self.name, "compat": [["model", "m"]], **self.keys})
        content, areas = self.block * CONTENT, []
        for layer, memory in enumerate(self.memories):
            region = self.worker.register(memory.address, NBYTES, "host" if self.kind == "host" else "cuda", 0)
            area = {"layer": f"l{layer}", "part": "kv", "group": 0, "region": region, "offset": 0, "heads": HEADS}
            area |= {"num_blocks": TOKENS // self.block, "block_stride": HEADS * content, "head_stride": content}
            area |= {"first_head": 0, "total_heads": HEADS, "tokens": self.block, "token_stride": CONTENT}
            areas.append({**area, "content": CONTENT})
        self.worker.set_geometry({"groups": self.groups, "areas": areas})

    def ranks(self) -> dict[tuple[int, int], bytes]:
        return {(0, 0): self.worker.metadata()}

    def step(self) -> None:
        while self.scheduler.has_pending():
            self.worker.submit(self.scheduler.step())

    def prefilled(self, request: str, blocks: Blocks, tokens: int) -> Any:
        keep, params = self.scheduler.finished(request, {"do_remote_decode": True}, "complete", [blocks], tokens)
        assert keep
        self.step()
        return json.loads(json.dumps(params))

    def arrive(self, request: str, params: Any) -> None:
        self.scheduler.arrived(request, params)
        self.step()

    def load(self, request: str, params: Any, blocks: Blocks, tokens: int) -> None:
        assert self.scheduler.matched(request, params, tokens, 0) == (tokens, True)
        self.scheduler.allocated(request, params, [blocks], tokens, tokens)
        self.step()

    def over(self, side: str, request: str) -> Any:
        """Waits for a request's end on that side. The failure of a receive, if it failed."""
        deadline = time.monotonic() + GENEROUS
        while not any(request in outcome[side] for outcome in self.outcomes):
            assert time.monotonic() < deadline, f"{request} is not in {side}: {self.outcomes}"
            report = self.worker.wait_encoded(1.0)
            if report is not None:
                self.outcomes.append(self.scheduler.report(report))
                self.step()
        failures = [failure for outcome in self.outcomes for failure in outcome["failed_recving"]]
        return next((failure for failure in failures if failure["request"] == request), None)

    def ended(self, side: str) -> list[str]:
        """All requests that have ended on that side, each as often as that was told."""
        return sorted(request for outcome in self.outcomes for request in outcome[side])

    def figures(self) -> Any:
        """What the reports say together, and how the agent's bytes have gone."""
        reported: Any = {}
        for outcome in self.outcomes:
            reported = stats.merge(reported, outcome["stats"])
        return {"reported": reported, "agent": self.worker.stats()["agent"], "scheduler": self.scheduler.stats()}

    def caches(self) -> Caches:
        return [memory.get() for memory in self.memories]

    def copied(self) -> int:
        """Bytes that the device was told to copy."""
        agent: Any = self.worker.stats()["agent"]
        return int(agent["device_copied_bytes"])

    def free_bytes(self) -> int:
        """What the device has free."""
        assert self.driver is not None
        return self.driver.free_bytes()

    def scribble(self) -> None:
        """The cache changes all the time, until `be_quiet`."""
        self.scribbler.start()

    def scribbling(self) -> None:
        seed = 1000
        while not self.quiet.is_set():
            seed += LAYERS
            self.fill(seed)

    def be_quiet(self) -> None:
        self.quiet.set()
        self.scribbler.join()

    def sleep(self) -> None:
        """Ends the worker and gives the memory back: afterwards the device has all of it."""
        before, given = self.free_bytes(), 0
        last = self.worker.suspend()
        if last is not None:
            self.outcomes.append(self.scheduler.report(last))
        for memory in self.memories:
            assert isinstance(memory, cuda.PiecewiseMemory)
            given += memory.mapped_bytes
            memory.unmap()
        grown = self.free_bytes() - before
        assert grown >= given, f"{grown} bytes are free after {given} were unmapped"

    def wake(self, seed: int) -> None:
        """Maps new memory at the same addresses, with other bytes, and starts a new worker."""
        for memory in self.memories:
            assert isinstance(memory, cuda.PiecewiseMemory)
            memory.remap()
        self.fill(seed)
        self.start()
        self.scheduler.renew(self.ranks())
        self.step()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


class Remote(process.Remote):
    """An engine in another process; each attribute is a method of `Engine`."""

    def __init__(self, stack: ExitStack, *arguments: Any) -> None:
        super().__init__(Engine, *arguments, limit_s=GENEROUS)
        self.block = arguments[2]
        stack.callback(self.kill)
        self.wait_up()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self.ask, name)

    def leave(self) -> None:
        """Ends, and ends well."""
        assert self.close() == 0

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The process stands still meanwhile."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()


class Pair:
    """A producer and a consumer, and what their caches have to hold."""

    def __init__(self, producer: Remote, consumer: Remote) -> None:
        self.producer, self.consumer = producer, consumer
        self.random = np.random.default_rng(9)
        self.expect_both()
        self.moved = 0

    def expect_both(self) -> None:
        """What is there now is right: an engine has filled its cache anew."""
        self.theirs, self.ours = self.producer.caches(), self.consumer.caches()

    def blocks(self, tokens: int) -> tuple[Blocks, Blocks]:
        """Of the producer and of the consumer, in any order."""

        def some(block: int) -> Blocks:
            chosen: Blocks = self.random.permutation(TOKENS // block)[: -(-tokens // block)].tolist()
            return chosen

        return some(self.producer.block), some(self.consumer.block)

    def expect(self, tokens: int, theirs: Blocks, ours: Blocks) -> None:
        """A load of a prompt comes to its end."""
        a, b = self.producer.block, self.consumer.block
        for layer in range(LAYERS):
            source = self.theirs[layer].reshape(-1, HEADS, a, CONTENT)
            target = self.ours[layer].reshape(-1, HEADS, b, CONTENT)
            for token in range(tokens):
                target[ours[token // b], :, token % b] = source[theirs[token // a], :, token % a]
        self.moved += tokens * LAYERS * HEADS * CONTENT

    def load(self, name: str, params: Any, tokens: int, theirs: Blocks, ours: Blocks) -> None:
        """Loads what the producer has granted, and sees that both sides report it."""
        self.consumer.load(f"d-{name}", params, ours, tokens)
        failure = self.consumer.over("finished_recving", f"d-{name}")
        assert failure is None, failure
        self.producer.over("finished_sending", f"p-{name}")
        self.expect(tokens, theirs, ours)
        self.check(name)

    def hand_over(self, name: str, tokens: int) -> None:
        theirs, ours = self.blocks(tokens)
        params = self.producer.prefilled(f"p-{name}", theirs, tokens)
        self.consumer.arrive(f"d-{name}", params)
        self.load(name, params, tokens, theirs, ours)

    def has_free(self, nbytes: int) -> bool:
        """Whether the device has so much memory that nobody has."""
        return bool(self.consumer.free_bytes() >= nbytes)

    def check(self, what: str) -> None:
        """Compares every byte of both."""
        same(f"{what}, producer", self.producer.caches(), self.theirs)
        same(f"{what}, consumer", self.consumer.caches(), self.ours)


@contextmanager
def pair(producer: tuple[str, int], consumer: tuple[str, int], transport: str, **more: object) -> Iterator[Pair]:
    """The kinds of memory and the tokens of a block, of both; further keys are the consumer's."""
    keys = {"transport": transport}
    with ExitStack() as stack:
        there = Remote(stack, "prefill", *producer, 100, keys)
        here = Remote(stack, "decode", *consumer, 200, {**keys, **more})
        yield Pair(there, here)
        here.leave()
        if there.child.poll() is None:
            there.leave()


def handed_over() -> None:
    """Prompts that end in the middle of a larger block, several at once, then one that takes half of the cache."""
    for producer, consumer, transport, verify, way in (
        (("cuda", 16), ("cuda", 32), "auto", True, "device_copied_bytes"),
        (("cuda", 32), ("host", 16), "auto", False, "served_bytes"),
        (("host", 16), ("cuda", 32), "tcp", True, "served_bytes"),
        (("pieces", 32), ("cuda", 16), "auto", False, "device_copied_bytes"),
        (("sealed pieces", 16), ("pieces", 16), "auto", True, "served_bytes"),
    ):
        with pair(producer, consumer, transport, verify=verify) as both:
            both.hand_over("first", 80)
            tokens, per = 112, 4
            theirs, ours = both.blocks(per * 128)
            a, b = 128 // both.producer.block, 128 // both.consumer.block
            for turn in range(per):
                chosen = theirs[turn * a : (turn + 1) * a], ours[turn * b : (turn + 1) * b]
                mine, other = chosen[1][: -(-tokens // both.consumer.block)], chosen[0]
                other = other[: -(-tokens // both.producer.block)]
                params = both.producer.prefilled(f"p-{turn}", other, tokens)
                both.consumer.arrive(f"d-{turn}", params)
                both.consumer.load(f"d-{turn}", params, mine, tokens)
                both.expect(tokens, other, mine)
            for turn in range(per):
                assert both.consumer.over("finished_recving", f"d-{turn}") is None
                both.producer.over("finished_sending", f"p-{turn}")
            both.check("four at once")
            both.hand_over("long", TOKENS // 2)
            names = sorted(["first", "long", *map(str, range(per))])
            assert both.consumer.ended("finished_recving") == [f"d-{name}" for name in names]
            assert both.producer.ended("finished_sending") == [f"p-{name}" for name in names]
            figures = both.consumer.figures()
            assert (figures["reported"]["recvs"], figures["reported"]["bytes"]) == (len(names), both.moved), figures
            ways = {key: figures["agent"][key] for key in ("device_copied_bytes", "one_sided_bytes", "served_bytes")}
            assert ways == {**dict.fromkeys(ways, 0), way: both.moved}, ways
            print(f"{producer} to {consumer}, {transport}, verify {verify}: {both.moved} bytes, {way}", flush=True)
            sent = both.producer.figures()
            assert (sent["reported"]["sends_read"], sent["scheduler"]["sending"]) == (len(names), 0), sent


def failure_of(both: Pair, name: str, ours: Blocks) -> str:
    """The cause of a load's failure, which names all of its blocks. No others of the consumer's have changed."""
    failure = both.consumer.over("finished_recving", f"d-{name}")
    assert failure is not None, f"{name} was loaded"
    assert failure["invalid_blocks"] == sorted(ours), failure
    found = both.consumer.caches()
    for mine, now in zip(both.ours, found, strict=True):
        # These hold anything.
        kept, new = (cache.reshape(-1, HEADS * both.consumer.block * CONTENT) for cache in (mine, now))
        kept[ours] = new[ours]
    same(name, found, both.ours)
    return str(failure["cause"])


def asleep() -> None:
    """Both engines give their memory back and get other memory at the same addresses, in turn, twice over."""
    for kind, transport in (("pieces", "auto"), ("sealed pieces", "tcp")):
        causes = []
        with pair((kind, 16), (kind, 32), transport, handshake_timeout_ms=3000) as both:
            both.hand_over("awake", 80)
            for turn in range(2):
                theirs, ours = both.blocks(160)
                lost = both.producer.prefilled(f"p-lost-{turn}", theirs, 160)
                both.producer.sleep()
                both.producer.wake(300 + 10 * turn)
                both.expect_both()
                # Its blocks hold something else now.
                both.consumer.load(f"d-lost-{turn}", lost, ours, 160)
                causes.append(failure_of(both, f"lost-{turn}", ours))
                both.hand_over(f"woken-{turn}", 176)
                theirs, ours = both.blocks(112)
                kept = both.producer.prefilled(f"p-kept-{turn}", theirs, 112)
                both.consumer.arrive(f"d-kept-{turn}", kept)
                both.consumer.sleep()
                both.consumer.wake(400 + 10 * turn)
                both.expect_both()
                both.load(f"kept-{turn}", kept, 112, theirs, ours)
                both.hand_over(f"again-{turn}", TOKENS // 2)
                # Of the last worker alone.
                agent = both.consumer.figures()["agent"]
                last = (112 + TOKENS // 2) * LAYERS * HEADS * CONTENT
                assert agent["device_copied_bytes" if transport == "auto" else "served_bytes"] == last, agent
            reported = both.consumer.figures()["reported"]
            assert (reported["recvs"], reported["bytes"]) == (7, both.moved), reported
            # What nobody fetched before the sleep is free too.
            names = [f"{name}-{turn}" for name in ("again", "kept", "lost", "woken") for turn in range(2)]
            assert both.producer.ended("finished_sending") == [f"p-{name}" for name in sorted([*names, "awake"])]
        print(f"{kind}, {transport}: {both.moved} bytes, what was lost: {causes}", flush=True)


def killed() -> None:
    """The producer is killed in a load, which fails; its successor is read."""
    for kind, transport in (("cuda", "auto"), ("pieces", "auto"), ("cuda", "tcp")):
        keys = {"transport": transport}
        with pair((kind, 16), (kind, 32), transport) as both, ExitStack() as stack:
            both.hand_over("before", 80)
            theirs, ours = both.blocks(TOKENS // 2)
            params = both.producer.prefilled("p-broken", theirs, TOKENS // 2)
            both.consumer.arrive("d-broken", params)
            # It cannot confirm what is read from it, nor send it.
            with both.producer.frozen():
                both.consumer.load("d-broken", params, ours, TOKENS // 2)
                if transport == "auto":
                    until("the device has not copied", lambda: both.consumer.copied() > both.moved)
                whole = both.consumer.free_bytes() + LAYERS * NBYTES
                both.producer.kill()
            cause = failure_of(both, "broken", ours)
            # Its memory is nobody's any more.
            until("the consumer has not unmapped it", functools.partial(both.has_free, whole))
            both.producer = Remote(stack, "prefill", kind, 16, 300, keys)
            both.expect_both()
            both.hand_over("after", TOKENS // 2)
            both.producer.leave()
        print(f"{kind}, {transport}: {both.moved} bytes, what was broken: {cause}", flush=True)


def verified() -> None:
    """With `verify` a load fails while the producer's cache changes, and is good again afterwards."""
    for kind, transport in (("cuda", "auto"), ("cuda", "tcp")):
        with pair((kind, 16), (kind, 32), transport, verify=True) as both:
            both.hand_over("before", 80)
            both.producer.scribble()
            causes: list[str] = []
            deadline = time.monotonic() + GENEROUS
            # Sooner or later the cache changes between a load and its digest.
            while not causes:
                assert time.monotonic() < deadline, "no digest ever differed"
                name, (theirs, ours) = f"{time.monotonic()}", both.blocks(TOKENS // 2)
                params = both.producer.prefilled(f"p-{name}", theirs, TOKENS // 2)
                both.consumer.arrive(f"d-{name}", params)
                both.consumer.load(f"d-{name}", params, ours, TOKENS // 2)
                failure = both.consumer.over("finished_recving", f"d-{name}")
                causes = [f"{failure['cause']}, {failure['message']}"] if failure is not None else []
            both.producer.be_quiet()
            both.expect_both()
            both.hand_over("after", TOKENS // 2)
        assert "digest" in causes[0], causes
        print(f"{kind}, {transport}: {causes[0]}", flush=True)


def main() -> None:
    """Runs what the argument names."""
    globals()[sys.argv[1].replace("-", "_")]()


if __name__ == "__main__":
    main()
