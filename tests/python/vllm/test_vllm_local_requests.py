"""Requests without a hand-over are counted: swapped roles, and proxies that drop the params, make nothing fail."""

from __future__ import annotations

from typing import Any

import pytest
from kvferry.vllm.stats import KvferryStats
from lone_scheduler import LoneScheduler
from mini_trio import prompt

PREFILL = {"do_remote_decode": True}
LOAD = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "p-1",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_block_ids": [[1, 2]],
}


def counted(engine: LoneScheduler, name: str, params: dict[str, Any] | None) -> int:
    """How many requests without a hand-over a new one with these params makes, as vLLM adds them up."""
    engine.connector.get_kv_connector_stats()
    engine.add(name, prompt(len(name), 40), 1, params)
    found = engine.connector.get_kv_connector_stats() or KvferryStats()
    return int(KvferryStats().aggregate(found).data["local_requests"])


@pytest.mark.parametrize(
    ("role", "params", "expected"),
    [
        pytest.param("prefill", PREFILL, 0, id="a-prefill"),
        pytest.param("decode", LOAD, 0, id="a-load"),
        pytest.param("prefill", None, 1, id="params-dropped-on-the-way-to-prefill"),
        pytest.param("decode", None, 1, id="params-dropped-on-the-way-to-decode"),
        pytest.param("decode", PREFILL, 1, id="swapped-decode"),
        pytest.param("prefill", LOAD, 1, id="swapped-prefill"),
    ],
)
def test_requests_without_a_hand_over_are_counted(
    engines: tuple[LoneScheduler, LoneScheduler],
    role: str,
    params: dict[str, Any] | None,
    expected: int,
    request: pytest.FixtureRequest,
) -> None:
    engine = engines[role == "decode"]
    assert counted(engine, request.node.name, params) == expected
    # Each is told once.
    assert engine.connector.get_kv_connector_stats() is None
