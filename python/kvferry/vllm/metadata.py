"""The messages between the two sides of the connector, on vLLM's channels: plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from .host_buffer import Copies


@dataclass(frozen=True)
class KvferryHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's encoded metadata, on its way from the worker to the scheduler side by vLLM's RPC."""

    rank_metadata: bytes


@dataclass(frozen=True)
class RefusedLoad:
    """A load that the scheduler side refused, for the workers to report as failed.

    Attributes:
        message: The reason.
        blocks: The local blocks that it was to fill, of all KV-cache groups.
    """

    message: str
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class KvferryConnectorMetadata(KVConnectorMetadata):
    """One engine step's work for the workers.

    Attributes:
        step: The result of `kvferry.Scheduler.step`; empty without work.
        refused: Loads to report as failed, by request id.
        grants: Whether the step grants leases, see `StepQueue`.
        step_mark: Comes back with the step's output, see `ChunkReporter`; 0 if its end tells nothing.
        copies: Blocks that go through the host buffer; None if there are none.
        long_ids: vLLM's request ids by the library's, where these differ (`RequestTable`); None for requests that are
            over.
    """

    step: bytes = b""
    refused: dict[str, RefusedLoad] = field(default_factory=dict)
    grants: bool = False
    step_mark: int = 0
    copies: Copies | None = None
    long_ids: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class KvferryWorkerMetadata(KVConnectorWorkerMetadata):
    """Reports of one or more ranks of one engine step.

    The reports are kept sorted, which makes `aggregate` commutative as well as associative; one without reports is its
    identity. A report has what happened since its rank's last one, so none may be dropped or counted twice.

    Attributes:
        reports: Reports, encoded as by `kvferry.Worker.poll_encoded`.
        step_mark: The step's mark, 0 if it has none. All ranks of a step have the same.
    """

    reports: tuple[bytes, ...] = ()
    step_mark: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvferryWorkerMetadata:
        """Returns the reports of both."""
        if not isinstance(other, KvferryWorkerMetadata):
            raise TypeError(f"KvferryWorkerMetadata cannot be combined with {type(other).__name__}")
        reports = tuple(sorted(self.reports + other.reports))
        return KvferryWorkerMetadata(reports, max(self.step_mark, other.step_mark))
