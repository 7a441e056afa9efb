"""Figures: laws of aggregation, the log line, and Prometheus metrics through vLLM's own classes."""

from __future__ import annotations

import bisect
import copy
import itertools
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvferry import stats
from kvferry.vllm.stats import PREFIX, KvferryPromMetrics, KvferryStats, observations, worker_metrics
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats


def histogram(key: str, *values: int) -> dict[str, Any]:
    """A histogram in a stats map, of values in its unit there."""
    bounds = worker_metrics()[key].bounds
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect.bisect_left(bounds, value)] += 1
    while counts and counts[-1] == 0:
        counts.pop()
    return {"counts": counts, "sum": sum(values)}


def made(scale: int = 1, cause: str | None = None) -> KvferryStats:
    report: Any = {
        "stats": {
            "recvs": 0 if cause else 1,
            "recv_failures": {cause: 1} if cause else {},
            "bytes": 0 if cause else 3 * scale * 2**20,
            "blocks": 3 * scale,
            "operations": 2 * scale,
            "sends_read": scale,
            "sends_expired": 2,
            "renewals": 4,
            "transfer_time": histogram("transfer_time", *([] if cause else [20_000 * scale])),
            "recv_bytes": histogram("recv_bytes", *([] if cause else [3 * scale * 2**20])),
            "leases": 3 - 2 * scale,
        }
    }
    return KvferryStats.from_report(report)


ONE, TWO, LOST = made(), made(2), made(3, "lease_expired")


def test_aggregate_adds_in_any_order() -> None:
    expected = ONE.aggregate(TWO).aggregate(LOST).data
    for a, b, c in itertools.permutations((ONE, TWO, LOST)):
        assert a.aggregate(b).aggregate(c).data == a.aggregate(b.aggregate(c)).data == expected
    assert expected["recvs"] == 2
    assert expected["recv_failures"] == {"lease_expired": 1}
    assert expected["transfer_time"] == histogram("transfer_time", 20_000, 40_000)
    assert (expected["sends_expired"], expected["leases"]) == (6, -3)
    assert ONE.aggregate(KvferryStats()).data == KvferryStats().aggregate(ONE).data == stats.merge(ONE.data, {})


def test_aggregate_changes_neither_operand() -> None:
    before = copy.deepcopy((ONE.data, TWO.data))
    ONE.aggregate(TWO)
    assert (ONE.data, TWO.data) == before


def test_its_size_does_not_grow_with_what_happened() -> None:
    many = KvferryStats()
    for _ in range(100):
        many = many.aggregate(ONE)
    assert many.data["recvs"] == 100
    assert len(msgspec.msgpack.encode(many.data)) <= len(msgspec.msgpack.encode(ONE.aggregate(TWO).data)) + 64


def test_emptiness() -> None:
    empty = KvferryStats()
    assert empty.is_empty()
    assert KvferryStats(stats.merge({}, {})).is_empty()
    assert not ONE.is_empty()
    assert not KvferryStats({"recv_failures": {"timeout": 1}}).is_empty()
    assert not KvferryStats({"transfer_time": histogram("transfer_time", 0)}).is_empty()
    again = KvferryStats(dict(ONE.data))
    again.reset()
    assert again.is_empty()


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
    # 40 ms is in the bucket from 25 to 50 ms, the only value there of two: 90 % are at four fifths of its width.
    assert line["P90 transfer time (ms)"] == 45
    assert line["Throughput (MB/s)"] == 150
    assert all(value == 0 for value in KvferryStats().reduce().values())
    ahead = KvferryStats({**TWO.data, "ahead_bytes": TWO.data["bytes"]}).reduce()
    assert ahead["MB received while prefilling"] == ahead["MB received"]
    assert ahead["Throughput (MB/s)"] == 0
    beyond = KvferryStats({"transfer_time": histogram("transfer_time", 99_000_000)})
    assert beyond.reduce()["P90 transfer time (ms)"] == 30_000


def test_beside_another_connectors_figures() -> None:
    left = MultiKVConnectorStats({"KvferryConnector": ONE})
    merged = left.aggregate(MultiKVConnectorStats({"KvferryConnector": TWO}))
    assert merged["KvferryConnector"].data["recvs"] == 2


@pytest.mark.parametrize("key", ["transfer_time", "recv_bytes"])
def test_observations_have_the_histogram_s_buckets_and_sum(key: str) -> None:
    metric, draw = worker_metrics()[key], random.Random(7)
    for count in (0, 1, 2, 50):
        values = [int(2 ** draw.uniform(0, 45)) for _ in range(count)]
        given = histogram(key, *values, *metric.bounds[:count])
        chosen = [round(one * metric.divisor) for one in observations(metric, given)]
        assert histogram(key, *chosen) == given


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
        found: float | None = registry.get_sample_value(f"{PREFIX}{name}", labels)
        return found

    causes = worker_metrics()["recv_failures"].causes
    assert value("recvs_total", "1") == 2
    assert value("recvs_total", "0") == 0
    assert value("bytes_total", "1") == 9 * 2**20
    assert value("sends_expired_total", "1") == 6
    assert value("recv_failures_total", "1", cause="lease_expired") == 1
    assert [value("recv_failures_total", "0", cause=cause) for cause in causes] == [0] * len(causes)
    assert value("transfer_seconds_count", "1") == 2
    assert value("transfer_seconds_sum", "1") == pytest.approx(0.06)
    assert [value("transfer_seconds_bucket", "1", le=le) for le in ("0.01", "0.025", "0.05", "+Inf")] == [0, 1, 2, 2]
    assert value("recv_bytes_sum", "1") == 9 * 2**20
    assert value("leases", "1") == -3
    metrics.observe({"leases": 5, "unknown of a later release": 7}, 1)
    assert value("leases", "1") == 2


def test_every_metric_has_a_help_text() -> None:
    registry = CollectorRegistry()
    registered(registry)
    families = {family.name: family.documentation for family in registry.collect()}
    assert families == {PREFIX + metric.name: metric.help for metric in worker_metrics().values()}
