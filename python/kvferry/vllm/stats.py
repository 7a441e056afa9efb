"""Figures of transfers for vLLM's log line and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry import stats

if TYPE_CHECKING:
    from kvferry import Report

FAILURES = "recv_failures"
PREFIX = "vllm:kvferry_"


@cache
def worker_metrics() -> Mapping[str, stats.Metric]:
    """Returns the metrics that workers report, by their keys in `KvferryStats.data`."""
    return {metric.key: metric for metric in stats.metrics() if metric.scope == "worker"}


@dataclass
class KvferryStats(KVConnectorStats):
    """Figures of one or more ranks over some time; merging adds.

    `data` is a stats map as in `Report["stats"]`: numbers, lists and maps, because vLLM sends it between processes. Its
    size does not grow with what happened.
    """

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_report(cls, report: Report) -> KvferryStats:
        """The figures of one worker report."""
        return cls(dict(report["stats"]))

    def reset(self) -> None:
        """Drops all figures."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return _is_zero(self.data)

    def aggregate(self, other: KVConnectorStats) -> KvferryStats:
        """Returns the sum of both, as a new object."""
        return KvferryStats(stats.merge(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Returns the figures of vLLM's log line."""
        data = self.data
        failures: Mapping[str, int] = data.get(FAILURES, {})
        seconds = _sum(data, "transfer_time") / 1e6
        megabytes, early_megabytes = (data.get(key, 0) / 2**20 for key in ("bytes", "ahead_bytes"))
        line: dict[str, int | float] = {
            "Receives": data.get("recvs", 0),
            "Failed receives": sum(failures.values()),
            "MB received": round(megabytes, 3),
            "MB received while prefilling": round(early_megabytes, 3),
            "Avg transfer time (ms)": _average_ms(data, "transfer_time"),
            "P90 transfer time (ms)": _quantile_ms(data, "transfer_time", 0.9),
            "Avg hand-over time (ms)": _average_ms(data, "handover_time"),
            "P90 hand-over time (ms)": _quantile_ms(data, "handover_time", 0.9),
            "Avg queued time (ms)": _average_ms(data, "queued_time"),
            "Avg posting time (ms)": _average_ms(data, "posting_time"),
            "Avg confirm time (ms)": _average_ms(data, "confirm_time"),
            # A load's time begins when its prefill is over.
            "Throughput (MB/s)": round(max(megabytes - early_megabytes, 0) / seconds, 1) if seconds else 0,
            "Requests without a hand-over": data.get("local_requests", 0),
            "Sends granted": data.get("sends_granted", 0),
            "Sends read": data.get("sends_read", 0),
            "Sends released": data.get("sends_released", 0),
            "Sends expired": data.get("sends_expired", 0),
        }
        line.update({f"Failed ({cause})": count for cause, count in sorted(failures.items())})
        return line


def _is_zero(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_zero(part) for part in value.values())
    return not any(value) if isinstance(value, (list, tuple)) else not value


def _sum(data: Mapping[str, Any], key: str) -> int:
    return int(data.get(key, {}).get("sum", 0))


def _average_ms(data: Mapping[str, Any], key: str) -> float:
    count = sum(data.get(key, {}).get("counts", ()))
    return round(_sum(data, key) / count / 1e3, 3) if count else 0


def _quantile_ms(data: Mapping[str, Any], key: str, share: float) -> float:
    """Estimates a quantile as Prometheus does: evenly spread within a bucket, the last bound for what is above it."""
    counts: Sequence[int] = data.get(key, {}).get("counts", ())
    bounds = worker_metrics()[key].bounds
    wanted = share * sum(counts)
    for index, below in enumerate(accumulate(counts)):
        if below >= wanted > 0:
            if index >= len(bounds):
                return bounds[-1] / 1e3
            low = bounds[index - 1] if index else 0
            return round((low + (bounds[index] - low) * (1 - (below - wanted) / counts[index])) / 1e3, 3)
    return 0


def observations(metric: stats.Metric, histogram: Mapping[str, Any]) -> Iterator[float]:
    """Values in the metric's unit that fall into the histogram's buckets and have its sum.

    Prometheus' histograms can be given single values only, and those are no longer known: which ones are chosen makes
    no difference to what they show.
    """
    counts = histogram.get("counts", ())
    edges = [(low + 1, high) for low, high in zip((-1, *metric.bounds), metric.bounds, strict=False)]
    left = histogram.get("sum", 0) - sum(count * edge[0] for count, edge in zip(counts, edges, strict=False))
    if len(counts) > len(edges):
        left -= counts[-1] * (metric.bounds[-1] + 1)
    for index, count in enumerate(counts):
        low, high = edges[index] if index < len(edges) else (metric.bounds[-1] + 1, None)
        for _ in range(count):
            more = max(left, 0) if high is None else min(max(left, 0), high - low)
            left -= more
            yield (low + more) / metric.divisor


class KvferryPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics `vllm:kvferry_*`, one set of children per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._by_cause: dict[str, Any] = {}
        self._levels: dict[tuple[str, int], int] = {}
        for key, metric in worker_metrics().items():
            if metric.causes:
                self._by_cause[key] = self._made(metric, [*labelnames, "cause"])
            else:
                made = self._made(metric, labelnames)
                self._metrics[key] = create_metric_per_engine(made, per_engine_labelvalues)
        for engine in per_engine_labelvalues:
            for key, counter in self._by_cause.items():
                for cause in worker_metrics()[key].causes:
                    # Shown as 0 from the start, so that a first failure is a visible step.
                    self._of_cause(counter, engine, cause)

    def _made(self, metric: stats.Metric, labelnames: list[str]) -> Any:
        common = {"name": PREFIX + metric.name, "documentation": metric.help, "labelnames": labelnames}
        if metric.kind == "histogram":
            return self._histogram_cls(**common, buckets=[bound / metric.divisor for bound in metric.bounds])
        if metric.kind == "gauge":
            # Only one process of an API server with several gets figures; the others' would stand beside its own.
            return self._gauge_cls(**common, multiprocess_mode="mostrecent")
        return self._counter_cls(**common)

    def _of_cause(self, counter: Any, engine_idx: int, cause: str) -> Any:
        return counter.labels(*self.per_engine_labelvalues[engine_idx], cause)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the figures of `KvferryStats.data` to the metrics of engine `engine_idx`."""
        for key, value in transfer_stats_data.items():
            if key in self._by_cause:
                for cause, count in value.items():
                    self._of_cause(self._by_cause[key], engine_idx, cause).inc(count)
                continue
            metric, children = worker_metrics().get(key), self._metrics.get(key)
            if metric is None or children is None:
                continue
            child = children[engine_idx]
            if metric.kind == "counter":
                child.inc(value)
            elif metric.kind == "gauge":
                level = self._levels.get((key, engine_idx), 0) + value
                self._levels[key, engine_idx] = level
                child.set(level)
            else:
                for one in observations(metric, value):
                    child.observe(one)
