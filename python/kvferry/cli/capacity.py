"""What a rate of prompts asks of links, blocks, connections and processors (`kvferry plan --rate`)."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from ..bench.errors import UsageError
from ..bench.figures import columns, number
from ..plan import Description

TCP_SECONDS_PER_GB = 0.76
"""Processor time that TCP takes on both sides together, in blocks of 16 KiB (`kvferry bench transfer`)."""

OPTIONS = ("engines", "link", "queue", "lease_ms")
"""Options that only count with `--rate`."""


class Load(NamedTuple):
    """The load of a deployment: prompts per second in all, the numbers of engines that share them, the rate of an
    engine's link in Gbit/s, seconds that a request waits in the decode engine's queue, and the lease in seconds."""

    rate: float
    prefill: int
    decode: int
    link: float
    queue: float
    lease: float


class Side(TypedDict):
    """What one engine needs; ranks are its busiest ones. None where it is the other side's."""

    prompts_per_s: float
    link_gbit_per_s: float
    link_share: float
    blocks_pinned: int | None
    blocks_pinned_without_readers: int | None
    peers_of_a_rank: int
    open_files_of_a_rank: int
    processors_over_tcp: float
    rank_gb_per_s: float
    rank_operations_per_s: float | None


class Capacity(TypedDict):
    """What either engine needs, and how long a hand-over takes that has the link to itself."""

    handover_s: float
    prefill: Side
    decode: Side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sums."""
    add = parser.add_argument
    add("--rate", type=_above_zero, metavar="N", help="also sum up what N prompts per second need, for all engines")
    add("--engines", type=_pair, metavar="P:D", help="prefill and decode engines that share them (default 1:1)")
    add("--link", type=_above_zero, metavar="GBIT", help="Gbit/s of an engine's link (default 100)")
    add("--queue", type=_seconds, metavar="S", help="seconds in the decode engine's queue (default 0)")
    add("--lease-ms", type=_above_zero, metavar="MS", help="lease of a prefill that nobody reads (default 30000)")


def load(options: argparse.Namespace) -> Load | None:
    """Returns the requested load; None without `--rate`. Raises `UsageError` for options that count only with it."""
    if options.rate is None:
        for name in OPTIONS:
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is given without --rate")
        return None
    prefill, decode = options.engines or (1, 1)
    lease = 30.0 if options.lease_ms is None else options.lease_ms / 1000
    return Load(options.rate, prefill, decode, options.link or 100.0, options.queue or 0.0, lease)


def sums(asked: Load, deployment: dict[str, Any], described: Description) -> Capacity:
    """Computes what each engine of the deployment needs."""
    links = described["links"]
    size = sum(link["bytes"] for link in links)
    handover = size * 8 / 1e9 / asked.link
    blocks = _blocks(deployment)
    peers: dict[tuple[int, int], int] = defaultdict(int)
    for link in links:
        peers[link["consumer"]["pp"], link["consumer"]["tp"]] += 1

    def side(engines: int, peers: int, busiest: int, operations: int | None, pinned: bool) -> Side:
        rate = asked.rate / engines
        gigabytes = rate * size / 1e9
        return {
            "prompts_per_s": rate,
            "link_gbit_per_s": gigabytes * 8,
            "link_share": gigabytes * 8 / asked.link,
            "blocks_pinned": round(rate * blocks * (asked.queue + handover)) if pinned else None,
            "blocks_pinned_without_readers": round(rate * blocks * asked.lease) if pinned else None,
            "peers_of_a_rank": peers,
            # An agent accepts half of the files that it may open as peers.
            "open_files_of_a_rank": 2 * peers,
            "processors_over_tcp": gigabytes * TCP_SECONDS_PER_GB / 2,
            "rank_gb_per_s": rate * busiest / 1e9,
            "rank_operations_per_s": None if operations is None else rate * operations,
        }

    ranks, readers = described["producers"], described["consumers"]
    return {
        "handover_s": handover,
        "prefill": side(
            asked.prefill,
            max(rank["peers"] for rank in ranks) * asked.decode,
            max(rank["bytes"] for rank in ranks),
            None,
            pinned=True,
        ),
        "decode": side(
            asked.decode,
            max(peers.values()) * asked.prefill,
            max(rank["bytes"] for rank in readers),
            max(rank["operations"] for rank in readers),
            pinned=False,
        ),
    }


def table(asked: Load, found: Capacity) -> str:
    """The sums as text, one column for either engine."""

    def short(value: float | None) -> str:
        return "" if value is None else number(value, 2)

    def whole(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}"

    rows: list[tuple[str, str, Callable[[Any], str]]] = [
        ("prompts per second", "prompts_per_s", short),
        ("link rate, Gbit/s", "link_gbit_per_s", short),
        (f"share of a link of {asked.link:g} Gbit/s", "link_share", lambda share: f"{share:.0%}"),
        ("blocks pinned", "blocks_pinned", whole),
        (f"blocks pinned if nobody reads, lease {asked.lease:g} s", "blocks_pinned_without_readers", whole),
        ("peers of a rank", "peers_of_a_rank", whole),
        ("open files of a rank over TCP, at least", "open_files_of_a_rank", whole),
        ("processors over TCP", "processors_over_tcp", short),
        ("GB/s of the busiest rank", "rank_gb_per_s", short),
        ("operations per second of the busiest rank", "rank_operations_per_s", whole),
    ]
    sides: list[Any] = [found["prefill"], found["decode"]]
    cells = [(text, *(shown(side[key]) for side in sides)) for text, key, shown in rows]
    head = ("capacity", f"each of {asked.prefill} prefill", f"each of {asked.decode} decode")
    return f"{columns(head, cells)}\n\na hand-over takes {short(found['handover_s'])} s if it has the link to itself"


def _blocks(deployment: dict[str, Any]) -> int:
    """Blocks that a prompt keeps on the prefill engine, over all KV-cache groups."""
    producer, groups = deployment["producer"], deployment["model"]["groups"]
    sizes = producer.get("block_size", [16])
    sizes = sizes * len(groups) if len(sizes) == 1 else sizes
    found = 0
    for group, size in zip(groups, sizes, strict=True):
        tokens = size * producer.get("dcp", 1)
        blocks = -(-deployment["tokens"] // tokens)
        if isinstance(group["kind"], dict):
            blocks = min(blocks, -(-(group["kind"]["sliding_window"]["window"] - 1) // tokens) + 1)
        found += blocks
    return found


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError(text)
    return value


def _seconds(text: str) -> float:
    return 0.0 if text == "0" else _above_zero(text)


def _pair(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    found = int(prefill, 10), int(decode, 10)
    if min(found) < 1 or max(found) > 1_000_000:
        raise ValueError(text)
    return found


# What argparse calls them.
_above_zero.__name__ = "number above 0"
_seconds.__name__ = "number from 0"
_pair.__name__ = "pair of whole numbers, such as 8:4"
