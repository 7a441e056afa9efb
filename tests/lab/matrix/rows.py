"""The rows of the fault matrix: what is done to the request, the servers or the network.

Whatever the fault does, an answer with status 200 must have the tokens that a single server gives for its prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lab.matrix.case import Case


@dataclass(frozen=True)
class Row:
    """One fault."""

    name: str
    title: str
    act: Callable[[Case], Awaitable[None]]
    # Whether it needs two hosts with a link between them.
    hosts: bool = False
    # Block sizes of the two engines, None for vLLM's own.
    blocks: tuple[int | None, int | None] = (None, None)
    # Whether the engines have worked together before, and must do so afterwards.
    working: bool = True


ROWS: dict[str, Row] = {}


def row(
    name: str,
    title: str,
    *,
    hosts: bool = False,
    blocks: tuple[int | None, int | None] = (None, None),
    working: bool = True,
) -> Callable[[Callable[[Case], Awaitable[None]]], Callable[[Case], Awaitable[None]]]:
    """Enters a function into `ROWS`, which are run in the order in which they were entered."""

    def enter(act: Callable[[Case], Awaitable[None]]) -> Callable[[Case], Awaitable[None]]:
        if name in ROWS:
            raise ValueError(f"two rows are named {name}")
        ROWS[name] = Row(name, title, act, hosts, blocks, working)
        return act

    return enter


def all_rows() -> dict[str, Row]:
    """Every row, in the order of the table."""
    from lab.matrix import rows_requests, rows_servers  # noqa: F401

    return ROWS
