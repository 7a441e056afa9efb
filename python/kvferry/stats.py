"""Figures of workers, agents and scheduler sides: what each is, merging, and Prometheus' text format.

docs/telemetry.md lists them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from . import _lib, _wire


class Metric(NamedTuple):
    """One figure.

    `scope` tells where its `key` is: "worker" in `Report["stats"]` and in the `totals` of `Worker.stats`, "agent" in
    `Agent.stats` and in the `agent` of `Worker.stats`, "peer" in `Agent.peers`, "scheduler" in `Scheduler.stats`.
    `name` is that of Prometheus after a prefix and before the `_total` of a counter.

    A counter with `causes` is a map of them. A histogram is a map of `counts` per bucket, without the zeros at their
    end, and `sum`; `bounds` are the inclusive upper bounds of all buckets but the last. Both are whole numbers, which
    divided by `divisor` are in `unit`: a histogram of seconds counts microseconds.
    """

    scope: Literal["worker", "agent", "peer", "scheduler"]
    key: str
    kind: Literal["counter", "gauge", "histogram"]
    name: str
    unit: str
    help: str
    causes: tuple[str, ...]
    bounds: tuple[int, ...]
    divisor: int


@cache
def metrics() -> tuple[Metric, ...]:
    """Every figure, in the order in which they are documented."""
    table: list[dict[str, Any]] = _wire.unpack_map("metrics", _lib.ask("kvf_stats_metrics"))["metrics"]
    return tuple(
        Metric(**{**entry, "causes": tuple(entry["causes"]), "bounds": tuple(entry["bounds"])}) for entry in table
    )


def merge(left: Mapping[str, object], right: Mapping[str, object]) -> dict[str, object]:
    """The sum of two stats maps of workers, as in `Report["stats"]` or the `totals` of `Worker.stats`.

    Associative and commutative; the empty map is the identity. Gauges in them are changes, so they add too.
    """
    merged = _lib.ask("kvf_stats_merge", _wire.pack("stats", left), _wire.pack("stats", right))
    return _wire.unpack_map("stats", merged)


def prometheus(rows: Iterable[Mapping[str, object]]) -> str:
    """Figures in Prometheus' text format 0.0.4 (content type `text/plain; version=0.0.4`), named `kvferry_*`.

    Args:
        rows: A map per source: `labels` (a map of texts; no two rows may have the same) and of `totals`, `agent`,
            `peers` and `scheduler` those that there are. So `{"labels": {"rank": "0"}, **worker.stats()}` is a row, and
            `{"agent": agent.stats(), "peers": agent.peers()}`, and `{"scheduler": scheduler.stats()}`. Figures that a
            map lacks count as 0.

    Raises `InvalidArgumentError` that names a label or value that cannot be.
    """
    packed = _wire.pack("rows", {"rows": [dict(row) for row in rows]})
    return _lib.ask("kvf_stats_prometheus", packed).decode()
