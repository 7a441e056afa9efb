"""`kv_transfer_params` as proxies send them: with keys that are null, which counts as missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgpack
import numpy as np
import pytest
from kvferry import InvalidArgumentError, Scheduler
from pair import BLOCK, BLOCKS, TOKENS, scheduler_of, worker_of

KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "transfer_id",
    "remote_engine_id",
    "remote_incarnation",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "remote_lease_ms",
    "remote_lease_id",
    "tp_size",
    "pp_size",
    "dcp_size",
    "transfer_mode",
)
"""All that a proxy may send."""
NULLS: dict[str, object] = dict.fromkeys(KEYS)
PROMPT = 4 * TOKENS


@pytest.fixture
def producer() -> Iterator[Scheduler]:
    with ExitStack() as stack:
        cache = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
        worker = stack.enter_context(worker_of("prefill", cache.ctypes.data))
        scheduler = stack.enter_context(scheduler_of("prefill"))
        scheduler.serve({(0, 0): worker.metadata()})
        yield scheduler


@pytest.fixture
def consumer() -> Iterator[Scheduler]:
    with scheduler_of("decode") as scheduler:
        yield scheduler


def prefilled(producer: Scheduler, request: str, asked: dict[str, object]) -> dict[str, object]:
    keep, params = producer.finished(request, asked, "complete", [[1, 2, 3, 4]], PROMPT)
    assert keep
    assert params is not None
    return params


def outcome(consumer: Scheduler, request: str, params: dict[str, object] | bytes) -> tuple[Any, ...]:
    """What a decode engine makes of the params, and what it then queues."""
    said: list[Any] = []
    for call in (
        lambda: consumer.arrived(request, params),
        lambda: consumer.matched(request, params, PROMPT, 0),
        lambda: consumer.allocated(request, params, [[1, 2, 3, 4]], PROMPT, PROMPT),
    ):
        try:
            said.append(call())
        except InvalidArgumentError as error:
            said.append(str(error))
    stats = consumer.stats()
    return (*said, stats["holds"], stats["loads"])


@pytest.mark.parametrize("key", [key for key in KEYS if key != "do_remote_decode"])
def test_a_prefill_with_one_key_null_is_handed_over(producer: Scheduler, key: str) -> None:
    assert prefilled(producer, f"p-{key}", {"do_remote_decode": True, key: None})["do_remote_prefill"] is True


def test_a_prefill_with_every_other_key_null_is_handed_over(producer: Scheduler) -> None:
    assert prefilled(producer, "p", {**NULLS, "do_remote_decode": True})["remote_request_id"] == "p"
    keep, params = producer.finished("neither", NULLS, "complete", [[1, 2, 3, 4]], PROMPT)
    assert (keep, params) == (False, None)


@pytest.mark.parametrize("key", KEYS)
def test_a_load_with_one_key_null_is_that_without_the_key(producer: Scheduler, key: str) -> None:
    params = prefilled(producer, f"p-{key}", {"do_remote_decode": True})
    missing = {name: value for name, value in params.items() if name != key}
    with scheduler_of("decode") as one, scheduler_of("decode") as other:
        assert outcome(one, "d", {**params, key: None}) == outcome(other, "d", missing)


def test_loads_with_every_key_that_is_not_needed_null(producer: Scheduler, consumer: Scheduler) -> None:
    params = prefilled(producer, "p", {"do_remote_decode": True})
    needed = ("do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    few = {key: params[key] for key in (*needed, "remote_block_ids")}
    assert outcome(consumer, "d", {**NULLS, **few}) == (None, (PROMPT, True), None, 1, 1)
    named = {key: params[key] for key in ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port")}
    assert outcome(consumer, "e", {**NULLS, **named, "transfer_id": "x"}) == (None, (PROMPT, True), None, 2, 2)


def test_params_may_be_packed_once(producer: Scheduler, consumer: Scheduler) -> None:
    params = prefilled(producer, "p", {"do_remote_decode": True})
    with scheduler_of("decode") as other:
        assert outcome(consumer, "d", msgpack.packb(params)) == outcome(other, "d", params)
    with pytest.raises(InvalidArgumentError, match="kv_transfer_params"):
        consumer.matched("e", b"not a map", PROMPT, 0)


def test_a_load_that_cannot_be_encoded_fails_alone(producer: Scheduler, consumer: Scheduler) -> None:
    """One id more than a list holds on the wire; what else the step has reaches the workers."""
    good = prefilled(producer, "p-good", {"do_remote_decode": True})
    hostile = {**good, "remote_block_ids": [[0] * 4_194_305], "remote_num_tokens": 1 << 40}
    consumer.allocated("good", good, [[1, 2, 3, 4]], PROMPT, PROMPT)
    for call in (
        lambda: consumer.matched("hostile", hostile, PROMPT, 0),
        lambda: consumer.allocated("hostile", hostile, [[5, 6, 7, 8]], PROMPT, PROMPT),
    ):
        with pytest.raises(InvalidArgumentError, match="remote_block_ids"):
            call()
    assert b"good" in consumer.step()


def test_requests_of_other_connectors_are_not_known_whatever_their_ids(consumer: Scheduler) -> None:
    for request in ("another's", "", "x" * 600):
        consumer.over(request, "sending")
        consumer.over(request, "recving")
