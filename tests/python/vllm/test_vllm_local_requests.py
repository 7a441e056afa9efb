"""Requests without a hand-over are counted: swapped roles, and proxies that drop the params, make nothing fail."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvferry.vllm.config import parse_options
from kvferry.vllm.metadata import KvferryConnectorMetadata, RefusedLoad
from kvferry.vllm.stats import KvferryStats
from kvferry.vllm.worker import WorkerSide
from lone_scheduler import LoneScheduler
from mini_config import Settings, kv_cache_config, vllm_config, write_model
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


@pytest.mark.parametrize(
    ("given", "variable", "counts"),
    [({}, "1", True), ({}, "0", False), ({"telemetry": False}, "1", False), ({"telemetry": True}, "0", True)],
)
def test_what_the_connector_counts_itself_is_switched_off_too(
    given: dict[str, Any], variable: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the scheduler side requests without a hand-over, in workers loads that are refused."""
    monkeypatch.setenv("KVFERRY_TELEMETRY", variable)
    model = write_model(tmp_path)
    with ExitStack() as stack:
        engine = LoneScheduler(stack, "kv_consumer", tmp_path, **given)
        engine.add("local", prompt(1, 40), 1, None)
        assert (engine.connector.get_kv_connector_stats() is not None) == counts
    settings = Settings("kv_consumer", model, 1)
    worker = WorkerSide(vllm_config(settings), kv_cache_config(settings), parse_options(given))
    worker.submit(KvferryConnectorMetadata(refused={"refused": RefusedLoad("why", (1,))}))
    assert worker.collect().failed_recving == {"refused"}
    assert (worker.take_stats() is not None) == counts
