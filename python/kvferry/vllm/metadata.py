"""What travels between the two sides of the connector on vLLM's channels. All of it is plain data that pickles."""

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
    """A load that the scheduler side could not hand to the workers: they report it as failed.

    Attributes:
        message: Why.
        blocks: The local blocks that it was to fill, of all KV-cache groups.
    """

    message: str
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class KvferryConnectorMetadata(KVConnectorMetadata):
    """One engine step's work for the workers.

    Attributes:
        step: What `kvferry.Scheduler.step` returned; empty when there was nothing to do.
        refused: Loads to report as failed, by request id.
        grants: Whether the step grants leases, see `StepQueue`.
        mark: To come back with the step's output, see `Progress`; 0: nobody waits for it.
        copies: Blocks that go through the host buffer; None if there are none.
        long_ids: vLLM's request ids by the library's, where these differ (`LongIds`); None for requests that are over.
    """

    step: bytes = b""
    refused: dict[str, RefusedLoad] = field(default_factory=dict)
    grants: bool = False
    mark: int = 0
    copies: Copies | None = None
    long_ids: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class KvferryWorkerMetadata(KVConnectorWorkerMetadata):
    """News of one or more ranks of one engine step.

    The reports are kept sorted, which makes `aggregate` commutative as well as associative; one without news is its
    identity. A report is one rank's news since that rank's last report, so none may be dropped or counted twice.

    Attributes:
        reports: Reports, encoded as by `kvferry.Worker.poll_encoded`.
        mark: The step's, 0 if it has none. All ranks of a step have the same.
    """

    reports: tuple[bytes, ...] = ()
    mark: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvferryWorkerMetadata:
        """What both have."""
        if not isinstance(other, KvferryWorkerMetadata):
            raise TypeError(f"KvferryWorkerMetadata cannot be combined with {type(other).__name__}")
        return KvferryWorkerMetadata(tuple(sorted(self.reports + other.reports)), max(self.mark, other.mark))
