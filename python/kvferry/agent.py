"""The transfer engine for direct use: register memory, exchange metadata, read and write remote memory by blocks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

from . import _lib, _wire
from ._errors import KvferryError, make_error
from ._memory import span_of

Direction = Literal["read", "write"]


class Segment(NamedTuple):
    """A run of bytes that repeats at every block of one list pair.

    Block `i` of list `list` moves `length` bytes between `local_offset + local_ids[i] * local_stride` in the local
    region and `remote_offset + remote_ids[i] * remote_stride` in the remote one; all in bytes. A region is named by
    its index in the owner's metadata, counted from 0.
    """

    list: int
    local_region: int
    remote_region: int
    local_offset: int
    remote_offset: int
    local_stride: int
    remote_stride: int
    length: int


BlockPairs = Sequence[tuple[_lib.Ids, _lib.Ids]]
"""Per list, the local and the remote block ids, of equal length. numpy uint32 arrays are taken without conversion."""


@dataclass(frozen=True)
class Message:
    """Bytes that a peer sent."""

    peer: int
    data: bytes


@dataclass(frozen=True)
class PeerConnected:
    """A peer that connected to this agent; `peer` can be used to answer it."""

    peer: int
    name: str
    incarnation: int


@dataclass(frozen=True)
class PeerLost:
    """The connection to a peer broke. Its id is dead; connect again with fresh metadata."""

    peer: int
    error: KvferryError


@dataclass(frozen=True)
class TransferDone:
    """A transfer has ended, and touches no memory any more. `error` is None when every byte has arrived."""

    transfer: int
    peer: int
    bytes: int
    operations: int
    duration: float
    error: KvferryError | None


@dataclass(frozen=True)
class Route:
    """How a peer is reached. `lanes` are the connection's transports and devices in UCX's words. The others name the
    paths of long runs: between host memories, between CUDA devices, and between the two. Short runs between host
    memories travel in messages."""

    lanes: str
    host: str
    device: str
    mixed: str


Event = Message | PeerConnected | PeerLost | TransferDone


class Transfer:
    """A transfer that was started by `Agent.read` or `Agent.write`."""

    def __init__(self, agent: Agent, id: int) -> None:
        self._agent = agent
        self._done: TransferDone | None = None
        self.id = id

    @property
    def done(self) -> TransferDone | None:
        """How it ended; None while it runs. Updated by `wait`, `Agent.poll` and `Agent.wait`."""
        return self._done

    def wait(self, timeout: float | None = None) -> TransferDone:
        """Waits until the transfer has ended and returns its figures; raises its error if it failed.

        After `timeout` seconds it raises `TimedOutError`; the transfer goes on, and can be waited for again or
        cancelled. Other events that arrive meanwhile stay for `Agent.poll`.
        """
        done = self._agent._wait_for(self, timeout)
        if done.error is not None:
            raise done.error
        return done

    def cancel(self) -> None:
        """Asks for the transfer's end. It still ends by a `TransferDone`, with an error unless it was complete."""
        self._agent.cancel(self)


@dataclass(frozen=True)
class Region:
    """Memory that is registered with an agent. `index` is what segments on both sides call it."""

    id: int
    index: int
    address: int
    nbytes: int


