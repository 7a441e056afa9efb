"""The worker side of a KV connector: one per rank, in the process that owns the rank's KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, TypedDict, cast

from . import _lib, _wire
from ._memory import Span, memory_arguments, span_of
from ._outbox import WorkerHandle

MemoryKind = Literal["host", "cuda"]


class Rank(TypedDict):
    """A worker's place in its engine."""

    pp: int
    tp: int


class RecvFailure(TypedDict):
    """A receive that failed on this rank."""

    request: str
    cause: str
    message: str
    invalid_blocks: list[int]


class RecvRecord(TypedDict):
    """Figures of one completed or failed receive on this rank; times in microseconds."""

    request: str
    remote_request: str
    blocks: int
    bytes: int
    operations: int
    queued_us: int
    first_us: int
    transfer_us: int
    confirm_us: int
    cause: str | None


class Report(TypedDict):
    """The events of one rank since its last report.

    `finished_recving` names failed receives too; `failed_recving` says which of them failed and why. `granted` names
    prefills that consumers may await (`transfer_id`) and that can be read on this rank. `stats` holds figures since the
    last report (see `kvferry.stats`).
    """

    rank: Rank
    granted: list[str]
    finished_sending: list[str]
    finished_recving: list[str]
    failed_recving: list[RecvFailure]
    records: list[RecvRecord]
    stats: dict[str, object]


