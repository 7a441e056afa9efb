"""The scheduler side told in each way that a request is over: by vLLM's ids, by the workers' own reports, by both, in
either order. At the end nothing is left behind."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lone_scheduler import LoneScheduler
from mini_config import BLOCK, write_model
from mini_trio import prompt

pytestmark = pytest.mark.release

ORDERS = {
    "ids": [{"ids": True, "reports": False}],
    "both": [{"ids": True, "reports": True}],
    "reports-first": [{"ids": False, "reports": True}, {"ids": True, "reports": False}],
    "ids-first": [{"ids": True, "reports": False}, {"ids": False, "reports": True}],
}
"""What is told in which step. vLLM itself takes only ids, so that without any it keeps the request."""


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> list[dict[str, bool]]:
    order: list[dict[str, bool]] = ORDERS[request.param]
    return order


@pytest.fixture(params=[0, 600], ids=["short", "long"])
def name(request: pytest.FixtureRequest) -> str:
    """A request's name, another one in each test; a long one is none that the library takes."""
    name: str = request.node.name + "~" * request.param
    return name


def prefilled(prefill: LoneScheduler, name: str, words: list[int]) -> dict[str, Any]:
    prefill.add(name, words, 1, {"do_remote_decode": True})
    params: dict[str, Any] = prefill.until_answered(name)["params"]
    assert params["remote_block_ids"]
    return params


def sent(prefill: LoneScheduler, name: str, order: list[dict[str, bool]]) -> None:
    for told in order:
        assert name in prefill.scheduler.requests or not told["ids"]
        prefill.turn(sent=[name], **told)
    prefill.turn()
    prefill.assert_whole()


def loading(engines: tuple[LoneScheduler, LoneScheduler], name: str) -> list[int]:
    """A load has been handed to the decode engine's workers."""
    prefill, decode = engines
    words = prompt(sum(name.encode()), 70)
    params = prefilled(prefill, name, words)
    prefill.turn(sent=[name])
    decode.add(name, words, 2, params)
    assert decode.turn().step
    decode.turn()
    assert str(decode.scheduler.requests[name].status) == "WAITING_FOR_REMOTE_KVS"
    return words


def test_remote_decode(engines: tuple[LoneScheduler, LoneScheduler], order: list[dict[str, bool]], name: str) -> None:
    prefill, _ = engines
    prefilled(prefill, name, prompt(sum(name.encode()), 70))
    assert prefill.turn().grants
    sent(prefill, name, order)


def test_remote_prefill(engines: tuple[LoneScheduler, LoneScheduler], order: list[dict[str, bool]], name: str) -> None:
    _, decode = engines
    loading(engines, name)
    for told in order:
        decode.turn(received=[name], **told)
    decode.until_answered(name)
    decode.turn()
    decode.assert_whole()


def test_abort_under_the_load(
    engines: tuple[LoneScheduler, LoneScheduler], order: list[dict[str, bool]], name: str
) -> None:
    _, decode = engines
    loading(engines, name)
    decode.abort(name)
    assert name in decode.scheduler.requests, "its blocks are still written to"
    for told in order:
        decode.turn(received=[name], **told)
    decode.turn()
    decode.assert_whole()


def test_abort_after_the_load(
    engines: tuple[LoneScheduler, LoneScheduler], order: list[dict[str, bool]], name: str
) -> None:
    _, decode = engines
    loading(engines, name)
    decode.turn(received=[name], **order[0])
    if not order[0]["ids"]:
        decode.turn(received=[name], **order[1])
    decode.abort(name)
    for told in order[1:]:
        if not told["ids"]:
            decode.turn(received=[name], **told)
    decode.turn()
    decode.assert_whole()


def test_abort_before_anything_is_scheduled(engines: tuple[LoneScheduler, LoneScheduler], name: str) -> None:
    prefill, decode = engines
    words = prompt(sum(name.encode()), 70)
    params = prefilled(prefill, name, words)
    prefill.turn(sent=[name])
    decode.add(name, words, 2, params)
    decode.abort(name)
    assert decode.turn().step, "the prefill engine's blocks are given back"
    prefill.add(f"{name}-p", words, 1, {"do_remote_decode": True})
    prefill.abort(f"{name}-p")
    prefill.turn()
    for engine in engines:
        engine.assert_whole()


def test_running_requests_wait_for_the_blocks_of_conversations_that_are_let_go_of(tmp_path: Path) -> None:
    """However late workers say that they are free: none that runs is preempted."""
    model = tmp_path / "model"
    write_model(model)
    extra = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 8}
    with ExitStack() as stack:
        prefill = LoneScheduler(stack, "kv_producer", model)
        decode = LoneScheduler(stack, "kv_consumer", model, **extra)
        conversations = {"older", "newer" + "~" * 600}
        for name in sorted(conversations):
            loading((prefill, decode), name)
            decode.turn(received=[name])
            assert decode.until_answered(name)["params"]["remote_block_ids"]
        # Of 95 blocks these have 5 each, and the two that run 84, until they have 94.
        for at, name in enumerate(("one", "two")):
            decode.add(name, prompt(at, 42 * BLOCK), 5 * BLOCK, None)
        running = [decode.scheduler.requests[name] for name in ("one", "two")]
        while any(not request.is_finished() for request in running):
            before = [request.num_computed_tokens for request in running]
            decode.turn()
            if before == [request.num_computed_tokens for request in running] and before != [0, 0]:
                for _ in range(5):
                    decode.turn()
                assert conversations < set(decode.scheduler.requests)
                decode.turn(sent=conversations)
                assert conversations.isdisjoint(decode.scheduler.requests)
                conversations = set()
        assert [request.num_preemptions for request in running] == [0, 0]
        assert conversations == set()


def test_ids_of_requests_of_other_connectors(engines: tuple[LoneScheduler, LoneScheduler], name: str) -> None:
    """`MultiConnector` shows its children each other's."""
    from vllm.v1.outputs import KVConnectorOutput

    for engine in engines:
        others = KVConnectorOutput(finished_sending={"other"}, finished_recving={"another"})
        engine.connector.update_connector_output(others)
        engine.assert_whole()
