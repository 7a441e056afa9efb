"""Cold: from first contact to the first bytes, with an engine of one rank and of many.

A new worker asks the producer's listener once for all ranks, connects to them, and loads one block of every layer from
each. Timed from the step with the hold and the load until one rank's bytes are there, and until the load is reported,
which takes the bytes of all ranks and the producer's word that the lease still held. Every byte is compared.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

from .. import Worker
from .cache import GROUPS, TOKENS, area, start_scheduler
from .figures import Progress, Row, columns, number, percentile
from .remote import Remote

LAYERS = 64
_LIMIT_S = 120.0
RUN = TOKENS * 64
"""Bytes of a block's one head in one layer."""
_BLOCK = 3
"""The block that is read."""


def _geometry(blocks: int, heads: int, **more: int) -> dict[str, object]:
    size = heads * RUN
    return {
        "groups": GROUPS,
        "areas": [area(f"layer.{i}", blocks, size, heads, offset=i * blocks * size, **more) for i in range(LAYERS)],
    }


def cache(blocks: int, heads: int) -> Any:
    """`[layer, block, head, byte]`, untouched: only what is read takes memory."""
    return np.frombuffer(mmap.mmap(-1, LAYERS * blocks * heads * RUN), dtype=np.uint8).reshape(
        LAYERS, blocks, heads, RUN
    )


def _expected() -> Any:
    words = np.arange(LAYERS * RUN, dtype=np.uint64) * np.uint64(0x9E3779B1)
    return (words >> np.uint64(7)).astype(np.uint8).reshape(LAYERS, RUN)


def _worker(engine: str, transport: str, rank: int, ranks: int) -> Worker:
    config = {"engine_id": engine, "transport": transport, "compat": [["model", "bench"]]}
    return Worker({**config, "tp_rank": rank, "tp_size": ranks})


class _Producer:
    """An engine of `ranks` ranks, all in one process, over one cache."""

    def __init__(self, transport: str, ranks: int, blocks: int) -> None:
        self._cache = cache(blocks, 1)
        self._cache[:, _BLOCK, 0] = _expected()
        self._workers = []
        for rank in range(ranks):
            worker = _worker("producer", transport, rank, ranks)
            worker.register(self._cache.ctypes.data, self._cache.nbytes)
            worker.set_geometry(_geometry(blocks, 1, first_head=rank, total_heads=ranks))
            self._workers.append(worker)
        self._scheduler = start_scheduler("producer", ranks)
        self._scheduler.serve({(0, rank): worker.metadata() for rank, worker in enumerate(self._workers)})

    def grant(self, request: str) -> dict[str, object]:
        keep, params = self._scheduler.finished(request, {"do_remote_decode": True}, "complete", [[_BLOCK]], TOKENS)
        if not keep or params is None:
            raise RuntimeError("the producer's scheduler side granted no lease")
        step = self._scheduler.step()
        for worker in self._workers:
            worker.submit(step)
            # Nothing is done with what earlier requests have left.
            worker.poll()
        return params

    def close(self) -> None:
        self._scheduler.shutdown()
        for worker in self._workers:
            worker.shutdown()


class _Consumer:
    """An engine of one rank, made anew for every round."""

    def __init__(self, transport: str, ranks: int, blocks: int) -> None:
        self._transport, self._ranks, self._blocks = transport, ranks, blocks
        self._cache = cache(blocks, ranks)

    def run(self, request: str, params: dict[str, object]) -> tuple[float, float]:
        """Seconds until the first bytes and until the report."""
        self._cache[:, _BLOCK] = 0
        with _worker("consumer", self._transport, 0, 1) as worker, start_scheduler("consumer") as scheduler:
            worker.register(self._cache.ctypes.data, self._cache.nbytes)
            worker.set_geometry(_geometry(self._blocks, self._ranks))
            scheduler.set_engine({(0, 0): worker.metadata()})
            time.sleep(0.05)
            start = time.monotonic()
            scheduler.arrived(request, params)
            scheduler.allocated(request, params, [[_BLOCK]], TOKENS, TOKENS)
            while scheduler.has_pending():
                worker.submit(scheduler.step())
            while True:
                report = worker.wait(_LIMIT_S)
                took = time.monotonic() - start
                if report is None:
                    raise TimeoutError(f"{request} was not reported within {_LIMIT_S:.0f} s")
                for failure in report["failed_recving"]:
                    raise RuntimeError(f"{failure['cause']}: {failure['message']}")
                if request in report["finished_recving"]:
                    break
        if not (self._cache[:, _BLOCK] == _expected()[:, None, :]).all():
            raise RuntimeError("wrong bytes were read")
        (record,) = report["records"]
        after = record["transfer_us"] - record["first_us"] + record["confirm_us"]
        return took - after / 1e6, took

    def close(self) -> None:
        """There is nothing left."""


REPORT = "kvferry, all reported"
"""Not what is compared with others."""
Times = dict[str, list[float]]


def measure(
    transport: str, ranks: int, total_blocks: int, rounds: int, others: Mapping[str, Remote] | None = None
) -> Times:
    """Milliseconds by engine. `total_blocks` counts a rank's blocks of all layers. `others` are run in turn with ours,
    by a method `run` that returns its seconds."""
    blocks = total_blocks // LAYERS
    times: Times = {"kvferry": [], REPORT: []}
    with ExitStack() as stack:
        producer = stack.enter_context(Remote("producer", _Producer, transport, ranks, blocks))
        consumer = stack.enter_context(Remote("consumer", _Consumer, transport, ranks, blocks))
        progress = Progress(text(ranks, total_blocks), rounds + 1)
        stack.callback(progress.end)
        for index in range(rounds + 1):
            params = producer.ask("grant", f"request {index}")
            first, reported = consumer.ask("run", f"request {index}", params)
            took = {"kvferry": first, REPORT: reported}
            for name, one in (others or {}).items():
                one.resume()
                took[name] = one.ask("run")
                one.pause()
            if index:
                for name, seconds in took.items():
                    times.setdefault(name, []).append(seconds * 1e3)
            progress.step()
    return times


def text(ranks: int, total_blocks: int) -> str:
    """The work in words."""
    return f"first contact to first byte, {ranks} rank{'' if ranks == 1 else 's'} of {total_blocks:,} blocks"


def summary(transport: str, ranks: int, total_blocks: int, times: Times) -> Row:
    """The row."""
    ours = times["kvferry"]
    figures = {"ours_ms": median(ours), "ours_p99_ms": percentile(ours, 0.99)}
    return {"work": text(ranks, total_blocks), "transport": transport, **figures}


def table(transport: str, ranks: int, total_blocks: int, times: Times) -> str:
    """All engines."""
    ours = median(times["kvferry"])
    lines = [
        (name, number(median(some)), number(percentile(some, 0.99)), number(ours / median(some)))
        for name, some in times.items()
    ]
    title = f"{text(ranks, total_blocks)}, {transport}, {len(times['kvferry'])} alternating rounds"
    return f"{title}\n{columns(('', 'median ms', 'p99 ms', 'kvferry / it'), lines)}"
