"""Describes two engines before they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, cast

from . import _lib, _wire
from .worker import Rank

Range = tuple[int, int]
"""First and last."""


class RankDescription(TypedDict):
    """The parts that a rank holds, and its work.

    `layers` and `heads` are ranges. `tokens` says for each KV-cache group which of how many ranks that share the tokens
    this is. `bytes` and `operations` are those that the rank reads (consumer) or that are read from it (producer).
    `peers` is how many ranks it deals with; a producer frees a request's blocks when so many have said that they are
    over.
    """

    rank: Rank
    layers: list[Range]
    heads: list[Range]
    tokens: list[tuple[int, int]]
    bytes: int
    operations: int
    peers: int


class LinkDescription(TypedDict):
    """The reads of one consumer rank from one producer rank.

    `layers` is empty where nothing is read and the consumer only says when it is over. `segments` are the runs that
    repeat at every block, `operations` what is left after merging. `run_min`, `run_median` and `run_max` are bytes per
    operation. `gathered` says whether they are so short that, between host memories, messages carry many of them at a
    time instead of an operation each; over TCP everything travels so. `plan_bytes` is the memory that the plan takes.
    """

    consumer: Rank
    producer: Rank
    layers: list[Range]
    heads: list[Range]
    parts: list[str]
    bytes: int
    segments: int
    operations: int
    run_min: int
    run_median: int
    run_max: int
    gathered: bool
    plan_bytes: int


class Description(TypedDict):
    """The work of a deployment for one request: all ranks of either engine, and every pair of them that deals with each
    other."""

    producers: list[RankDescription]
    consumers: list[RankDescription]
    links: list[LinkDescription]


def describe(deployment: Mapping[str, object]) -> Description:
    """Works out which rank reads what from which rank for one request. Needs neither engines nor memory.

    Args:
        deployment: Keys `model`, `producer`, `consumer`, `tokens`, `cached_tokens`, `reuses_blocks`,
            `consecutive_blocks` and `max_operation_bytes`, as `kvferry.h` tells at `kvf_plan_describe`.

    Raises `InvalidArgumentError` or `ExhaustedError` that names the key for what cannot be, and `IncompatibleError`
    where the engines do not fit each other, with the text that their handshake would give.
    """
    described = _wire.unpack_map("a description", _lib.ask("kvf_plan_describe", _wire.pack("deployment", deployment)))
    return cast(Description, _ranges_as_tuples(described))


def _ranges_as_tuples(described: dict[str, object]) -> dict[str, object]:
    for entries in described.values():
        for entry in cast("list[dict[str, object]]", entries):
            for key in ("layers", "heads", "tokens"):
                if key in entry:
                    entry[key] = [tuple(pair) for pair in cast("list[list[int]]", entry[key])]
    return described
