"""How the measurements describe the caches of their engines to workers and scheduler sides."""

from __future__ import annotations

from typing import Any

from .. import Scheduler

TOKENS = 16
"""Tokens of a block."""
GROUPS = [{"kind": "full", "block_size": TOKENS}]
_LEASE_MS = 600_000


def area(layer: str, blocks: int, block_bytes: int, heads: int = 1, **more: object) -> dict[str, Any]:
    """A layer of `blocks` adjacent blocks of `block_bytes`, each with its heads one after the other."""
    head = block_bytes // heads
    return {
        "layer": layer,
        "part": "kv",
        "group": 0,
        "region": 0,
        "offset": 0,
        "num_blocks": blocks,
        "block_stride": block_bytes,
        "heads": heads,
        "first_head": 0,
        "total_heads": heads,
        "head_stride": head,
        "tokens": TOKENS,
        "token_stride": head // TOKENS,
        "content": head // TOKENS,
        **more,
    }


def start_scheduler(engine: str, ranks: int = 1) -> Scheduler:
    """The scheduler side of an engine of this host."""
    where = {"host": "127.0.0.1", "port": 0, "advertise_local": True}
    more = {"groups": GROUPS, "null_block": None, "lease_ms": _LEASE_MS}
    return Scheduler({"engine_id": engine, "tp_size": ranks, **where, **more})
