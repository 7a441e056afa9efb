"""A producer in a process of its own and a consumer in the test's, each of one rank, for tests of what they tell."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from kvferry import Scheduler, Worker, stats
from lab.process import GENEROUS, Remote, preload

BLOCKS, TOKENS, CONTENT = 64, 16, 4096
BLOCK = TOKENS * CONTENT
"""Bytes: longer than what is gathered into messages, so that over shared memory they are copied by the kernel."""
GROUPS = [{"kind": "full", "block_size": TOKENS}]

# What all that is forked would import for itself.
preload("numpy", "pytest")


def worker_of(engine: str, address: int, **more: object) -> Worker:
    worker = Worker({"engine_id": engine, "transport": "tcp", "compat": [["model", "m"]], **more})
    worker.register(address, BLOCKS * BLOCK)
    area = {"layer": "l", "part": "kv", "group": 0, "region": 0, "offset": 0, "num_blocks": BLOCKS, "heads": 1}
    area |= {"block_stride": BLOCK, "first_head": 0, "total_heads": 1, "head_stride": BLOCK, "tokens": TOKENS}
    worker.set_geometry({"groups": GROUPS, "areas": [{**area, "token_stride": CONTENT, "content": CONTENT}]})
    return worker


def scheduler_of(engine: str, **more: object) -> Scheduler:
    return Scheduler(
        {"engine_id": engine, "groups": GROUPS, "null_block": None, "host": "127.0.0.1", "port": 0, **more}
    )


class Producer:
    """The producer's process: grants what it is asked for, and damages itself when told to."""

    def __init__(self, more: dict[str, object], lease_ms: int) -> None:
        self.memory = mmap.mmap(-1, BLOCKS * BLOCK)
        self.cache = np.frombuffer(self.memory, dtype=np.uint8)
        self.worker = worker_of("prefill", self.cache.ctypes.data, **more)
        self.scheduler = scheduler_of("prefill", lease_ms=lease_ms)
        host, port = self.scheduler.serve({(0, 0): self.worker.metadata()})
        self.place = {"remote_engine_id": "prefill", "remote_host": host, "remote_port": port}
        self.changing = threading.Event()
        self.steps()

    def steps(self) -> None:
        while self.scheduler.has_pending():
            self.worker.submit(self.scheduler.step())

    def grant(self, request: str, blocks: list[int]) -> Any:
        wanted = {"do_remote_decode": True}
        keep, params = self.scheduler.finished(request, wanted, "complete", [blocks], len(blocks) * TOKENS)
        assert keep
        self.steps()
        return params

    def awaited(self, name: str) -> Any:
        """The params of who asks for a prefill before it is over."""
        return {"do_remote_prefill": True, "transfer_id": name, **self.place}

    def is_followed(self, name: str) -> bool:
        return self.scheduler.is_followed(name)

    def write(self, request: str, name: str, blocks: list[int], value: int) -> None:
        """A prompt is computed up to and with these blocks, of which the last one is new; it holds `value`."""
        self.cache[blocks[-1] * BLOCK : (blocks[-1] + 1) * BLOCK] = value
        self.scheduler.progressed(request, name, [blocks], len(blocks) * TOKENS)

    def give_away(self, request: str, name: str, blocks: list[int]) -> None:
        for block in blocks:
            self.cache[block * BLOCK : (block + 1) * BLOCK] = 255
        self.scheduler.progressed(request, name, [], 0)

    def finish(self, request: str, name: str, blocks: list[int]) -> None:
        wanted = {"do_remote_decode": True, "transfer_id": name}
        keep, _ = self.scheduler.finished(request, wanted, "complete", [blocks], len(blocks) * TOKENS)
        assert keep
        self.steps()

    def report(self) -> bool:
        """Whether a grant was told; who awaits the prefill knows then."""
        report = self.worker.wait_encoded(1.0)
        return report is not None and bool(self.scheduler.report(report)["granted"])

    def sent(self) -> list[str]:
        report = self.worker.poll_encoded()
        return [] if report is None else self.scheduler.report(report)["finished_sending"]

    def figures(self) -> Any:
        return {"labels": {"side": "prefill"}, "scheduler": self.scheduler.stats(), **self.worker.stats()}

    def protect(self) -> None:
        """Nobody may read the cache any more, the kernel included."""
        result = ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.cache.ctypes.data), BLOCKS * BLOCK, 0)  # PROT_NONE
        assert result == 0

    def change(self) -> None:
        """The cache changes all the time from now on."""

        def run() -> None:
            while not self.changing.wait(0):
                self.cache += 1

        threading.Thread(target=run, daemon=True).start()

    def close(self) -> None:
        self.changing.set()
        self.worker.shutdown()
        self.scheduler.shutdown()


class Pair:
    """A producer in a process of its own, and a consumer here."""

    def __init__(self, stack: ExitStack, lease_ms: int = 30_000, producer: Any = None, **consumer: object) -> None:
        config = {"transport": consumer.get("transport", "tcp"), **(producer or {})}
        self.producer = stack.enter_context(Remote(Producer, config, lease_ms, name="the producer"))
        self.ask = self.producer.ask
        self.producer.wait_up()
        self.cache = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
        self.worker = stack.enter_context(worker_of("decode", self.cache.ctypes.data, **consumer))
        self.scheduler = stack.enter_context(scheduler_of("decode"))
        self.scheduler.set_engine({(0, 0): self.worker.metadata()})
        self.count = 0
        self.reported: dict[str, Any] = {}

    def grant(self, number: int = 4) -> tuple[str, Any]:
        self.count += 1
        return f"r{self.count}", self.ask("grant", f"p{self.count}", list(range(number)))

    def load(self, request: str, params: Any, number: int = 4) -> None:
        self.scheduler.arrived(request, params)
        self.scheduler.allocated(request, params, [list(range(number))], number * TOKENS, number * TOKENS)
        self.worker.submit(self.scheduler.step())

    def over(self, request: str) -> str | None:
        """The cause of a receive's failure, when it is over; None for one that succeeded."""
        deadline = time.monotonic() + GENEROUS
        while time.monotonic() < deadline:
            report = self.worker.wait_encoded(1.0)
            if report is None:
                continue
            outcome = self.scheduler.report(report)
            self.reported = stats.merge(self.reported, outcome["stats"])
            if request in outcome["finished_recving"]:
                causes = {failure["request"]: failure["cause"] for failure in outcome["failed_recving"]}
                return causes.get(request)
        raise AssertionError(f"{request} is not over")

    def hand_over(self, number: int = 4) -> str | None:
        request, params = self.grant(number)
        self.load(request, params, number)
        return self.over(request)

    def totals(self) -> dict[str, Any]:
        totals: Any = self.worker.stats()["totals"]
        return totals


@contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, **options)


def until(what: str, enough: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS
    while not enough():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
