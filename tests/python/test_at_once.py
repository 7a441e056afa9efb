"""A prefill that is awaited is read only when the producer's worker has its grant."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from pair import BLOCK, BLOCKS, TOKENS, scheduler_of, until, worker_of


def test_nothing_is_read_before_the_step_with_the_grant() -> None:
    """The scheduler learns of the end before the cache is written, as where a drafter runs after the sampling."""
    with ExitStack() as stack:
        there = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
        here = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
        producer = stack.enter_context(worker_of("prefill", there.ctypes.data))
        sends = stack.enter_context(scheduler_of("prefill"))
        host, port = sends.serve({(0, 0): producer.metadata()})
        consumer = stack.enter_context(worker_of("decode", here.ctypes.data))
        loads = stack.enter_context(scheduler_of("decode"))
        loads.set_engine({(0, 0): consumer.metadata()})

        place: dict[str, Any] = {"remote_engine_id": "prefill", "remote_host": host, "remote_port": port}
        loads.allocated("d", {"do_remote_prefill": True, "transfer_id": "x", **place}, [[4, 5]], 2 * TOKENS, 2 * TOKENS)
        consumer.submit(loads.step())
        until("the consumer asks", lambda: sends.stats()["listener_requests"] >= 2)
        keep, _ = sends.finished("p", {"do_remote_decode": True, "transfer_id": "x"}, "complete", [[8, 9]], 2 * TOKENS)
        assert keep
        # A reader that is told too early has read by then.
        time.sleep(0.5)
        there[8 * BLOCK : 10 * BLOCK] = np.random.default_rng(3).integers(1, 256, 2 * BLOCK, dtype=np.uint8)
        producer.submit(sends.step())

        over: list[str] = []

        def turn() -> bool:
            sent = producer.poll_encoded()
            if sent is not None:
                sends.note(sent)
            report = consumer.poll()
            if report is not None:
                assert report["failed_recving"] == []
                over.extend(report["finished_recving"])
            return bool(over)

        until("the load ends", turn)
        assert np.array_equal(here[4 * BLOCK : 6 * BLOCK], there[8 * BLOCK : 10 * BLOCK])
