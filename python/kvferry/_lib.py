"""The C ABI of libkvferry. Nothing outside this file knows it.

The declarations are read from `kvferry.h` as shipped, so that they cannot differ from the library's. Each function
here takes and returns Python values, raises `KvferryError` for a status other than 0, and releases the GIL while the
library works. The library is loaded by the first call, not by the import.
"""

from __future__ import annotations

import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakSet

import cffi

from ._errors import KvferryError, make_error
from ._find import declarations, header_path, last_resort, library_path, packaged_ucx, with_packaged_ucx

ABI_VERSION = 1
"""The `kvf_abi_version` that this package was written for."""

_KINDS = {"host": "KVF_MEMORY_HOST", "cuda": "KVF_MEMORY_CUDA"}
_DIRECTIONS = {"read": "KVF_READ", "write": "KVF_WRITE"}
_OUTCOMES = {"complete": "KVF_COMPLETE", "aborted": "KVF_ABORTED"}
_EVENTS_AT_ONCE = 256


class Ids(Protocol):
    """Block ids: a list of int, or an array of them. A contiguous numpy uint32 array is passed on as it lies."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Any: ...


class RawEvent(NamedTuple):
    """One `kvf_event`. Fields that the kind does not use are 0, empty or None."""

    kind: Literal["transfer_done", "message", "peer_connected", "peer_lost"]
    id: int
    peer: int
    nbytes: int
    operations: int
    duration: float
    incarnation: int
    payload: bytes
    error: KvferryError | None


# --- loading


class _Library(NamedTuple):
    ffi: Any
    functions: Any


_load_lock = threading.Lock()
_loaded: _Library | None = None


def _open() -> _Library:
    path = library_path()
    ffi = cffi.FFI()
    ffi.cdef(declarations(header_path().read_text(encoding="utf-8")))
    try:
        functions = ffi.dlopen(str(path))
    except OSError as error:
        raise make_error(-2, "not_found", f"cannot load {path}: {error}") from error
    found = functions.kvf_abi_version()
    if found != ABI_VERSION:
        raise make_error(
            -6,
            "unsupported",
            f"{path} has C ABI {found}, this package was written for {ABI_VERSION}; install the library and the "
            "package of one release",
        )
    return _Library(ffi, functions)


def _load() -> _Library:
    global _loaded
    # Without the lock once it is there: an engine's thread, whose caches hold other things, pays microseconds for it.
    if _loaded is not None:
        return _loaded
    with _load_lock:
        if _loaded is None:
            _loaded = _open()
        return _loaded


# --- values in and out


def _error(library: _Library, status: int) -> KvferryError:
    needed = library.ffi.new("size_t *")
    size = 1024
    while True:
        text = library.ffi.new("char[]", size)
        library.functions.kvf_last_error(text, size, needed)
        if needed[0] < size:
            break
        size = needed[0] + 1
    message = library.ffi.string(text).decode("utf-8", "replace")
    return make_error(status, _status_name(library, status), message)


def _status_name(library: _Library, status: int) -> str:
    name: bytes = library.ffi.string(library.functions.kvf_status_name(status))
    return name.decode()


def _call(name: str, *arguments: Any) -> None:
    library = _load()
    function = getattr(library.functions, name)
    try:
        status = function(*arguments)
    except (TypeError, OverflowError) as error:
        raise make_error(-1, "invalid_argument", f"{name}: {error}") from error
    if status != 0:
        raise _error(library, status)


def _new(ctype: str) -> Any:
    return _load().ffi.new(ctype)


def _take(buffer: Any) -> bytes:
    """Copies a library-made buffer and gives it back."""
    library = _load()
    data = bytes(library.ffi.buffer(buffer.data, buffer.len)) if buffer.len else b""
    _call("kvf_buffer_free", buffer)
    return data


def _bytes_from(name: str, *arguments: Any) -> bytes:
    buffer = _new("kvf_buffer *")
    _call(name, *arguments, buffer)
    return _take(buffer)


def _checked_bytes(what: str, data: object) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    raise make_error(-1, "invalid_argument", f"{what} must be bytes, not {type(data).__name__}")


def _text(what: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise make_error(-1, "invalid_argument", f"{what} must be str, not {type(text).__name__}")
    return text.encode("utf-8", "surrogatepass")


def _whole(what: str, value: object, bits: int = 64) -> int:
    """`value` as an int that C takes; anything else is named by `what`."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << bits:
        shown = repr(value) if isinstance(value, (int, float, str)) else type(value).__name__
        hint = f"; pass its {'index' if 'region' in what else 'id'}" if hasattr(value, "id") else ""
        raise make_error(
            -1, "invalid_argument", f"{what} must be a whole number from 0 to {(1 << bits) - 1}, not {shown}{hint}"
        )
    return number


