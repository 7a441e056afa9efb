"""What travels between the two sides of the connector on vLLM's channels. All of it is plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


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
    """

    step: bytes = b""
    refused: dict[str, RefusedLoad] = field(default_factory=dict)
    grants: bool = False


@dataclass(frozen=True)
class KvferryWorkerMetadata(KVConnectorWorkerMetadata):
    """Reports of one or more ranks of one engine step, encoded as by `kvferry.Worker.poll_encoded`.

    The reports are kept sorted, which makes `aggregate` commutative as well as associative; the empty tuple is its
    identity. A report is one rank's news since that rank's last report, so none may be dropped or counted twice.
    """

    reports: tuple[bytes, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvferryWorkerMetadata:
        """The reports of both."""
        if not isinstance(other, KvferryWorkerMetadata):
            raise TypeError(f"KvferryWorkerMetadata cannot be combined with {type(other).__name__}")
        return KvferryWorkerMetadata(tuple(sorted(self.reports + other.reports)))
