"""The core of every call of libkvferry: the library, its errors, its buffers and its root objects.

The declarations are those of `kvferry.h` as shipped, so that they cannot differ from the library's. A call raises
`KvferryError` for a status other than 0, and releases the GIL while the library works. The library is loaded by the
first call, not by the import.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import math
import os
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgpack

from ._errors import InternalError, KvferryError, NotFoundError, ShutDownError, TimedOutError, invalid, make_error
from ._find import GET_LIBRARY, declarations, header_path, library_path, packaged_ucx, parsed_header

ABI_VERSION = 1
"""The `kvf_abi_version` that this package was written for."""


class Ids(Protocol):
    """Block ids: a list of int, or an array of them. A contiguous numpy uint32 array is passed on as it lies."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Any: ...


# --- loading


class Library(NamedTuple):
    ffi: Any
    functions: Any
    ids: Any
    """`uint32_t[]`, looked up once: an engine's thread, whose caches hold other things, pays for cffi's look-ups."""
    offsets: Any
    segments: Any


_load_lock = threading.Lock()
_loaded: Library | None = None


def _declared(parsed: Path, header: Path) -> Any:
    """cffi's view of the library: of `parsed` where there is such a file, else of the header."""
    spec = importlib.util.spec_from_file_location("kvferry._parsed", parsed) if parsed.is_file() else None
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.ffi
    # Only a source tree has to parse, which takes longer than everything else that a process does to load the library.
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(declarations(header.read_text(encoding="utf-8")))
    return ffi


def _open() -> Library:
    path = library_path()
    ffi = _declared(parsed_header(), header_path())
    try:
        functions = ffi.dlopen(str(path))
    except OSError as error:
        # cffi adds that it has also looked for a library called like that, which no path is.
        reason = str(error).partition(".  Additionally")[0]
        raise make_error(-2, "not_found", f"cannot load {path}: {reason}; {GET_LIBRARY}") from error
    # What is not in the library, of declarations parsed now or by the wheel's build.
    absent = (AttributeError, getattr(ffi, "error", AttributeError))
    try:
        found = functions.kvf_abi_version()
    except absent:
        text = f"{path} has no kvf_abi_version: it is no libkvferry; {GET_LIBRARY}"
        raise make_error(-6, "unsupported", text) from None
    if found != ABI_VERSION:
        raise make_error(
            -6,
            "unsupported",
            f"{path} has C ABI {found}, this package was written for {ABI_VERSION}; install the library and the "
            "package of one release",
        )
    # An older one of the same ABI number lacks what was added to it since.
    missing = []
    for name in dir(functions):
        try:
            getattr(functions, name)
        except absent:
            missing.append(name)
    if missing:
        raise make_error(
            -6,
            "unsupported",
            f"{path} has no {', '.join(missing)}, which this package calls; install the library and the package of one "
            "release",
        )
    for ucx in packaged_ucx():
        # A path that the library cannot take is no hint.
        hint = ucx.encode(errors="surrogateescape")
        functions.kvf_ucx_hint(hint, len(hint))
    return Library(ffi, functions, *map(ffi.typeof, ("uint32_t[]", "uint64_t[]", "kvf_segment[]")))


def load() -> Library:
    global _loaded
    # Without the lock once it is there: an engine's thread, whose caches hold other things, pays microseconds for it.
    if _loaded is not None:
        return _loaded
    with _load_lock:
        if _loaded is None:
            _loaded = _open()
        return _loaded


# --- calls


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status. Bytes are passed as their address and their number."""
    library = load()
    passed: list[Any] = []
    for argument in arguments:
        passed.append(argument)
        if isinstance(argument, bytes):
            passed.append(len(argument))
    try:
        status = getattr(library.functions, name)(*passed)
    except (TypeError, OverflowError) as error:
        raise invalid(f"{name}: {error}") from error
    if status != 0:
        raise last_error(status)


def ask(name: str, *arguments: Any) -> bytes:
    """Calls a function whose last parameter is where it leaves a buffer, and returns what that holds."""
    buffer = new("kvf_buffer *")
    call(name, *arguments, buffer)
    return take(buffer)


def last_error(status: int) -> KvferryError:
    """The error of this thread's last failed call."""
    ffi, functions = load()[:2]
    needed = ffi.new("size_t *")
    size = 1024
    while True:
        text = ffi.new("char[]", size)
        functions.kvf_last_error(text, size, needed)
        if needed[0] < size:
            break
        size = needed[0] + 1
    return error_of(status, ffi.string(text))


