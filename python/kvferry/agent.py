"""The transfer engine for direct use: register memory, exchange metadata, read and write remote memory by blocks."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from . import _lib, _wire
from ._errors import KvferryError, invalid, make_error
from ._memory import memory_arguments, span_of

_EVENTS_AT_ONCE = 256
_SEGMENT = struct.Struct("=3I4x5Q")
"""`kvf_segment`. Packed here it takes a third of the time that cffi needs for tuples."""


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


class TransferDone(NamedTuple):
    """A transfer has ended, and touches no memory any more. `error` is None when every byte has arrived.

    `bytes` were moved by `operations` pieces, `duration` seconds from the posting of the first to the end of the last.
    """

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


class Agent(AbstractContextManager["Agent"]):
    """Moves bytes between registered memory of this process and of other agents.

    May be used from any thread. Nothing but `wait`, `Transfer.wait`, `deregister` and `shutdown` waits for the network.

    Args:
        config: The keys of an agent, see `kvferry.settings`, `kvferry config --all` and docs/configuration.md. Unknown
            keys and wrong values raise `InvalidArgumentError` that names them.
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        self._handle = _lib.Handle("agent", _wire.pack("config", {} if config is None else config))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_polling = False
        """True if a thread is taking events from the library. Afterwards it notifies `_changed`."""
        self._waiting = 0
        """How many threads wait for that."""
        self._events: list[Event] = []
        # Where the library leaves events, used by that thread, and a transfer's id, by who holds `_lock`.
        self._raw, self._count, self._id = (
            _lib.new(f"kvf_event[{_EVENTS_AT_ONCE}]"),
            _lib.new("size_t *"),
            _lib.new("uint64_t *"),
        )
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
        id, index = _lib.new("uint64_t *"), _lib.new("uint32_t *")
        owners = self._handle.owners
        key = self._handle.register(span.owner, *memory_arguments(*span[:4]), id, index)
        owners[id[0]] = owners[key]
        del owners[key]
        return Region(id[0], index[0], span.address, span.nbytes)

    def deregister(self, region: Region) -> None:
        """Takes a region back: when this returns, no transfer touches it. Transfers that use it are ended first.

        Peers on this host that copy by themselves are waited for, but for `cancel_grace_ms` at most for one that stands
        still, which may end a copy that it has begun. Deregister before you disconnect.
        """
        if not isinstance(region, Region):
            raise invalid(f"region must be the Region that register returned, not {type(region).__name__}")
        self._handle.call("deregister", region.id)
        self._handle.owners.pop(region.id, None)

    def metadata(self) -> bytes:
        """The metadata with which another agent connects to this one. It reaches the regions registered so far."""
        return self._handle.ask("metadata")

    def connect(self, metadata: bytes) -> int:
        """Connects to the agent that made `metadata` and returns its peer id."""
        return self._handle.number("uint64_t", "connect", _lib.data("metadata", metadata))

    def region_metadata(self, region: Region) -> bytes:
        """The metadata of `region`, for `add_region` of a peer that has connected already."""
        if not isinstance(region, Region):
            raise invalid(f"region must be the Region that register returned, not {type(region).__name__}")
        return self._handle.ask("region_metadata", region.id)

    def add_region(self, peer: int, metadata: bytes) -> int:
        """Makes known a region of the peer's that was registered after the metadata of `connect` was made.

        `metadata` is of the peer's `region_metadata`. Returns the region's index, by which segments name it.
        """
        data = _lib.data("metadata", metadata)
        return self._handle.number("uint32_t", "add_region", _lib.whole("peer", peer), data)

    def remove_region(self, peer: int, region: int) -> None:
        """Forgets a region of the peer's, by the index that `add_region` returned or its place in `connect`'s metadata.

        Returns at once; transfers that have begun go on. New transfers with the region end with `NotFoundError`.
        `add_region` makes it known again.
        """
        self._handle.call("remove_region", _lib.whole("peer", peer), _lib.whole("region", region, 32))

    def disconnect(self, peer: int) -> None:
        """Ends the connection; transfers with the peer are ended with an error."""
        self._handle.call("disconnect", _lib.whole("peer", peer))

    def route(self, peer: int) -> Route | None:
        """Which way bytes go between this agent and a peer; None before the peer has answered (`PeerConnected`)."""
        found = _wire.unpack_map("a route", self._handle.ask("route", _lib.whole("peer", peer)))
        if not found.pop("connected"):
            return None
        return Route(**found)

    def read(
        self, peer: int, segments: Sequence[Segment], blocks: BlockPairs, message: bytes | None = None
    ) -> Transfer:
        """Starts copying from the peer's memory to ours. `message` is sent to the peer when every byte was moved."""
        return self._start("KVF_READ", peer, segments, blocks, message)

    def write(
        self, peer: int, segments: Sequence[Segment], blocks: BlockPairs, message: bytes | None = None
    ) -> Transfer:
        """Starts copying from our memory to the peer's. `message` is sent to the peer when every byte was moved."""
        return self._start("KVF_WRITE", peer, segments, blocks, message)

    def _start(
        self, direction: str, peer: int, segments: Sequence[Segment], blocks: BlockPairs, message: bytes | None
    ) -> Transfer:
        try:
            packed = b"".join([_SEGMENT.pack(*segment) for segment in segments])
        except (TypeError, struct.error) as error:
            raise _wrong_segment(segments, error) from error
        library = _lib.load()
        array, count = library.ffi.from_buffer(library.segments, packed), len(packed) // _SEGMENT.size
        plan = getattr(library.functions, direction), array, count, *_lib.pairs(blocks)
        self._handle.get()
        # Held over the call, so that the event of a transfer that ends at once finds it in the table.
        with self._lock:
            if message is None:
                self._handle.call("transfer", _lib.whole("peer", peer), *plan, 0, self._id)
            else:
                data = _lib.data("a message", message)
                self._handle.call("transfer_and_send", _lib.whole("peer", peer), *plan, data, 0, self._id)
            id = int(self._id[0])
            transfer = self._transfers[id] = Transfer(self, id)
        return transfer

    def cancel(self, transfer: Transfer | int) -> None:
        """Asks for a transfer's end, see `Transfer.cancel`."""
        id = transfer.id if isinstance(transfer, Transfer) else _lib.whole("transfer", transfer)
        self._handle.call("cancel", id)

    def send(self, peer: int, data: bytes) -> None:
        """Sends a small message, which arrives as a `Message` event. Messages of one agent to another keep order."""
        self._handle.call("send", _lib.whole("peer", peer), _lib.data("a message", data))

    def poll(self) -> list[Event]:
        """The events that have happened since the last call, oldest first. Does not wait, even if other threads do."""
        self._pump(0, lambda: False)
        return self._taken()

    def wait(self, timeout: float) -> list[Event]:
        """Like `poll`, but waits up to `timeout` seconds for the first event; empty when none came.

        Raises `ShutDownError` when the agent is shut down meanwhile and every event was taken.
        """
        return _lib.in_turns(_lib.seconds(timeout), self._next) or []

    def stats(self) -> dict[str, object]:
        """Gauges, counters and histograms of the agent since its start; `kvferry.stats.metrics` tells what each is."""
        return _wire.unpack_map("stats", self._handle.ask("stats"))

    def peers(self) -> list[dict[str, object]]:
        """The figures of each peer since the start: a map per name of a peer.

        `name`, `connected` (1 or 0), `lanes`, `host`, `device` and `mixed` as in `Route`, empty while not connected,
        and the counters that `kvferry.stats.metrics` has under the scope "peer". Transfers count on the side that
        started them.
        """
        found: list[dict[str, object]] = _wire.unpack_map("peers", self._handle.ask("peers"))["peers"]
        return found

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ends all transfers, gives all memory back and frees the agent. Calling it again does nothing.

        Waits at most `timeout` seconds for transfers in flight to be given up and for messages sent before to leave.
        An agent that the program leaves running is shut down when the interpreter exits, before it frees memory.
        """
        self._handle.shutdown(timeout)

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _taken(self) -> list[Event]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def _next(self, limit: int) -> list[Event] | None:
        """The events that there are, waiting up to `limit` milliseconds for the first; None without one."""
        self._pump(limit, lambda: self._events)
        return self._taken() or None

    def _pump(self, limit: int, enough: Callable[[], object]) -> None:
        """Takes events from the library, waiting up to `limit` milliseconds for the first, unless `enough()`.

        While another thread does so, it waits as long for what that one takes.
        """
        # Before the lock, which in a process that was forked off may be held for ever.
        self._handle.get()
        is_polling = False
        try:
            with self._lock:
                if enough():
                    return
                if self._is_polling:
                    if limit > 0:
                        self._wait_for_poller(limit)
                    return
                is_polling = self._is_polling = True
            self._take(limit)
        finally:
            if is_polling:
                # Before anything that an interrupt can keep from happening.
                self._is_polling = False
                if self._waiting:
                    with self._lock:
                        self._changed.notify_all()

    def _wait_for_poller(self, limit: int) -> None:
        """With the lock."""
        self._waiting += 1
        try:
            # Looked at once more: a thread that leaves looks for those that wait after it has said so.
            if self._is_polling:
                self._changed.wait(limit / 1000)
        finally:
            self._waiting -= 1

    def _take(self, limit: int) -> None:
        raw, count = self._raw, self._count
        count[0] = 0
        try:
            if limit > 0:
                self._handle.call("wait", limit, raw, _EVENTS_AT_ONCE, count)
            else:
                self._handle.call("poll", raw, _EVENTS_AT_ONCE, count)
        finally:
            # Also those that the library had given when an interrupt came.
            events = [self._event(raw[number]) for number in range(count[0])]
            with self._lock:
                for event in events:
                    if isinstance(event, TransferDone):
                        transfer = self._transfers.pop(event.transfer, None)
                        if transfer is not None:
                            transfer._done = event
                self._events.extend(events)

    def _event(self, raw: Any) -> Event:
        functions = _lib.load().functions
        payload = self._handle.ask("recv", raw.payload) if raw.payload else b""
        error = _lib.error_of(raw.status, payload) if raw.status != 0 else None
        if raw.kind == functions.KVF_EVENT_TRANSFER_DONE:
            return TransferDone(raw.transfer, raw.peer, raw.bytes, raw.operations, raw.duration_us / 1e6, error)
        if raw.kind == functions.KVF_EVENT_MESSAGE:
            return Message(raw.peer, payload)
        if raw.kind == functions.KVF_EVENT_PEER_CONNECTED:
            return PeerConnected(raw.peer, payload.decode("utf-8", "replace"), raw.incarnation)
        return PeerLost(raw.peer, error or make_error(-10, "peer_died", "the connection broke"))

    def _wait_for(self, transfer: Transfer, timeout: float | None) -> TransferDone:
        def ended(limit: int) -> TransferDone | None:
            if transfer._done is None:
                self._pump(limit, lambda: transfer._done)
            return transfer._done

        limit = math.inf if timeout is None else _lib.seconds(timeout, ", or None to wait until it has ended")
        done = _lib.in_turns(limit, ended)
        if done is None:
            raise make_error(-11, "timeout", f"transfer {transfer.id} has not ended within {timeout} s")
        return done


def _wrong_segment(segments: object, error: Exception) -> KvferryError:
    """Says why segments cannot be packed."""
    if not isinstance(segments, Iterable):
        return invalid(f"segments must be a list of Segment, not {type(segments).__name__}")
    if isinstance(segments, Segment):
        return invalid("segments must be a list of Segment, not a single one: pass [segment]")
    for number, segment in enumerate(segments):
        if not isinstance(segment, tuple) or len(segment) != len(Segment._fields):
            return invalid(f"segments[{number}] must be a Segment, not {type(segment).__name__}")
        for field, value in zip(Segment._fields, segment, strict=True):
            try:
                _lib.whole(f"segments[{number}].{field}", value, 64 if field.endswith(_LONG_FIELDS) else 32)
            except KvferryError as wrong:
                return wrong
    return invalid(f"segments: {error}")


_LONG_FIELDS = ("offset", "stride", "length")