def _milliseconds(timeout: float) -> int:
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise make_error(-1, "invalid_argument", f"a timeout must be a number of seconds from 0, not {timeout!r}")
    return int(min(timeout * 1000 + 0.999, 0xFFFF_FFFF))


def _constant(names: Mapping[str, str], what: str, value: str) -> int:
    name = names.get(value) if isinstance(value, str) else None
    if name is None:
        raise make_error(-1, "invalid_argument", f"unknown {what} {value!r}, expected one of {', '.join(names)}")
    number: int = getattr(_load().functions, name)
    return number


def _ids(ids: Ids, what: str) -> tuple[Any, int]:
    """Block ids as a C array and their number. A contiguous numpy uint32 array is passed without a copy."""
    ffi = _load().ffi
    try:
        view = memoryview(ids)  # type: ignore[arg-type]
    except TypeError:
        view = None
    if view is not None and view.format == "I" and view.ndim == 1 and view.c_contiguous:
        return ffi.from_buffer("uint32_t[]", view), len(view)
    try:
        plain = ids if isinstance(ids, (list, tuple)) else list(ids)
        return ffi.new("uint32_t[]", plain), len(plain)
    except (TypeError, OverflowError) as error:
        raise make_error(
            -1,
            "invalid_argument",
            f"{what}: block ids must be integers from 0 to 4294967295, as a list or a flat numpy uint32 array: {error}",
        ) from error


class _Lists:
    """Block lists as one flat array of ids and the offset of each list's end, as the C ABI takes them."""

    def __init__(self, lists: Sequence[Ids], what: str) -> None:
        ffi = _load().ffi
        if not isinstance(lists, Iterable):
            raise make_error(-1, "invalid_argument", f"{what} must be lists of block ids, not {type(lists).__name__}")
        parts = [_ids(ids, f"{what}, list {number}") for number, ids in enumerate(lists)]
        ends = [0]
        for _, count in parts:
            ends.append(ends[-1] + count)
        if len(parts) == 1:
            self.ids = parts[0][0]
        else:
            self.ids = ffi.new("uint32_t[]", ends[-1])
            for (array, count), start in zip(parts, ends, strict=False):
                ffi.memmove(self.ids + start, array, 4 * count)
        self.count = len(parts)
        self.offsets = ffi.new("uint64_t[]", ends)


def address_of(view: memoryview) -> int:
    """The address of a contiguous buffer's first byte."""
    ffi = _load().ffi
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view)))


_with_outbox: WeakSet[Handle] = WeakSet()


def _leave_outboxes() -> None:
    """In a child process, whose copies of outboxes nobody fills: polls ask the library, which says so."""
    for worker in list(_with_outbox):
        worker.outbox, worker.news = None, _NEWS


os.register_at_fork(after_in_child=_leave_outboxes)

_left_behind: list[object] = []
"""Owners of memory that the library could not give back in time and may still touch."""


_NEWS = b"\1"

_OUTBOX_BYTES = 64 << 10
_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether other processors see loads, and stores, in their order. An outbox needs that, for Python has no atomics;
elsewhere a worker's has no room for a report, and only tells that a poll has one."""


