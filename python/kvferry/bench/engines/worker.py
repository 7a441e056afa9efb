"""kvferry's workers and scheduler sides, as a connector drives them.

A round is one hand-over per request: the other side, the producer, grants its blocks; the starting side, the consumer,
has held the requests for a while, as an engine has while they wait, and hands its worker the step with the loads. Timed
from that call until the worker has reported the last one: the producer has said by then that the lease still held.
"""

from __future__ import annotations

import os
import time
from typing import Any

from ... import Scheduler, Worker
from ...worker import decode_report
from ..cache import GROUPS, TOKENS, area, start_scheduler
from ..memory import Memory
from .engine import CallerClock, Setup, Stopwatch, Took, transport_of

_LIMIT_S = 120.0


def _worker(name: str, setup: Setup, memory: Memory) -> Worker:
    work = setup.work
    worker = Worker(
        {"engine_id": name, "transport": transport_of(setup), "compat": [["model", "bench"]], **setup.options}
    )
    areas = []
    for layer in range(work.layers):
        region = worker.register(*memory.layer(layer), memory.kind)
        areas.append(area(f"layer.{layer}", work.pool_blocks, work.block_bytes, region=region))
    worker.set_geometry({"groups": GROUPS, "areas": areas})
    return worker


def _submit(scheduler: Scheduler, worker: Worker) -> None:
    while scheduler.has_pending():
        worker.submit(scheduler.step())


class Starter:
    """See `engines.Starter`: the consumer. It waits asleep for reports; with `poll_s` it looks at intervals."""

    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        if setup.work.direction != "read":
            raise ValueError("workers read; --direction write goes with --api agent")
        self._work, self._poll_s = setup.work, setup.poll_s
        self._pids = (os.getpid(), other)
        self._worker = _worker("consumer", setup, memory)
        self._scheduler = start_scheduler("consumer")
        self._blocks = [written for written, _ in setup.work.ids()]

    def meet(self, hello: Any) -> None:
        """The first request's address does it."""

    def warm(self) -> None:
        """The hold does it."""

    def run(self, prepared: Any) -> Took:
        worker, scheduler = self._worker, self._scheduler
        tokens = self._work.blocks * TOKENS
        for request, params in prepared:
            scheduler.arrived(request, params)
        _submit(scheduler, worker)
        # As long as a request waits in an engine: the hold has reached the producer then.
        time.sleep(0.02)
        for (request, params), blocks in zip(prepared, self._blocks, strict=True):
            scheduler.allocated(request, params, [blocks], tokens, tokens)
        step = scheduler.step()
        left = {request for request, _ in prepared}
        told, reports = [], []
        reported_at = 0.0
        caller = CallerClock()
        watch = Stopwatch(self._pids)
        caller.call(worker.submit, step)
        while left:
            if self._poll_s:
                time.sleep(self._poll_s)
                encoded = caller.call(worker.poll_encoded)
            else:
                before = time.thread_time()
                encoded = worker.wait_encoded(_LIMIT_S)
                caller.asleep(time.thread_time() - before)
            reported_at = time.monotonic()
            if encoded is None:
                if time.monotonic() - watch.start > _LIMIT_S:
                    raise TimeoutError(f"{sorted(left)} were not reported within {_LIMIT_S:.0f} s")
                continue
            # Not timed: a connector leaves it to the scheduler side, elsewhere.
            told.append(encoded)
            report = decode_report(encoded)
            reports.append(report)
            left -= set(report["finished_recving"])
        took = watch.took(caller, reported_at)
        # What the last receive took but for its bytes' way.
        records = [record for report in reports for record in report["records"]]
        took.extra["beside"] = took.seconds - max(record["transfer_us"] for record in records) / 1e6
        for encoded in told:
            scheduler.note(encoded)
        for report in reports:
            for failure in report["failed_recving"]:
                raise RuntimeError(f"{failure['request']}: {failure['cause']}: {failure['message']}")
        for (request, params), blocks in zip(prepared, self._blocks, strict=True):
            scheduler.finished(request, params, "complete", [blocks], tokens)
        _submit(scheduler, worker)
        return took

    def close(self) -> None:
        self._scheduler.shutdown()
        self._worker.shutdown()


class Other:
    """See `engines.Other`: the producer. It knows when its worker reports that the blocks are free."""

    def __init__(self, setup: Setup, memory: Memory) -> None:
        self._work = setup.work
        self._worker = _worker("producer", setup, memory)
        self._scheduler = start_scheduler("producer")
        self._scheduler.serve({(0, 0): self._worker.metadata()})
        self._blocks = [read for _, read in setup.work.ids()]
        self._round = 0
        self._left: set[str] = set()

    def hello(self) -> Any:
        return None

    def expect(self) -> Any:
        self._round += 1
        prepared = []
        for index, blocks in enumerate(self._blocks):
            request = f"{self._round}.{index}"
            keep, params = self._scheduler.finished(
                request, {"do_remote_decode": True}, "complete", [blocks], self._work.blocks * TOKENS
            )
            if not keep or params is None:
                raise RuntimeError("the producer's scheduler side granted no lease")
            prepared.append((request, params))
        _submit(self._scheduler, self._worker)
        self._left = {request for request, _ in prepared}
        return prepared

    def known(self, timeout: float) -> float | None:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            report = self._worker.wait_encoded(left)
            if report is None:
                continue
            outcome = self._scheduler.report(report)
            now = time.monotonic()
            self._left -= set(outcome["finished_sending"])
            if not self._left:
                _submit(self._scheduler, self._worker)
                return now
        raise TimeoutError(f"{sorted(self._left)} were not released within {timeout:.0f} s")

    def close(self) -> None:
        self._scheduler.shutdown()
        self._worker.shutdown()


starter, other = Starter, Other
