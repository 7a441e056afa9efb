"""Reports of all ranks to the outcome per request."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Literal, TypedDict, cast

from . import _lib, _wire
from ._errors import invalid
from .worker import Rank, RecvFailure, RecvRecord, Report, encode_report

SIDES = {"sending": "KVF_SENDING", "recving": "KVF_RECVING"}


class RankRecord(TypedDict):
    """Figures of one receive on one rank."""

    rank: Rank
    record: RecvRecord


class Outcome(TypedDict):
    """The requests that all expected ranks have ended.

    A request is in `finished_sending` or `finished_recving` once, when every expected rank has reported it; in
    `failed_recving` when any rank reported a failure, with the union of the invalid blocks. A prefill that consumers
    may await is in `granted` once, when every rank has said that it can be read.
    """

    granted: list[str]
    finished_sending: list[str]
    finished_recving: list[str]
    failed_recving: list[RecvFailure]
    records: list[RankRecord]
    stats: dict[str, object]


class Aggregator(AbstractContextManager["Aggregator"]):
    """Combines worker reports, in any order and with duplicates, for hosts with a scheduler side of their own: a
    `Scheduler` does so itself. May be used from any thread.

    Args:
        ranks: The `(pp_rank, tp_rank)` of every rank whose report is needed.
    """

    def __init__(self, ranks: Iterable[tuple[int, int]]) -> None:
        try:
            config = {"ranks": [{"pp": pp, "tp": tp} for pp, tp in ranks]}
        except (TypeError, ValueError):
            expected = "pairs (pp_rank, tp_rank), as in [(0, 0), (0, 1)]"
            raise invalid(f"ranks must be {expected}, not {ranks!r:.80}") from None
        self._handle = _lib.Handle("aggregator", _wire.pack("config", config))

    def add(self, report: bytes | Report) -> None:
        """Takes in one rank's report, or several as `merge_reports` made them.

        A report that comes again changes nothing; one of a rank that is not expected raises `InvalidArgumentError`.
        """
        self._handle.call("add", report if isinstance(report, bytes) else encode_report(report))

    def expect(self, request: str, side: Literal["sending", "recving"], count: int) -> None:
        """From now on `count` ranks, whichever, end `request` on that side, in place of all."""
        number = _lib.constant(SIDES, "side", side)
        self._handle.call("expect", _lib.text("a request id", request), number, _lib.whole("count", count, 32))

    def forget(self, request: str) -> None:
        """Forgets a request, so that its id can be used again."""
        self._handle.call("forget", _lib.text("a request id", request))

    def take(self) -> Outcome:
        """Takes the requests that ended since the last call."""
        return cast(Outcome, _wire.decode_outcome(self._handle.ask("take")))

    def close(self) -> None:
        """Frees the aggregator. Calling it again does nothing."""
        self._handle.free()

    def __exit__(self, *_: object) -> None:
        self.close()