class Worker(AbstractContextManager["Worker"]):
    """One rank's worker. May be used from any thread; `push_metadata`, `wait`, `wait_encoded`, `suspend` and `shutdown`
    wait, nothing else does.

    Args:
        config: The keys of a worker, see `kvferry.settings`, `kvferry config --all` and docs/configuration.md. Only
            `engine_id` has no default. An unknown key or a wrong value raises `InvalidArgumentError` that names it.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._handle = WorkerHandle(_wire.pack("config", config))

    def register(
        self,
        memory: Any,
        nbytes: int | None = None,
        kind: MemoryKind | None = None,
        device: int | None = None,
        *,
        owner: object = None,
    ) -> int:
        """Registers contiguous memory and returns the region's index, counted from 0 in order of registration.

        Args:
            memory: What `Agent.register` takes, or an address with `nbytes`.
            nbytes: The length of the memory at an address.
            kind: "host" or "cuda"; needed only for CUDA memory given by address.
            device: The CUDA device's ordinal, when `kind` is "cuda".
            owner: What keeps memory at an address alive. It, or `memory` itself, is kept until `shutdown` or `suspend`
                has returned, and for ever when that fails. For a bare address without an owner, that is your job.
        """
        if nbytes is None:
            span = span_of(memory, kind, device)
        else:
            span = Span(memory, nbytes, kind or "host", device or 0, None)
        index = _lib.new("uint32_t *")
        self._handle.register((span.owner, owner), *memory_arguments(*span[:4]), index)
        return int(index[0])

    def set_geometry(self, geometry: Mapping[str, object]) -> None:
        """States where the rank keeps which part of the cache.

        Args:
            geometry: `{"groups": [{"kind": ..., "block_size": int}], "areas": [{"layer": str, "part": str, "group":
                int, "region": int, "offset": int, "num_blocks": int, "block_stride": int, "heads": int,
                "first_head": int, "total_heads": int, "head_stride": int, "tokens": int, "token_stride": int,
                "content": int}]}`. A group's kind is "full", "latent", "state", `{"sliding_window": {"window":
                tokens}}` or `{"chunked": {"chunk": tokens}}`; offsets, strides and content are in bytes. Every area
                must lie inside its region. These keys may be left out:

                - `token_ranks`, `token_rank`, `token_interleave` (1, 0, 1) of a group: its tokens are dealt over ranks.
                - `pages`, `page_stride` (1, 0) of an area: a block consists of several kernel blocks.
                - `units`, `unit_stride` (1, 0) of an area: a token's bytes are several runs.
                - `heads_by_rank` (False) of an area: `first_head` and `total_heads` count the heads of each rank as
                  different ones, because it is not known which ranks hold copies. Such a layer is read between equal
                  tensor-parallel sizes only.
                - `format` ("") of an area: what its bytes are, as far as the other keys do not tell, such as the type
                  of an element. Two engines' formats of a layer must be equal; where one side states none, they are not
                  compared.
        """
        self._handle.call("set_geometry", _wire.pack("geometry", geometry))

    def metadata(self) -> bytes:
        """The rank's encoded metadata, for `Scheduler.serve`. Needs the regions and the geometry to be set."""
        return self._handle.ask("metadata")

    def push_metadata(self, host: str, port: int, expected: int, timeout: float = 30.0) -> int:
        """Sends the metadata to the engine's listener, for engines without an RPC of their own.

        Waits up to `timeout` seconds, also for a listener that is not up yet. `expected` is the engine's number of
        ranks; returns how many the listener still lacks.
        """
        name, number = _lib.text("host", host), _lib.whole("port", port, 16)
        ranks, limit = _lib.whole("expected", expected, 32), _lib.milliseconds(timeout)
        return _lib.aside(lambda: self._handle.number("uint32_t", "push_metadata", name, number, ranks, limit))

    def submit(self, step: bytes) -> None:
        """Hands over one step made by `Scheduler.step`. Returns at once.

        A step that grants leases (the first one made after `Scheduler.finished` returned params) must come when all
        that the finished requests write is in memory, on a GPU when its kernels are over: consumers that await these
        requests read them then.
        """
        self._handle.submit(_lib.data("a step", step))

    def poll_encoded(self) -> bytes | None:
        """The events since the last poll, as bytes for `Scheduler.report`; None if
        nothing."""
        handle = self._handle
        # Most polls find nothing, and a look costs a fraction of what more code does.
        return handle.poll() if handle.news[0] else None

    def poll(self) -> Report | None:
        """The events since the last poll, decoded; None without any. Takes from the same queue as
        `poll_encoded`."""
        report = self.poll_encoded()
        return None if report is None else decode_report(report)

    def wait_encoded(self, timeout: float) -> bytes | None:
        """Like `poll_encoded`, but waits up to `timeout` seconds for something to happen.

        Raises `ShutDownError` when the worker is shut down meanwhile and every report was taken.
        """
        return self._handle.wait(timeout)

    def wait(self, timeout: float) -> Report | None:
        """Like `poll`, but waits up to `timeout` seconds for something to happen."""
        report = self.wait_encoded(timeout)
        return None if report is None else decode_report(report)

    def stats(self) -> dict[str, object]:
        """Since the start: `totals` (figures as in `Report["stats"]`), `gauges`, `agent` (as of `Agent.stats`),
        `malformed_steps` and `malformed_messages`. Polls do not reset them. `kvferry.stats.metrics` tells what each
        is."""
        return _wire.unpack_map("stats", self._handle.ask("stats"))

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ends every request with a report, gives all memory back to the caller and frees the worker.

        Waits at most `timeout` seconds for transfers in flight to be given up. Calling it again does nothing.
        """
        self._handle.shutdown(timeout)

    def suspend(self, timeout: float = 10.0) -> bytes | None:
        """As `shutdown`, for an engine that starts a new worker later and tells it by `Scheduler.renew`.

        Returns the last report, as `poll_encoded`.

        Prefills that wait to be loaded stay with their producers, as long as the leases last.
        """
        return self._handle.suspend(timeout)

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def decode_report(report: bytes) -> Report:
    """An encoded report of `Worker.poll_encoded` as a dict."""
    return cast(Report, _wire.decode_report(report))


def merge_reports(left: bytes, right: bytes) -> bytes:
    """Two encoded reports, or what this function made of some, as one, for `Scheduler.report`
    or `Aggregator.add`.

    Associative and commutative, so that a host can merge the reports of ranks in any order and grouping.
    """
    return _lib.ask("kvf_report_merge", _lib.data("a report", left), _lib.data("a report", right))


def encode_report(report: Report) -> bytes:
    """The inverse of `decode_report`."""
    return _wire.encode_report(cast("dict[str, object]", report))