class Agent:
    """Moves bytes between registered memory of this process and of other agents.

    May be used from any thread. Nothing but `wait`, `Transfer.wait` and `shutdown` waits for the network.

    Args:
        config: The keys of an agent, see `kvferry.settings`, `kvferry config --all` and docs/configuration.md. Unknown
            keys and wrong values raise `InvalidArgumentError` that names them.
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        self._handle = _wire.start_with_ucx(_lib.agent_start, {} if config is None else config)
        self._lock = threading.Lock()
        self._polling = threading.Lock()
        self._events: deque[Event] = deque()
        self._transfers: dict[int, Transfer] = {}

    def register(
        self, memory: Any, *, kind: Literal["host", "cuda"] | None = None, device: int | None = None
    ) -> Region:
        """Registers memory, which must be contiguous.

        Args:
            memory: A writable object with the buffer protocol (a numpy array, a bytearray), a torch tensor, an object
                with `__cuda_array_interface__`, or a pair (address, nbytes). The object is kept alive until
                `deregister`; the owner of a bare address must do that.
            kind: "host" or "cuda"; needed only for CUDA memory given by address.
            device: The CUDA device's ordinal, when `kind` is "cuda".
        """
        span = span_of(memory, kind, device)
        id, index = _lib.agent_register(self._handle, span.address, span.nbytes, span.kind, span.device, span.owner)
        return Region(id, index, span.address, span.nbytes)

    def deregister(self, region: Region) -> None:
        """Takes a region back: when this returns, no transfer touches it. Transfers that use it are ended first."""
        if not isinstance(region, Region):
            raise make_error(
                -1,
                "invalid_argument",
                f"region must be the Region that register returned, not {type(region).__name__}",
            )
        _lib.agent_deregister(self._handle, region.id)

    def metadata(self) -> bytes:
        """What another agent needs to connect to this one and to reach the regions registered so far."""
        return _lib.agent_metadata(self._handle)

    def connect(self, metadata: bytes) -> int:
        """Connects to the agent that made `metadata` and returns its peer id."""
        return _lib.agent_connect(self._handle, metadata)

    def disconnect(self, peer: int) -> None:
        """Ends the connection; transfers with the peer are ended with an error."""
        _lib.agent_disconnect(self._handle, peer)

    def route(self, peer: int) -> Route | None:
        """Which way bytes go between this agent and a peer; None before the peer has answered (`PeerConnected`)."""
        found = _wire.unpack_map("a route", _lib.agent_route(self._handle, peer))
        if not found.pop("connected"):
            return None
        return Route(**found)

    def read(self, peer: int, segments: Sequence[Segment], blocks: BlockPairs) -> Transfer:
        """Starts copying from the peer's memory to ours."""
        return self._start("read", peer, segments, blocks)

    def write(self, peer: int, segments: Sequence[Segment], blocks: BlockPairs) -> Transfer:
        """Starts copying from our memory to the peer's."""
        return self._start("write", peer, segments, blocks)

    def _start(self, direction: Direction, peer: int, segments: Sequence[Segment], blocks: BlockPairs) -> Transfer:
        # Held over the call, so that the event of a transfer that ends at once finds it in the table.
        with self._lock:
            id = _lib.agent_transfer(self._handle, peer, direction, segments, blocks)
            transfer = self._transfers[id] = Transfer(self, id)
        return transfer

    def cancel(self, transfer: Transfer | int) -> None:
        """Asks for a transfer's end, see `Transfer.cancel`."""
        _lib.agent_cancel(self._handle, transfer.id if isinstance(transfer, Transfer) else transfer)

    def send(self, peer: int, data: bytes) -> None:
        """Sends a small message, which arrives as a `Message` event. Messages of one agent to another keep order."""
        _lib.agent_send(self._handle, peer, data)

    def poll(self) -> list[Event]:
        """The events that have happened since the last call, oldest first. Does not wait."""
        self._pump(0.0)
        return self._taken()

    def wait(self, timeout: float) -> list[Event]:
        """Like `poll`, but waits up to `timeout` seconds for the first event; empty when none came."""
        with self._lock:
            ready = bool(self._events)
        if not ready:
            self._pump(timeout)
        return self._taken()

    def stats(self) -> dict[str, object]:
        """Gauges, counters and histograms of the agent since its start; `kvferry.stats.metrics` tells what each is."""
        return _wire.unpack_map("stats", _lib.agent_stats(self._handle))

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ends all transfers, gives all memory back and frees the agent. Calling it again does nothing.

        Waits at most `timeout` seconds for transfers in flight to be given up.
        """
        _lib.shutdown(self._handle, timeout)

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _taken(self) -> list[Event]:
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def _pump(self, timeout: float) -> None:
        """Takes events from the library, waiting up to `timeout` seconds for the first."""
        with self._polling:
            raw = _lib.agent_events(self._handle, timeout)
            with self._lock:
                self._events.extend(self._note(event) for event in raw)

    def _note(self, raw: _lib.RawEvent) -> Event:
        if raw.kind == "transfer_done":
            done = TransferDone(raw.id, raw.peer, raw.nbytes, raw.operations, raw.duration, raw.error)
            transfer = self._transfers.pop(raw.id, None)
            if transfer is not None:
                transfer._done = done
            return done
        if raw.kind == "message":
            return Message(raw.peer, raw.payload)
        if raw.kind == "peer_connected":
            return PeerConnected(raw.peer, raw.payload.decode("utf-8", "replace"), raw.incarnation)
        return PeerLost(raw.peer, raw.error or make_error(-10, "peer_died", "the connection broke"))

    def _wait_for(self, transfer: Transfer, timeout: float | None) -> TransferDone:
        deadline = None if timeout is None else time.monotonic() + timeout
        while transfer._done is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise make_error(-11, "timeout", f"transfer {transfer.id} has not ended within {timeout} s")
            # Short turns, so that one of two waiting threads sees what the other has taken in.
            self._pump(min(left, 0.1))
        return transfer._done