def error_of(status: int, message: bytes) -> KvferryError:
    """The error of a status and its text, both from the library."""
    ffi, functions = load()[:2]
    name: bytes = ffi.string(functions.kvf_status_name(status))
    return make_error(status, name.decode(), message.decode("utf-8", "replace"))


def new(ctype: str) -> Any:
    return load().ffi.new(ctype)


def take(buffer: Any) -> bytes:
    """Copies a library-made buffer and gives it back."""
    data = bytes(load().ffi.buffer(buffer.data, buffer.len)) if buffer.len else b""
    call("kvf_buffer_free", buffer)
    return data


# --- waiting

_T = TypeVar("_T")
_TURN_MS = 100


def in_turns(limit: float, attempt: Callable[[int], _T | None]) -> _T | None:
    """Calls `attempt` with the milliseconds that it may wait until it returns something; None after `limit` seconds.

    Every wait for something of the library's goes through here. The turns are short because the interpreter handles
    signals, such as that of Ctrl-C, only between two calls.
    """
    left, deadline = limit * 1000, time.monotonic() + limit
    while True:
        found = attempt(_TURN_MS if left >= _TURN_MS else max(math.ceil(left), 0))
        if found is not None:
            return found
        left = (deadline - time.monotonic()) * 1000
        if left <= 0:
            return None


def aside(act: Callable[[], _T]) -> _T:
    """Runs `act`, a long call that cannot be cut into turns, on a thread of its own, while this one handles signals.

    After an exception from a handler the call goes on until it ends by itself, and nobody learns how.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kvferry-call", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


# --- values


def data(what: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    raise invalid(f"{what} must be bytes, not {type(value).__name__}")


def text(what: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise invalid(f"{what} must be str, not {type(value).__name__}")
    return value.encode("utf-8", "surrogatepass")


def whole(what: str, value: object, bits: int = 64) -> int:
    """`value` as an int that C takes; anything else is named by `what`."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << bits:
        shown = repr(value) if isinstance(value, (int, float, str)) else type(value).__name__
        hint = f"; pass its {'index' if 'region' in what else 'id'}" if hasattr(value, "id") else ""
        raise invalid(f"{what} must be a whole number from 0 to {(1 << bits) - 1}, not {shown}{hint}")
    return number


