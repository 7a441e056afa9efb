"""Tests of the double: memory pools."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

from cases import case
from driver import INVALID_VALUE, MIB, Driver


def pool(d: Driver, handle_types: int = 0, result: int = 0) -> int:
    out = ctypes.c_uint64()
    d.expect(result, "cuMemPoolCreate", ctypes.byref(out), (ctypes.c_int * 22)(1, handle_types, 1, 0))
    return out.value


def blocked(d: Driver, stream: int) -> tuple[threading.Event, object]:
    """Makes a stream wait for an event; with it, what has to be kept until then."""
    may_end = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: may_end.wait(45) or os.abort())
    d.expect(0, "cuLaunchHostFunc", stream, wait, None)
    return may_end, wait


@case({"KVFERRY_CUDA_DOUBLE_MACHINE": f"selftest{os.getpid()}"})
def pools() -> None:
    d = Driver()
    stream, free = d.stream(), d.free_bytes()
    default, mine = d.get("cuDeviceGetDefaultMemPool", 0), pool(d)
    pool(d, handle_types=1, result=801)
    assert d.get("cuDeviceGetMemPool", 0) == default != mine
    d.expect(0, "cuMemPoolSetAttribute", mine, 4, ctypes.byref(ctypes.c_uint64(MIB)))
    kept = ctypes.c_uint64()
    d.expect(0, "cuMemPoolGetAttribute", mine, 4, ctypes.byref(kept))
    assert kept.value == MIB
    a = d.get("cuMemAllocFromPoolAsync", MIB, mine, stream)
    b = d.get("cuMemAllocAsync", MIB, stream)
    assert (d.attribute(17, a), d.attribute(17, b)) == (mine, default)
    d.expect(0, "cuMemsetD8Async", a, 7, MIB, stream)
    d.expect(0, "cuMemcpyAsync", b, a, MIB, stream)
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(b, MIB) == b"\7" * MIB
    # No other process can have it, by any handle.
    assert [d.attribute(which, a, kind) for which, kind in ((1, ctypes.c_uint64), (10, ctypes.c_int))] == [0, 0]
    assert d.attribute(14, a) == 0
    d.expect(INVALID_VALUE, "cuIpcGetMemHandle", ctypes.create_string_buffer(64), a)
    d.expect(INVALID_VALUE, "cuMemRetainAllocationHandle", ctypes.byref(ctypes.c_uint64()), a)
    # It is freed in stream order, and nothing new may use it from the call on.
    may_end, wait = blocked(d, stream)
    d.expect(0, "cuMemsetD8Async", a, 8, MIB, stream)
    d.expect(0, "cuMemFreeAsync", a, stream)
    for call in (
        ("cuMemFreeAsync", a, stream),
        ("cuMemFree_v2", a),
        ("cuMemsetD8Async", a, 9, 8, stream),
        ("cuMemFreeAsync", d.alloc(64), stream),
    ):
        d.expect(INVALID_VALUE, *call)
    assert free - d.free_bytes() > 2 * MIB
    may_end.set()
    d.expect(0, "cuStreamSynchronize", stream)
    assert wait is not None
    d.expect(INVALID_VALUE, "cuPointerGetAttribute", ctypes.byref(ctypes.c_uint64()), 7, a)
    d.expect(0, "cuMemFree_v2", b)
    assert free - d.free_bytes() < MIB
    d.expect(0, "cuDeviceSetMemPool", 0, mine)
    assert d.get("cuDeviceGetMemPool", 0) == mine
    d.expect(0, "cuMemPoolDestroy", mine)
    d.expect(INVALID_VALUE, "cuMemPoolDestroy", mine)
    d.expect(INVALID_VALUE, "cuMemPoolDestroy", default)
    assert d.get("cuDeviceGetMemPool", 0) == default


@case(status=-signal.SIGABRT)
def pool_memory_before_its_allocation() -> None:
    d = Driver()
    stream, other = d.stream(), d.stream()
    _, wait = blocked(d, stream)
    a = d.get("cuMemAllocAsync", 4096, stream)
    d.expect(0, "cuMemsetD8Async", a, 1, 4096, other)
    d.call("cuStreamSynchronize", other)
    assert wait is not None


@case(status=-signal.SIGABRT)
def pool_memory_after_its_free() -> None:
    d = Driver()
    stream, other = d.stream(), d.stream()
    a = d.get("cuMemAllocAsync", 4096, stream)
    d.expect(0, "cuStreamSynchronize", stream)
    may_end, wait = blocked(d, other)
    d.expect(0, "cuMemsetD8Async", a, 1, 4096, other)
    d.expect(0, "cuMemFreeAsync", a, stream)
    d.expect(0, "cuStreamSynchronize", stream)
    may_end.set()
    d.call("cuStreamSynchronize", other)
    assert wait is not None
