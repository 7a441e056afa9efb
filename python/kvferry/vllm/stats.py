"""Figures of transfers for vLLM's log line and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from kvferry import Report

COUNTERS: dict[str, str] = {
    "recvs": "KV cache receives that succeeded, one per request and rank.",
    "bytes": "Bytes of KV cache received.",
    "blocks": "Blocks of KV cache received, over all KV cache groups.",
    "operations": "UCX operations posted to receive KV cache.",
    "sends_read": "Sends that a decode engine confirmed, one per request and rank.",
    "sends_released": "Sends that a decode engine gave back unread, one per request and rank.",
    "sends_expired": "Sends whose lease ran out before a decode engine read them, one per request and rank.",
    "renewals": "Leases renewed by a decode engine's heartbeats.",
    "handshakes": "Handshakes with another engine that succeeded.",
    "handshake_failures": "Handshakes with another engine that failed.",
}
"""Keys of `KvferryStats.data` that hold one number, with their Prometheus help text."""

SERIES: dict[str, str] = {
    "transfer_seconds": "Time from the first read posted to the last byte of a KV cache receive.",
    "queued_seconds": "Time from a load's arrival at the worker to its first read.",
    "confirm_seconds": "Time from the last byte of a KV cache receive to the word that the producer's lease held.",
    "recv_bytes": "Bytes per KV cache receive.",
}
"""Keys that hold one number per receive that succeeded, with their Prometheus help text."""

FAILURES = "recv_failures"
CAUSES = (
    "peer_died",
    "lease_expired",
    "handshake_failed",
    "incompatible",
    "transport_error",
    "aborted",
    "timeout",
    "invalid_request",
    "shut_down",
    "digest_mismatch",
)
"""Why a receive can fail: the library's names, in its order."""

_TIME_BUCKETS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
_BYTE_BUCKETS = [float(4**i) for i in range(6, 18)]


def _empty() -> dict[str, Any]:
    return {**dict.fromkeys(COUNTERS, 0), FAILURES: {}, **{key: [] for key in SERIES}}


@dataclass
class KvferryStats(KVConnectorStats):
    """What happened on one or more ranks in some time; merging adds.

    `data` is plain numbers, lists and maps, because vLLM sends it between processes: a number for each of `COUNTERS`,
    a list for each of `SERIES`, and failed receives by cause under `recv_failures`.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = {**_empty(), **self.data}

    @classmethod
    def from_report(cls, report: Report) -> KvferryStats:
        """The figures of one worker report."""
        counted: Mapping[str, Any] = report["stats"]
        data: dict[str, Any] = {key: counted.get(key, 0) for key in COUNTERS}
        data[FAILURES] = dict(counted.get(FAILURES, {}))
        done = [record for record in report["records"] if record["cause"] is None]
        data["transfer_seconds"] = [record["transfer_us"] / 1e6 for record in done]
        data["queued_seconds"] = [record["queued_us"] / 1e6 for record in done]
        data["confirm_seconds"] = [record["confirm_us"] / 1e6 for record in done]
        data["recv_bytes"] = [record["bytes"] for record in done]
        return cls(data)

    def reset(self) -> None:
        """Back to nothing."""
        self.data = _empty()

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KvferryStats:
        """The sum of both, as a new object."""
        mine, theirs = self.data, KvferryStats(other.data).data
        merged: dict[str, Any] = {key: mine[key] + theirs[key] for key in (*COUNTERS, *SERIES)}
        causes = {**mine[FAILURES], **theirs[FAILURES]}
        merged[FAILURES] = {cause: mine[FAILURES].get(cause, 0) + theirs[FAILURES].get(cause, 0) for cause in causes}
        return KvferryStats(merged)

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's log line."""
        data = self.data
        seconds = sum(data["transfer_seconds"])
        megabytes = sum(data["recv_bytes"]) / 2**20
        line: dict[str, int | float] = {
            "Receives": data["recvs"],
            "Failed receives": sum(data[FAILURES].values()),
            "MB received": round(megabytes, 3),
            "Avg transfer time (ms)": _milliseconds(data["transfer_seconds"]),
            "Max transfer time (ms)": round(max(data["transfer_seconds"], default=0) * 1e3, 3),
            "Avg queued time (ms)": _milliseconds(data["queued_seconds"]),
            "Avg confirm time (ms)": _milliseconds(data["confirm_seconds"]),
            "Throughput (MB/s)": round(megabytes / seconds, 1) if seconds else 0,
            "Sends read": data["sends_read"],
            "Sends released": data["sends_released"],
            "Sends expired": data["sends_expired"],
        }
        line.update({f"Failed ({cause})": count for cause, count in sorted(data[FAILURES].items())})
        return line


def _milliseconds(seconds: Iterable[float]) -> float:
    values = list(seconds)
    return round(fmean(values) * 1e3, 3) if values else 0


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
        self._counters = {
            key: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvferry_{key}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for key, text in COUNTERS.items()
        }
        self._histograms = {
            key: create_metric_per_engine(
                self._histogram_cls(
                    name=f"vllm:kvferry_{key}",
                    documentation=text,
                    buckets=_BYTE_BUCKETS if key.endswith("bytes") else _TIME_BUCKETS,
                    labelnames=labelnames,
                ),
                per_engine_labelvalues,
            )
            for key, text in SERIES.items()
        }
        self._failures = self._counter_cls(
            name=f"vllm:kvferry_{FAILURES}",
            documentation="KV cache receives that failed, by cause, one per request and rank.",
            labelnames=[*labelnames, "cause"],
        )
        for engine in per_engine_labelvalues:
            for cause in CAUSES:
                # Shown as 0 from the start, so that a first failure is a visible step.
                self._failure(engine, cause)

    def _failure(self, engine_idx: int, cause: str) -> Any:
        return self._failures.labels(*self.per_engine_labelvalues[engine_idx], cause)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the figures of `KvferryStats.data` to the metrics of engine `engine_idx`."""
        data = KvferryStats(transfer_stats_data).data
        for key, counters in self._counters.items():
            counters[engine_idx].inc(data[key])
        for key, histograms in self._histograms.items():
            for value in data[key]:
                histograms[engine_idx].observe(value)
        for cause, count in data[FAILURES].items():
            self._failure(engine_idx, cause).inc(count)