def seconds(timeout: object, otherwise: str = "") -> float:
    """`timeout` as a number, also one of numpy's; `otherwise` says in the error what else it may be."""
    try:
        number = float(timeout) if hasattr(timeout, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise _no_timeout(timeout, otherwise)
    return number


def milliseconds(timeout: object) -> int:
    number = seconds(timeout)
    if number < 0:
        raise _no_timeout(timeout)
    return int(min(number * 1000 + 0.999, 0xFFFF_FFFF))


def _no_timeout(timeout: object, otherwise: str = "") -> KvferryError:
    return invalid(f"a timeout must be a number of seconds from 0{otherwise}, not {timeout!r:.80}")


def constant(names: Mapping[str, str], what: str, value: str) -> int:
    """The C constant that `names` has for a word."""
    name = names.get(value) if isinstance(value, str) else None
    if name is None:
        raise invalid(f"unknown {what} {value!r}, expected one of {', '.join(names)}")
    number: int = getattr(load().functions, name)
    return number


def _ids(ids: Ids, what: str, number: int) -> tuple[Any, int]:
    """A list's block ids as a C array and their number. A contiguous numpy uint32 array is passed without a copy."""
    library = load()
    try:
        view = memoryview(ids)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        # Also what has a buffer but cannot describe it, such as a numpy array of dates.
        view = None
    if view is not None and view.format == "I" and view.ndim == 1 and view.c_contiguous:
        return library.ffi.from_buffer(library.ids, view), len(view)
    try:
        plain = ids if isinstance(ids, (list, tuple)) else list(ids)
        return library.ffi.new(library.ids, plain), len(plain)
    except (TypeError, ValueError, OverflowError) as error:
        expected = "integers from 0 to 4294967295, as a list or a flat numpy uint32 array"
        raise invalid(f"{what}, list {number}: block ids must be {expected}: {error}") from error


def _joined(parts: Sequence[tuple[Any, int]], ends: Sequence[int]) -> Any:
    """The ids of all lists as one array, of which each ends where the next begins."""
    if len(parts) == 1:
        return parts[0][0]
    library = load()
    ids = library.ffi.new(library.ids, ends[-1])
    for (array, count), start in zip(parts, ends, strict=False):
        library.ffi.memmove(ids + start, array, 4 * count)
    return ids


class Lists:
    """Block lists as one flat array of ids and the offset of each list's end, as the C ABI takes them."""

    def __init__(self, lists: Sequence[Ids], what: str) -> None:
        library = load()
        if not isinstance(lists, Iterable):
            raise invalid(f"{what} must be lists of block ids, not {type(lists).__name__}")
        parts = [_ids(ids, what, number) for number, ids in enumerate(lists)]
        ends = [0, *accumulate(count for _, count in parts)]
        self.ids = _joined(parts, ends)
        self.count = len(parts)
        self.offsets = library.ffi.new(library.offsets, ends)


def pairs(blocks: Sequence[tuple[Ids, Ids]]) -> tuple[Any, Any, Any, int]:
    """Pairs of block lists as the C ABI takes them: local ids, remote ids, where each list ends, how many lists."""
    local: list[tuple[Any, int]] = []
    remote: list[tuple[Any, int]] = []
    ends = [0]
    try:
        for number, (ours, theirs) in enumerate(blocks):
            local.append(_ids(ours, "local blocks", number))
            remote.append(_ids(theirs, "remote blocks", number))
            counts = local[number][1], remote[number][1]
            if counts[0] != counts[1]:
                text = f"block list {number} names {counts[0]} local and {counts[1]} remote blocks; they go in pairs"
                raise invalid(text)
            ends.append(ends[number] + counts[0])
    except (TypeError, ValueError, KvferryError) as error:
        wrong = _wrong_pairs(blocks)
        if wrong is None and isinstance(error, KvferryError):
            raise
        raise wrong or invalid(f"{_PAIRS}: {error}") from error
    library = load()
    return _joined(local, ends), _joined(remote, ends), library.ffi.new(library.offsets, ends), len(local)


_PAIRS = "blocks must be a list of pairs (local block ids, remote block ids), one per list that segments name"


def _wrong_pairs(blocks: object) -> KvferryError | None:
    """Says why `blocks` are no pairs of lists, if they are none."""
    if not isinstance(blocks, Sequence):
        return invalid(f"{_PAIRS}; not {type(blocks).__name__}")
    for number, pair in enumerate(blocks):
        try:
            ours, theirs = pair
            _ = len(ours), len(theirs)
        except (TypeError, ValueError):
            return invalid(f"{_PAIRS}; blocks[{number}] is {pair!r:.80}")
    return None


# --- root objects

_left_behind: list[object] = []
"""Owners of memory that the library could not give back in time and may still touch."""


_WITH_MEMORY = ("agent", "worker")
"""Those whose threads use memory of the program."""

_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends agents and workers before the interpreter frees what they read and write, in an order of its own."""
    for handle in list(_handles):
        if handle.noun not in _WITH_MEMORY:
            continue
        try:
            handle.free()
        except Exception as error:
            logging.getLogger("kvferry").error("ending an %s at the interpreter's exit: %s", handle.noun, error)


def _leave_all() -> None:
    """In a process that was forked off: the objects are the other one's, and their locks may be held for ever."""
    global _load_lock
    _load_lock = threading.Lock()
    for handle in list(_handles):
        handle.leave()


os.register_at_fork(after_in_child=_leave_all)


class _Thread(threading.local):
    is_in_log_callback = False


this_thread = _Thread()
"""The state of the calling thread."""


class Handle:
    """A root object of the library. Freed by `free`, `shutdown` or with the last reference to it.

    The methods call the functions of its noun: `call("cancel", ...)` of an agent is `kvf_agent_cancel`. `owners` are
    the objects whose memory the library may touch. They are let go after it is done with them.
    """

    pointer: Any = None
    is_of_another_process = False

    def __init__(self, noun: str, config: bytes) -> None:
        self.noun = noun
        self.owners: dict[object, object] = {}
        self.lock = threading.Lock()
        out = new(f"kvf_{noun} **")
        call(f"kvf_{noun}_start", config, out)
        self.pointer = out[0]
        _handles.add(self)

    def get(self) -> Any:
        """The pointer; raises `ShutDownError` when it is freed, or was made before a fork."""
        pointer = self.pointer
        if pointer is None:
            why = "is shut down; make a new one"
            if self.is_of_another_process:
                why = "was made before a fork, by another process; start processes by spawn, and make one here"
            raise make_error(-17, "shut_down", f"this {self.noun} {why}")
        return pointer

    def leave(self) -> None:
        """Forgets the object, which is another process's."""
        self.lock = threading.Lock()
        self.is_of_another_process, self.pointer = True, None

    def call(self, verb: str, *arguments: Any) -> None:
        try:
            call(f"kvf_{self.noun}_{verb}", self.get(), *arguments)
        except NotFoundError:
            # Another thread may have freed it after the look.
            self.get()
            raise

    def ask(self, verb: str, *arguments: Any) -> bytes:
        buffer = new("kvf_buffer *")
        self.call(verb, *arguments, buffer)
        return take(buffer)

    def register(self, owner: object, *arguments: Any) -> object:
        """Registers memory of `owner`, which is kept until the object is freed. Returns its key in `owners`.

        It is kept from before the call on, since an interrupt can end the method right after the call.
        """
        key = object()
        self.owners[key] = owner
        try:
            self.call("register", *arguments)
        except (TimedOutError, ShutDownError, InternalError):
            # The library may have registered it all the same.
            raise
        except KvferryError:
            del self.owners[key]
            raise
        return key

    def number(self, ctype: str, verb: str, *arguments: Any) -> int:
        """The number of type `ctype` that a function leaves at its last parameter."""
        out = new(f"{ctype} *")
        self.call(verb, *arguments, out)
        return int(out[0])

    def address(self, verb: str, *arguments: Any) -> tuple[str, int]:
        """The host and port that a function leaves at its last two parameters."""
        host, port = new("kvf_buffer *"), new("uint16_t *")
        self.call(verb, *arguments, host, port)
        return take(host).decode(), port[0]

    def free(self) -> None:
        with self.lock:
            pointer, self.pointer = self.pointer, None
        if pointer is None:
            return
        try:
            call(f"kvf_{self.noun}_free", pointer)
        except BaseException:
            _left_behind.extend(self.owners.values())
            raise
        finally:
            self.owners.clear()

    def shutdown(self, timeout: float) -> None:
        """Shuts an agent or worker down, waiting up to `timeout` seconds, and frees it. Harmless when repeated."""
        if self.pointer is None:
            return
        limit = milliseconds(timeout)
        try:
            self.end("shutdown", limit)
        finally:
            self.free()

    def end(self, verb: str, limit: int) -> None:
        """Calls what ends an agent or worker within `limit` milliseconds; frees it if that fails."""
        try:
            self.call(verb, limit)
        except KvferryError:
            # Freeing it fails likewise, which leaves the owners of its memory behind.
            with contextlib.suppress(KvferryError):
                self.free()
            raise

    def __del__(self) -> None:
        # Modules may be half gone at interpreter exit; the process ends anyway then.
        try:
            if this_thread.is_in_log_callback:
                # The collector runs on any thread, and the library refuses calls on this one.
                start_new_thread(_free, (self,))
            else:
                self.free()
        except Exception:
            pass


def _free(handle: Handle) -> None:
    try:
        handle.free()
    except Exception:
        pass


# --- versions


def version() -> str:
    """The library's version."""
    ffi, functions = load()[:2]
    number: bytes = ffi.string(functions.kvf_version())
    return number.decode()


def protocol_versions() -> tuple[int, int]:
    """The oldest and the newest protocol version that the library speaks to other engines."""
    functions = load().functions
    return functions.kvf_protocol_oldest(), functions.kvf_protocol_version()


def abi_version() -> int:
    """The library's C ABI number."""
    number: int = load().functions.kvf_abi_version()
    return number


def ucx_info(ucx_lib: str | None = None) -> dict[str, Any]:
    """Which UCX the agents of this process use: `{"path": str, "version": str, "source": str}`.

    Opens it. Raises `UcxMissingError` when there is none; the message says where it was searched for.
    """
    info: dict[str, Any] = msgpack.unpackb(ask("kvf_ucx_info", text("ucx_lib", ucx_lib or "")))
    return info