class _Outbox:
    """Where a worker leaves reports (`kvf_outbox`), with what a look needs at hand: an engine's thread, whose caches
    hold other things, pays microseconds for every look-up, and more for a call."""

    def __init__(self, capacity: int) -> None:
        ffi = _load().ffi
        head = ffi.sizeof("kvf_outbox")
        # Words, for their alignment.
        self.memory = ffi.new("uint64_t[]", -(-capacity // 8))
        raw = memoryview(ffi.buffer(self.memory))
        self.news = raw[:2].cast("H")
        """`news[0]`: both flags in one look, `full` in the lower byte."""
        self.full = raw[:1]
        self.length = raw[8:16].cast("Q")
        # Not a memoryview: a piece of it is bytes at once.
        self.reports = ffi.buffer(ffi.cast("uint8_t *", self.memory) + head, capacity - head)

        self.turns: list[None] = [None]
        """Empty while a thread reads here or takes reports by a call. A list, because to take its item needs no lock,
        and on a thread whose caches hold other things costs a third of what one does."""


class Handle:
    """A root object of the library. Freed by the noun's function or with the last reference to it.

    `owners` are the objects whose memory is registered, by region. They are let go after the library is done with them.
    """

    def __init__(self, noun: str, pointer: Any) -> None:
        self.noun = noun
        self.pointer = pointer
        self.owners: dict[int, object] = {}
        self.news: memoryview | bytes = _NEWS
        """Of a worker: `news[0]` is not 0 when a poll has something to tell, also that the worker is shut down."""
        self.outbox: _Outbox | None = None
        """Of a worker that is not shut down."""
        self.submit: Callable[[bytes, int], int] | None = None
        """Of a worker: `kvf_worker_submit` of it."""
        self.lock = threading.Lock()

    def free(self) -> None:
        with self.lock:
            pointer = self.pointer
            if pointer is None:
                return
            self.pointer = None
            self.news = _NEWS
            self.submit = None
            # The library writes there until it is through with this worker.
            outbox, self.outbox = self.outbox, None
        try:
            _call(f"kvf_{self.noun}_free", pointer)
        except BaseException:
            _left_behind.extend(self.owners.values())
            raise
        finally:
            self.owners.clear()
            del outbox

    def get(self) -> Any:
        """The pointer; raises `ShutDownError` when it is freed."""
        pointer = self.pointer
        if pointer is None:
            raise self.shut_down()
        return pointer

    def shut_down(self) -> KvferryError:
        return make_error(-17, "shut_down", f"this {self.noun} is shut down; make a new one")

    def __del__(self) -> None:
        # Modules may be half gone at interpreter exit; the process ends anyway then.
        try:
            self.free()
        except Exception:
            pass


def _start(noun: str, config: bytes) -> Handle:
    out = _new(f"kvf_{noun} **")
    _call(f"kvf_{noun}_start", config, len(config), out)
    return Handle(noun, out[0])


# --- versions


def version() -> str:
    """The library's version."""
    library = _load()
    text: bytes = library.ffi.string(library.functions.kvf_version())
    return text.decode()


def protocol_versions() -> tuple[int, int]:
    """The oldest and the newest protocol version that the library speaks to other engines."""
    functions = _load().functions
    return functions.kvf_protocol_oldest(), functions.kvf_protocol_version()


def abi_version() -> int:
    """The library's C ABI number."""
    number: int = _load().functions.kvf_abi_version()
    return number


def ucx_info(ucx_lib: str | None = None) -> dict[str, Any]:
    """Which UCX the agents of this process use: `{"path": str, "version": str, "source": str}`.

    Opens it. Raises `UcxMissingError` when there is none; the message says where it was looked for.
    """
    import msgpack

    def ask(path: str | None) -> dict[str, Any]:
        encoded = b"" if path is None else _text("ucx_lib", path)
        info: dict[str, Any] = msgpack.unpackb(_bytes_from("kvf_ucx_info", encoded, len(encoded)))
        return info

    return with_packaged_ucx(ask, ucx_lib)


def ucx_candidates(ucx_lib: str | None = None) -> list[dict[str, Any]]:
    """Every libucp that the search for a UCX comes by, in its order, and what became of each.

    Maps of `path`, `source`, `fate` ("chosen", "refused", "not_tried"), `version` and `why` (str or None). Opens the
    one that is chosen, as `ucx_info` does; that there is none is no error.
    """
    import msgpack

    def ask(path: str | None) -> list[dict[str, Any]]:
        encoded = b"" if path is None else _text("ucx_lib", path)
        found = msgpack.unpackb(_bytes_from("kvf_ucx_candidates", encoded, len(encoded)))
        candidates: list[dict[str, Any]] = found["candidates"]
        return candidates

    found = ask(ucx_lib)
    source = "of the Python package libucx"
    if all(candidate["fate"] != "chosen" for candidate in found) and (packaged := last_resort(ucx_lib)) is not None:
        found.append({**ask(packaged)[0], "source": source})
    elif (packaged := packaged_ucx()) is not None and all(candidate["path"] != packaged for candidate in found):
        found.append({"path": packaged, "source": source, "fate": "not_tried", "version": None, "why": None})
    return found


def ucx_outlook(config: bytes) -> bytes:
    return _bytes_from("kvf_ucx_outlook", config, len(config))


# --- handshake


def handshake_survey(host: str, port: int, config: bytes) -> bytes:
    name = _text("host", host)
    return _bytes_from("kvf_handshake_survey", name, len(name), port, config, len(config))


# --- agent


def agent_start(config: bytes) -> Handle:
    return _start("agent", config)


def agent_register(agent: Handle, address: int, nbytes: int, kind: str, device: int, owner: object) -> tuple[int, int]:
    region, place = _new("uint64_t *"), _new("uint32_t *")
    pointer = _pointer(address)
    number = _constant(_KINDS, "memory kind", kind)
    size, ordinal = _whole("nbytes", nbytes), _whole("device", device, 32)
    _call("kvf_agent_register", agent.get(), pointer, size, number, ordinal, region, place)
    agent.owners[region[0]] = owner
    return region[0], place[0]


def _pointer(address: int) -> Any:
    if not isinstance(address, int) or not 0 <= address < 1 << 64:
        raise make_error(-1, "invalid_argument", f"an address must be an int from 0 to 2**64 - 1, not {address!r}")
    return _load().ffi.cast("void *", address)


def agent_deregister(agent: Handle, region: int) -> None:
    _call("kvf_agent_deregister", agent.get(), region)
    agent.owners.pop(region, None)


def agent_metadata(agent: Handle) -> bytes:
    return _bytes_from("kvf_agent_metadata", agent.get())


def agent_connect(agent: Handle, metadata: bytes) -> int:
    metadata = _checked_bytes("metadata", metadata)
    peer = _new("uint64_t *")
    _call("kvf_agent_connect", agent.get(), metadata, len(metadata), peer)
    number: int = peer[0]
    return number


def agent_disconnect(agent: Handle, peer: int) -> None:
    _call("kvf_agent_disconnect", agent.get(), _whole("peer", peer))


def agent_route(agent: Handle, peer: int) -> bytes:
    return _bytes_from("kvf_agent_route", agent.get(), _whole("peer", peer))


_SEGMENT = struct.Struct("=3I4x5Q")
"""`kvf_segment`. Packed here it takes a third of the time that cffi needs for tuples."""


_SEGMENT_FIELDS = (
    "list",
    "local_region",
    "remote_region",
    "local_offset",
    "remote_offset",
    "local_stride",
    "remote_stride",
    "length",
)


def _wrong_segment(segments: object, error: Exception) -> KvferryError:
    """What is wrong with segments that cannot be packed."""
    if not isinstance(segments, Iterable):
        return make_error(-1, "invalid_argument", f"segments must be a list of Segment, not {type(segments).__name__}")
    if isinstance(segments, tuple) and hasattr(segments, "_fields"):
        return make_error(
            -1, "invalid_argument", "segments must be a list of Segment, not a single one: pass [segment]"
        )
    for number, segment in enumerate(segments):
        if not isinstance(segment, tuple) or len(segment) != len(_SEGMENT_FIELDS):
            return make_error(
                -1, "invalid_argument", f"segments[{number}] must be a Segment, not {type(segment).__name__}"
            )
        for field, value in zip(_SEGMENT_FIELDS, segment, strict=True):
            try:
                _whole(f"segments[{number}].{field}", value, 64 if field.endswith(_LONG_FIELDS) else 32)
            except KvferryError as wrong:
                return wrong
    return make_error(-1, "invalid_argument", f"segments: {error}")


_LONG_FIELDS = ("offset", "stride", "length")


def _check_pairs(blocks: object) -> None:
    """Raises for `blocks` that are no pairs of lists of equal length."""
    expected = "blocks must be a list of pairs (local block ids, remote block ids), one per list that segments name"
    if not isinstance(blocks, Sequence):
        raise make_error(-1, "invalid_argument", f"{expected}; not {type(blocks).__name__}")
    for number, pair in enumerate(blocks):
        try:
            ours, theirs = pair
            counts = len(ours), len(theirs)
        except (TypeError, ValueError):
            raise make_error(-1, "invalid_argument", f"{expected}; blocks[{number}] is {pair!r:.80}") from None
        if counts[0] != counts[1]:
            raise make_error(
                -1,
                "invalid_argument",
                f"block list {number} names {counts[0]} local and {counts[1]} remote blocks; they go in pairs",
            )


def agent_transfer(
    agent: Handle,
    peer: int,
    direction: str,
    segments: Sequence[tuple[int, ...]],
    blocks: Sequence[tuple[Ids, Ids]],
) -> int:
    number = _constant(_DIRECTIONS, "direction", direction)
    _check_pairs(blocks)
    try:
        packed = b"".join([_SEGMENT.pack(*segment) for segment in segments])
    except (TypeError, struct.error) as error:
        raise _wrong_segment(segments, error) from error
    array = _load().ffi.from_buffer("kvf_segment[]", packed)
    local = _Lists([pair[0] for pair in blocks], "local blocks")
    remote = _Lists([pair[1] for pair in blocks], "remote blocks")
    out = _new("uint64_t *")
    _call(
        "kvf_agent_transfer",
        agent.get(),
        _whole("peer", peer),
        number,
        array,
        len(packed) // _SEGMENT.size,
        local.ids,
        remote.ids,
        local.offsets,
        local.count,
        out,
    )
    transfer: int = out[0]
    return transfer


def agent_cancel(agent: Handle, transfer: int) -> None:
    _call("kvf_agent_cancel", agent.get(), _whole("transfer", transfer))


def agent_send(agent: Handle, peer: int, data: bytes) -> None:
    data = _checked_bytes("a message", data)
    _call("kvf_agent_send", agent.get(), _whole("peer", peer), data, len(data))


def agent_events(agent: Handle, timeout: float) -> list[RawEvent]:
    """Up to 256 events, after waiting up to `timeout` seconds for the first. One thread at a time."""
    library = _load()
    events, count = _new(f"kvf_event[{_EVENTS_AT_ONCE}]"), _new("size_t *")
    if timeout > 0:
        _call("kvf_agent_wait", agent.get(), _milliseconds(timeout), events, _EVENTS_AT_ONCE, count)
    else:
        _call("kvf_agent_poll", agent.get(), events, _EVENTS_AT_ONCE, count)
    return [_event(library, agent, events[number]) for number in range(count[0])]


def _event(library: _Library, agent: Handle, event: Any) -> RawEvent:
    kinds: dict[int, Literal["transfer_done", "message", "peer_connected", "peer_lost"]] = {
        library.functions.KVF_EVENT_TRANSFER_DONE: "transfer_done",
        library.functions.KVF_EVENT_MESSAGE: "message",
        library.functions.KVF_EVENT_PEER_CONNECTED: "peer_connected",
        library.functions.KVF_EVENT_PEER_LOST: "peer_lost",
    }
    payload = _bytes_from("kvf_agent_recv", agent.get(), event.payload) if event.payload else b""
    error = None
    if event.status != 0:
        error = make_error(event.status, _status_name(library, event.status), payload.decode("utf-8", "replace"))
    return RawEvent(
        kinds[event.kind],
        event.transfer,
        event.peer,
        event.bytes,
        event.operations,
        event.duration_us / 1e6,
        event.incarnation,
        payload,
        error,
    )


def agent_stats(agent: Handle) -> bytes:
    return _bytes_from("kvf_agent_stats", agent.get())


def shutdown(handle: Handle, timeout: float) -> None:
    """Shuts an agent or worker down, waiting up to `timeout` seconds, and frees it. Harmless when repeated."""
    if handle.pointer is None:
        return
    limit = _milliseconds(timeout)
    try:
        _call(f"kvf_{handle.noun}_shutdown", handle.get(), limit)
    except KvferryError:
        # Freeing it finds it shut down and succeeds, though memory may still be in use.
        _left_behind.extend(handle.owners.values())
        handle.owners.clear()
        raise
    finally:
        handle.free()


# --- listener


def listener_start(config: bytes) -> Handle:
    return _start("listener", config)


def listener_offer(listener: Handle, metadata: bytes) -> int:
    metadata = _checked_bytes("metadata", metadata)
    missing = _new("uint32_t *")
    _call("kvf_listener_offer", listener.get(), metadata, len(metadata), missing)
    number: int = missing[0]
    return number


def listener_address(listener: Handle) -> tuple[str, int]:
    host, port = _new("kvf_buffer *"), _new("uint16_t *")
    _call("kvf_listener_address", listener.get(), host, port)
    return _take(host).decode(), port[0]


# --- worker


def worker_start(config: bytes) -> Handle:
    worker = _start("worker", config)
    worker_set_outbox(worker, _OUTBOX_BYTES if _IN_ORDER else _load().ffi.sizeof("kvf_outbox"))
    worker.submit = partial(_load().functions.kvf_worker_submit, worker.get())
    return worker


def worker_register(worker: Handle, address: int, nbytes: int, kind: str, device: int) -> int:
    place = _new("uint32_t *")
    number = _constant(_KINDS, "memory kind", kind)
    size, ordinal = _whole("nbytes", nbytes), _whole("device", device, 32)
    _call("kvf_worker_register", worker.get(), _pointer(address), size, number, ordinal, place)
    region: int = place[0]
    return region


def worker_set_geometry(worker: Handle, geometry: bytes) -> None:
    _call("kvf_worker_set_geometry", worker.get(), geometry, len(geometry))


def worker_metadata(worker: Handle) -> bytes:
    return _bytes_from("kvf_worker_metadata", worker.get())


def worker_push_metadata(worker: Handle, host: str, port: int, expected: int, timeout: float) -> int:
    name, missing = _text("host", host), _new("uint32_t *")
    limit, port, expected = _milliseconds(timeout), _whole("port", port, 16), _whole("expected", expected, 32)
    _call("kvf_worker_push_metadata", worker.get(), name, len(name), port, expected, limit, missing)
    number: int = missing[0]
    return number


def worker_submit(worker: Handle, step: bytes) -> None:
    step = _checked_bytes("a step", step)
    submit = worker.submit
    if submit is None:
        raise worker.shut_down()
    status = submit(step, len(step))
    if status != 0:
        raise _error(_load(), status)


def worker_set_outbox(worker: Handle, capacity: int) -> None:
    """Before anybody polls."""
    outbox = _Outbox(capacity)
    _call("kvf_worker_set_outbox", worker.get(), _load().ffi.cast("kvf_outbox *", outbox.memory), capacity)
    worker.outbox, worker.news = outbox, outbox.news
    _with_outbox.add(worker)


def worker_poll(worker: Handle) -> bytes | None:
    outbox = worker.outbox
    if outbox is None:
        # For the error.
        return _bytes_from("kvf_worker_poll", worker.get())
    try:
        turn = outbox.turns.pop()
    except IndexError:
        # Another thread takes what there is.
        return None
    try:
        if outbox.news[0] == 1:
            report: bytes = outbox.reports[: outbox.length[0]]
            outbox.full[0] = 0
            return report
        return _bytes_from("kvf_worker_poll", worker.get()) or None
    finally:
        outbox.turns.append(turn)


def worker_wait(worker: Handle, timeout: float) -> bytes | None:
    limit = _milliseconds(timeout)
    deadline = time.monotonic() + limit / 1000
    outbox = worker.outbox
    if outbox is None:
        # For the error.
        return _bytes_from("kvf_worker_wait", worker.get(), 0)
    while True:
        left = _milliseconds(max(deadline - time.monotonic(), 0))
        try:
            turn = outbox.turns.pop()
            break
        except IndexError:
            # Another thread polls, which is over at once, or waits.
            worker.get()
            if left == 0:
                return None
            time.sleep(0.001)
    try:
        return _bytes_from("kvf_worker_wait", worker.get(), left) or None
    finally:
        outbox.turns.append(turn)


def worker_stats(worker: Handle) -> bytes:
    return _bytes_from("kvf_worker_stats", worker.get())


# --- scheduler


def scheduler_start(config: bytes) -> Handle:
    return _start("scheduler", config)


def _rank_list(ranks: Mapping[tuple[int, int], bytes]) -> tuple[Any, list[Any]]:
    """The ranks' metadata as a C array, and what must live as long as it."""
    ffi = _load().ffi
    if not isinstance(ranks, Mapping):
        raise make_error(
            -1, "invalid_argument", f"ranks must map (pp_rank, tp_rank) to metadata, not {type(ranks).__name__}"
        )
    for rank in ranks:
        if not isinstance(rank, tuple) or len(rank) != 2:
            raise make_error(-1, "invalid_argument", f"ranks: the key {rank!r} must be a pair (pp_rank, tp_rank)")
    blobs = ffi.new("kvf_rank_metadata[]", len(ranks))
    keep = []
    for blob, ((pp, tp), metadata) in zip(blobs, ranks.items(), strict=True):
        data = ffi.from_buffer(_checked_bytes(f"the metadata of rank (pp {pp}, tp {tp})", metadata))
        keep.append(data)
        try:
            blob.pp_rank, blob.tp_rank = pp, tp
        except (TypeError, OverflowError) as error:
            raise make_error(-1, "invalid_argument", f"ranks must be integers from 0: {error}") from error
        blob.data, blob.len = ffi.cast("uint8_t *", data), len(data)
    return blobs, keep


def scheduler_set_engine(scheduler: Handle, ranks: Mapping[tuple[int, int], bytes]) -> None:
    blobs, _keep = _rank_list(ranks)
    _call("kvf_scheduler_set_engine", scheduler.get(), blobs, len(ranks))


def scheduler_serve(scheduler: Handle, ranks: Mapping[tuple[int, int], bytes]) -> tuple[str, int]:
    blobs, _keep = _rank_list(ranks)
    host, port = _new("kvf_buffer *"), _new("uint16_t *")
    _call("kvf_scheduler_serve", scheduler.get(), blobs, len(ranks), host, port)
    return _take(host).decode(), port[0]


def scheduler_arrived(scheduler: Handle, request: str, params: bytes) -> None:
    name = _text("a request id", request)
    _call("kvf_scheduler_arrived", scheduler.get(), name, len(name), params, len(params))


def scheduler_matched(
    scheduler: Handle, request: str, params: bytes, prompt_tokens: int, computed_tokens: int
) -> tuple[int, bool]:
    name = _text("a request id", request)
    tokens, asynchronous = _new("uint64_t *"), _new("uint8_t *")
    _call(
        "kvf_scheduler_matched",
        scheduler.get(),
        name,
        len(name),
        params,
        len(params),
        _whole("prompt_tokens", prompt_tokens),
        _whole("computed_tokens", computed_tokens),
        tokens,
        asynchronous,
    )
    return tokens[0], asynchronous[0] != 0


def scheduler_allocated(
    scheduler: Handle, request: str, params: bytes, blocks: Sequence[Ids], prompt_tokens: int, external_tokens: int
) -> None:
    name = _text("a request id", request)
    lists = _Lists(blocks, "blocks")
    _call(
        "kvf_scheduler_allocated",
        scheduler.get(),
        name,
        len(name),
        params,
        len(params),
        lists.ids,
        lists.offsets,
        lists.count,
        _whole("prompt_tokens", prompt_tokens),
        _whole("external_tokens", external_tokens),
    )


def scheduler_finished(
    scheduler: Handle,
    request: str,
    params: bytes,
    outcome: str,
    blocks: Sequence[Ids],
    computed_tokens: int,
) -> tuple[bool, bytes | None]:
    name = _text("a request id", request)
    number = _constant(_OUTCOMES, "outcome", outcome)
    lists = _Lists(blocks, "blocks")
    keep, answer = _new("uint8_t *"), _new("kvf_buffer *")
    _call(
        "kvf_scheduler_finished",
        scheduler.get(),
        name,
        len(name),
        params,
        len(params),
        number,
        lists.ids,
        lists.offsets,
        lists.count,
        _whole("computed_tokens", computed_tokens),
        keep,
        answer,
    )
    return keep[0] != 0, _take(answer) or None


def scheduler_step(scheduler: Handle) -> bytes:
    return _bytes_from("kvf_scheduler_step", scheduler.get())


def scheduler_has_pending(scheduler: Handle) -> bool:
    pending = _new("uint8_t *")
    _call("kvf_scheduler_has_pending", scheduler.get(), pending)
    return bool(pending[0])


def scheduler_report(scheduler: Handle, report: bytes) -> bytes:
    report = _checked_bytes("a report", report)
    return _bytes_from("kvf_scheduler_report", scheduler.get(), report, len(report))


def scheduler_note(scheduler: Handle, report: bytes) -> None:
    """As `scheduler_report`, for a caller that wants no outcome."""
    report = _checked_bytes("a report", report)
    _call("kvf_scheduler_report", scheduler.get(), report, len(report), _load().ffi.NULL)


def scheduler_over(scheduler: Handle, request: str, side: str) -> None:
    name = _text("a request id", request)
    _call("kvf_scheduler_over", scheduler.get(), name, len(name), _constant(_SIDES, "side", side))


def scheduler_stats(scheduler: Handle) -> bytes:
    return _bytes_from("kvf_scheduler_stats", scheduler.get())


# --- aggregator, reports and stats

_SIDES = {"sending": "KVF_SENDING", "recving": "KVF_RECVING"}


def aggregator_start(config: bytes) -> Handle:
    return _start("aggregator", config)


def aggregator_add(aggregator: Handle, report: bytes) -> None:
    report = _checked_bytes("a report", report)
    _call("kvf_aggregator_add", aggregator.get(), report, len(report))


def aggregator_expect(aggregator: Handle, request: str, side: str, count: int) -> None:
    name = _text("a request id", request)
    number = _constant(_SIDES, "side", side)
    _call("kvf_aggregator_expect", aggregator.get(), name, len(name), number, _whole("count", count, 32))


def aggregator_forget(aggregator: Handle, request: str) -> None:
    name = _text("a request id", request)
    _call("kvf_aggregator_forget", aggregator.get(), name, len(name))


def aggregator_take(aggregator: Handle) -> bytes:
    return _bytes_from("kvf_aggregator_take", aggregator.get())


def report_decode(report: bytes) -> bytes:
    report = _checked_bytes("a report", report)
    return _bytes_from("kvf_report_decode", report, len(report))


def report_encode(body: bytes) -> bytes:
    return _bytes_from("kvf_report_encode", body, len(body))


def report_merge(left: bytes, right: bytes) -> bytes:
    left, right = _checked_bytes("a report", left), _checked_bytes("a report", right)
    return _bytes_from("kvf_report_merge", left, len(left), right, len(right))


def stats_merge(left: bytes, right: bytes) -> bytes:
    return _bytes_from("kvf_stats_merge", left, len(left), right, len(right))


def stats_metrics() -> bytes:
    return _bytes_from("kvf_stats_metrics")


def stats_prometheus(rows: bytes) -> bytes:
    return _bytes_from("kvf_stats_prometheus", rows, len(rows))


def plan_describe(deployment: bytes) -> bytes:
    return _bytes_from("kvf_plan_describe", deployment, len(deployment))


def settings_describe(given: bytes) -> bytes:
    return _bytes_from("kvf_settings_describe", given, len(given))


# --- log

_callback: Any = None


def log_set(emit: Callable[[int, str, str], None], level: int) -> None:
    """Has `emit(level, target, message)` called for every line up to `level`, from any of the library's threads."""
    global _callback
    library = _load()

    def forward(number: int, target: Any, message: Any, _user: Any) -> None:
        emit(
            number,
            library.ffi.string(target).decode("utf-8", "replace"),
            library.ffi.string(message).decode("utf-8", "replace"),
        )

    callback = library.ffi.callback("void(uint32_t, const char *, const char *, void *)", forward)
    _call("kvf_log_set", callback, library.ffi.NULL, level)
    # Only now may the callback that was set before be collected: the library has stopped calling it.
    _callback = callback


def log_unset() -> None:
    """Undoes `log_set`: when it returns, no call of `emit` is running or will come."""
    global _callback
    _call("kvf_log_unset")
    _callback = None
