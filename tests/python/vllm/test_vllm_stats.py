"""Figures: laws of aggregation, the log line, and Prometheus metrics through vLLM's own classes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvferry import Report
from kvferry.vllm.stats import CAUSES, COUNTERS, SERIES, KvferryPromMetrics, KvferryStats
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats


def report(scale: int = 1, cause: str | None = None) -> Report:
    return {
        "rank": {"pp": 0, "tp": 0},
        "finished_sending": [],
        "finished_recving": ["r"],
        "failed_recving": [],
        "records": [
            {
                "request": "r",
                "remote_request": "p",
                "blocks": 3 * scale,
                "bytes": 3 * scale * 2**20,
                "operations": 2 * scale,
                "queued_us": 500 * scale,
                "transfer_us": 20_000 * scale,
                "confirm_us": 1_000 * scale,
                "cause": cause,
            }
        ],
        "stats": {
            "recvs": 0 if cause else 1,
            "recv_failures": {cause: 1} if cause else {},
            "bytes": 3 * scale * 2**20,
            "blocks": 3 * scale,
            "operations": 2 * scale,
            "sends_read": scale,
            "sends_released": 0,
            "sends_expired": 2,
            "renewals": 4,
            "handshakes": 1,
            "handshake_failures": 0,
        },
    }


ONE, TWO, LOST = (KvferryStats.from_report(r) for r in (report(), report(2), report(3, "lease_expired")))


def total(stats: KvferryStats) -> dict[str, Any]:
    return {k: sorted(v) if isinstance(v, list) else v for k, v in stats.data.items()}


def test_aggregate_adds_in_any_order() -> None:
    expected = total(ONE.aggregate(TWO).aggregate(LOST))
    for a, b, c in itertools.permutations((ONE, TWO, LOST)):
        assert total(a.aggregate(b).aggregate(c)) == total(a.aggregate(b.aggregate(c))) == expected
    assert expected["recvs"] == 2
    assert expected["recv_failures"] == {"lease_expired": 1}
    assert expected["transfer_seconds"] == [0.02, 0.04]
    assert expected["sends_expired"] == 6
    assert ONE.aggregate(KvferryStats()).data == ONE.data == KvferryStats().aggregate(ONE).data


def test_aggregate_changes_neither_operand() -> None:
    before = total(ONE), total(TWO)
    ONE.aggregate(TWO)
    assert (total(ONE), total(TWO)) == before


def test_emptiness() -> None:
    stats = KvferryStats()
    assert stats.is_empty()
    assert not ONE.is_empty()
    assert not KvferryStats({"recv_failures": {"timeout": 1}}).is_empty()
    copy = KvferryStats(dict(ONE.data))
    copy.reset()
    assert copy.is_empty()


def test_travels_as_plain_data() -> None:
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(LOST.aggregate(TWO).to_dict()))
    assert KvferryStats(data).data == LOST.aggregate(TWO).data


def test_log_line() -> None:
    line = ONE.aggregate(TWO).aggregate(LOST).reduce()
    assert line["Receives"] == 2
    assert line["Failed receives"] == 1
    assert line["Failed (lease_expired)"] == 1
    assert line["MB received"] == 9
    assert line["Avg transfer time (ms)"] == 30
    assert line["Max transfer time (ms)"] == 40
    assert line["Throughput (MB/s)"] == 150
    assert all(value == 0 for value in KvferryStats().reduce().values())


def test_beside_another_connectors_figures() -> None:
    left = MultiKVConnectorStats({"KvferryConnector": ONE})
    merged = left.aggregate(MultiKVConnectorStats({"KvferryConnector": TWO}))
    assert merged["KvferryConnector"].data["recvs"] == 2


def registered(registry: CollectorRegistry) -> KvferryPromMetrics:
    def bound(kind: type) -> Any:
        return lambda **options: kind(registry=registry, **options)

    types = {kind: bound(kind) for kind in (Gauge, Counter, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return KvferryPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_prometheus_metrics() -> None:
    registry = CollectorRegistry()
    metrics = registered(registry)
    metrics.observe(ONE.aggregate(LOST).to_dict(), 1)
    metrics.observe(TWO.to_dict(), 1)

    def value(name: str, engine: str, **labels: str) -> float | None:
        labels = {"model_name": "m", "engine": engine, **labels}
        found: float | None = registry.get_sample_value(f"vllm:kvferry_{name}", labels)
        return found

    assert value("recvs_total", "1") == 2
    assert value("recvs_total", "0") == 0
    assert value("bytes_total", "1") == 18 * 2**20
    assert value("sends_expired_total", "1") == 6
    assert value("recv_failures_total", "1", cause="lease_expired") == 1
    assert [value("recv_failures_total", "0", cause=cause) for cause in CAUSES] == [0] * len(CAUSES)
    assert value("transfer_seconds_count", "1") == 2
    assert value("transfer_seconds_sum", "1") == pytest.approx(0.06)
    assert value("recv_bytes_sum", "1") == 9 * 2**20


def test_every_metric_has_a_help_text() -> None:
    registry = CollectorRegistry()
    registered(registry)
    families = {family.name: family.documentation for family in registry.collect()}
    assert len(families) == len(COUNTERS) + len(SERIES) + 1
    assert all(name.startswith("vllm:kvferry_") and text.endswith(".") for name, text in families.items())
