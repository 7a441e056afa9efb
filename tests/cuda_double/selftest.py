"""Tests of the CUDA driver double: `selftest.py OUTDIR` with what `build OUTDIR` made. Standard library only.

Every test runs in a process of its own, so that one which must die by a signal can, and settings can differ.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable

from driver import (
    GRANULE,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    MIB,
    NON_BLOCKING,
    NOT_FOUND,
    NOT_READY,
    OUTDIR,
    Child,
    Driver,
    helper_commands,
    opened,
)

TESTS: dict[str, tuple[Callable[[], None], dict[str, str], int]] = {}


def case(settings: dict[str, str] | None = None, status: int = 0) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a test, with environment variables and the exit status (a signal's number, negative) it must have."""

    def register(test: Callable[[], None]) -> Callable[[], None]:
        TESTS[test.__name__] = (test, settings or {}, status)
        return test

    return register


@case()
def devices_and_contexts() -> None:
    d = Driver(context=False)
    assert d.get("cuDeviceGetCount", kind=ctypes.c_int) == 1
    assert d.get("cuDriverGetVersion", kind=ctypes.c_int) == 12080
    d.expect(101, "cuDeviceGet", ctypes.byref(ctypes.c_int()), 1)
    name = ctypes.create_string_buffer(64)
    d.expect(0, "cuDeviceGetName", name, 64, 0)
    assert name.value == b"kvferry CUDA double"
    for call in (
        ("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 64),
        ("cuStreamCreate", ctypes.byref(ctypes.c_uint64()), 0),
        ("cuEventCreate", ctypes.byref(ctypes.c_uint64()), 0),
        ("cuCtxSynchronize",),
        ("cuMemcpyDtoH_v2", ctypes.create_string_buffer(8), 64, 8),
        ("cuCtxPopCurrent_v2", None),
    ):
        d.expect(INVALID_CONTEXT, *call)
    first = d.retain(0)
    assert d.retain(0) == first
    d.expect(0, "cuCtxPushCurrent_v2", first)
    number, again = ctypes.c_uint64(), ctypes.c_uint64()
    d.expect(0, "cuCtxGetId", first, ctypes.byref(number))
    memory, stream = d.alloc(4096), d.stream()
    d.expect(0, "cuDevicePrimaryCtxRelease_v2", 0)
    d.expect(0, "cuStreamSynchronize", stream)
    d.expect(0, "cuDevicePrimaryCtxRelease_v2", 0)
    d.expect(INVALID_HANDLE, "cuStreamSynchronize", stream)
    d.expect(709, "cuCtxSynchronize")
    d.expect(INVALID_CONTEXT, "cuCtxSetCurrent", first)
    d.expect(INVALID_VALUE, "cuPointerGetAttribute", ctypes.byref(ctypes.c_uint64()), 7, memory)
    d.expect(INVALID_CONTEXT, "cuDevicePrimaryCtxRelease_v2", 0)
    second = d.retain(0)
    d.expect(0, "cuCtxSetCurrent", second)
    d.expect(0, "cuCtxGetId", second, ctypes.byref(again))
    assert again.value != number.value


@case({"KVFERRY_CUDA_DOUBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "2,GPU-6b766665-7272-7900-646f-75626c650000,9,1"})
def visible_devices() -> None:
    d = Driver(context=False)
    assert d.get("cuDeviceGetCount", kind=ctypes.c_int) == 2
    ids = []
    for device in range(2):
        uuid = ctypes.create_string_buffer(16)
        d.expect(0, "cuDeviceGetUuid_v2", uuid, device)
        ids.append(uuid.raw[15])
    assert ids == [2, 0], ids
    assert d.get("cuDeviceCanAccessPeer", 0, 1, kind=ctypes.c_int) == 1


@case({"KVFERRY_CUDA_DOUBLE_DEVICES": "2", "KVFERRY_CUDA_DOUBLE_PEER": "0"})
def no_peer_access() -> None:
    d = Driver()
    assert d.get("cuDeviceCanAccessPeer", 0, 1, kind=ctypes.c_int) == 0
    d.expect(217, "cuCtxEnablePeerAccess", d.retain(1), 0)


@case({"KVFERRY_CUDA_DOUBLE_DEVICES": "0"})
def no_device() -> None:
    lib = ctypes.CDLL(f"{OUTDIR}/libcuda.so.1")
    assert lib.cuInit(0) == 100
    assert lib.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 3


@case()
def allocations() -> None:
    d = Driver()
    a = d.alloc(5000)
    d.put(a, b"x" * 5000)
    assert d.read(a, 5000) == b"x" * 5000
    assert d.attribute(2, a + 4999, ctypes.c_int) == 2
    assert (d.attribute(11, a + 17), d.attribute(12, a + 17)) == (a, 5000)
    assert d.attribute(10, a, ctypes.c_int) == 1
    assert d.attribute(1, a) == d.context
    d.expect(INVALID_VALUE, "cuPointerGetAttribute", ctypes.byref(ctypes.c_uint64()), 7, a + 5000)
    d.expect(INVALID_VALUE, "cuMemcpyDtoH_v2", ctypes.create_string_buffer(8), a + 4993, 8)
    number = d.attribute(7, a)
    d.expect(INVALID_VALUE, "cuMemFree_v2", a + 1)
    d.expect(0, "cuMemFree_v2", a)
    d.expect(INVALID_VALUE, "cuMemFree_v2", a)
    d.expect(INVALID_VALUE, "cuMemcpyDtoH_v2", ctypes.create_string_buffer(8), a, 8)
    b = d.alloc(5000)
    assert b == a, "freed addresses are used again at once"
    assert d.attribute(7, b) != number
    out = (ctypes.c_uint64 * 4)(9, 9, 9, 9)
    pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(out) + 8 * i for i in range(4)))
    d.expect(0, "cuPointerGetAttributes", 4, (ctypes.c_int * 4)(1, 2, 12, 9), pointers, ctypes.addressof(out))
    assert [out[0], out[1] & 0xFFFFFFFF, out[2], ctypes.c_int32(out[3] & 0xFFFFFFFF).value] == [0, 0, 0, -2]
    d.expect(2, "cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 1 << 40)


@case(status=-signal.SIGSEGV)
def the_cpu_may_not_read() -> None:
    ctypes.string_at(Driver().alloc(4096), 1)


@case(status=-signal.SIGSEGV)
def the_cpu_may_not_write() -> None:
    ctypes.memset(Driver().alloc(4 * MIB), 1, 1)


@case({"KVFERRY_CUDA_DOUBLE_DELAY_US": "2000000"})
def copies_are_late() -> None:
    d = Driver()
    a, b, stream = d.alloc(4096), d.alloc(4096), d.stream()
    d.put(a, b"A" * 4096)
    d.put(b, b"B" * 4096)
    host = ctypes.create_string_buffer(b"h" * 4096, 4096)
    d.expect(0, "cuMemcpyDtoHAsync_v2", host, a, 4096, stream)
    assert host.raw == b"h" * 4096
    d.expect(NOT_READY, "cuStreamQuery", stream)
    event = d.get("cuEventCreate", 2)
    d.expect(0, "cuEventQuery", event)
    d.expect(0, "cuEventRecord", event, stream)
    d.expect(NOT_READY, "cuEventQuery", event)
    d.expect(0, "cuEventSynchronize", event)
    assert host.raw == b"A" * 4096
    d.expect(0, "cuStreamQuery", stream)
    # The source in pageable memory is read late too.
    d.expect(0, "cuMemcpyHtoDAsync_v2", a, host, 4096, stream)
    ctypes.memset(host, ord("C"), 4096)
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(a, 4096) == b"C" * 4096
    d.expect(0, "cuMemcpyDtoD_v2", b, a, 4096)
    # It was not waited for.
    start = time.monotonic()
    d.expect(0, "cuCtxSynchronize")
    assert time.monotonic() - start > 0.02
    d.expect(0, "cuMemsetD8Async", b, 7, 4096, stream)
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(b, 4096) == b"\7" * 4096
    # A synchronous copy from pageable memory has taken the bytes, but need not be done.
    d.put(a, b"1" * 4096)
    start = time.monotonic()
    ctypes.memset(host, ord("2"), 4096)
    d.expect(0, "cuMemcpyHtoD_v2", a, host, 4096)
    ctypes.memset(host, ord("3"), 4096)
    d.expect(0, "cuMemcpyDtoHAsync_v2", host, a, 4096, stream)
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(a, 4096) == b"2" * 4096
    d.expect(0, "cuCtxSetFlags", 0x80)
    start = time.monotonic()
    d.expect(0, "cuMemcpyDtoD_v2", b, a, 4096)
    assert time.monotonic() - start > 0.04


@case({"KVFERRY_CUDA_DOUBLE_DELAY_US": "8000000"})
def who_does_not_wait_sees_old_bytes() -> None:
    d = Driver()
    a, stream = d.alloc(4096), d.stream()
    d.put(a, b"A" * 4096)
    d.expect(0, "cuCtxSynchronize")
    d.expect(0, "cuMemsetD8Async", a, 7, 4096, stream)
    assert d.read(a, 4096) == b"A" * 4096
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(a, 4096) == b"\7" * 4096


@case({"KVFERRY_CUDA_DOUBLE_DELAY_US": "30000"})
def order_of_streams() -> None:
    d = Driver()
    a, b = d.alloc(4096), d.alloc(4096)
    d.put(a, b"A" * 4096)
    d.expect(0, "cuCtxSynchronize")
    blocking, free = d.stream(0), d.stream()
    # The legacy stream waits for a blocking stream, and a blocking stream for it.
    d.expect(0, "cuMemsetD8Async", a, 1, 4096, blocking)
    d.expect(0, "cuMemcpyDtoD_v2", b, a, 4096)
    d.expect(0, "cuMemsetD8Async", b, 2, 2048, blocking)
    d.expect(0, "cuStreamSynchronize", blocking)
    assert d.read(b, 4096) == b"\2" * 2048 + b"\1" * 2048
    # A non-blocking stream is not waited for.
    may_end = threading.Event()
    slow = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: may_end.wait(45) or os.abort())
    d.expect(0, "cuLaunchHostFunc", free, slow, None)
    d.read(b, 1)
    may_end.set()
    # An event makes it wait, though both streams are non-blocking.
    other, event = d.stream(), d.get("cuEventCreate", 2)
    d.expect(0, "cuMemsetD8Async", a, 9, 4096, free)
    d.expect(0, "cuEventRecord", event, free)
    d.expect(0, "cuStreamWaitEvent", other, event, 0)
    d.expect(0, "cuMemcpyAsync", b, a, 4096, other)
    d.expect(0, "cuStreamSynchronize", other)
    assert d.read(b, 4096) == b"\x09" * 4096
    # A destroyed stream's work still runs, and the handle is no good any more.
    d.expect(0, "cuMemsetD8Async", a, 5, 4096, other)
    d.expect(0, "cuStreamDestroy_v2", other)
    d.expect(INVALID_HANDLE, "cuStreamSynchronize", other)
    d.expect(0, "cuCtxSynchronize")
    assert d.read(a, 4096) == b"\5" * 4096
    d.expect(0, "cuEventDestroy_v2", event)
    d.expect(INVALID_HANDLE, "cuEventQuery", event)
    # The per-thread stream is a stream of its own.
    d.expect(0, "cuMemsetD8Async", a, 6, 4096, 2)
    d.expect(0, "cuStreamSynchronize", 2)
    assert d.read(a, 4096) == b"\6" * 4096


@case()
def callbacks_may_not_call_the_driver() -> None:
    d = Driver()
    results = []
    inside = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: results.append(d.call("cuCtxSynchronize")))
    d.expect(0, "cuLaunchHostFunc", 0, inside, None)
    d.expect(0, "cuCtxSynchronize")
    assert results == [800], results


@case()
def batches() -> None:
    d = Driver()
    a, b, stream = d.alloc(MIB), d.alloc(MIB), d.stream()
    data = os.urandom(MIB)
    d.put(a, data)
    d.expect(0, "cuCtxSynchronize")
    pieces = [(b + MIB - 4096 * (i + 1), a + 4096 * i, 4096) for i in range(256)]
    assert d.batch(stream, pieces) == (0, 77)
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(b, MIB) == b"".join(data[4096 * i : 4096 * (i + 1)] for i in reversed(range(256)))
    assert d.batch(0, pieces)[0] == INVALID_VALUE
    assert d.batch(2, pieces)[0] == INVALID_VALUE
    assert d.batch(stream, [*pieces, (b + MIB - 1, a, 2)]) == (INVALID_VALUE, 256)
    assert d.batch(stream, pieces, order=0)[0] == INVALID_VALUE
    # The order of the pieces is none: overlapping writes come out in more than one way.
    seen = set()
    for _ in range(50):
        assert d.batch(stream, [(b, a + i, 1) for i in range(8)])[0] == 0
        d.expect(0, "cuStreamSynchronize", stream)
        seen.add(d.read(b, 1))
    assert len(seen) > 1
    # Source bytes that are read during the call may change after it.
    host = ctypes.create_string_buffer(b"1" * 64, 64)
    assert d.batch(stream, [(b, ctypes.addressof(host), 64)], order=2)[0] == 0
    ctypes.memset(host, ord("2"), 64)
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(b, 64) == b"1" * 64
    arrays = [(ctypes.c_uint64 * 1)(value) for value in (b, a, 64)]
    attributes, indices = (ctypes.c_int * 6)(1), (ctypes.c_uint64 * 1)(0)
    d.expect(0, "cuMemcpyBatchAsync_v2", *arrays, 1, attributes, indices, 1, stream)
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(b, 64) == data[:64]


@case(status=-signal.SIGABRT)
def use_after_free() -> None:
    d = Driver()
    a, stream = d.alloc(4096), d.stream()
    d.expect(0, "cuMemsetD8Async", a, 1, 4096, stream)
    d.expect(0, "cuMemFree_v2", a)
    assert d.alloc(4096) == a, "the address is in use again, which must not hide it"
    d.call("cuStreamSynchronize", stream)


@case()
def virtual_memory() -> None:
    d = Driver()
    assert d.get("cuMemGetAllocationGranularity", d.properties(), 0) == GRANULE
    base = d.get("cuMemAddressReserve", 4 * GRANULE, 0, 0, 0)
    handles = [d.create() for _ in range(3)]
    host = ctypes.create_string_buffer(b"v" * 8192, 8192)
    copy = ("cuMemcpyHtoD_v2", base + GRANULE - 4096, host, 8192)
    d.expect(INVALID_VALUE, *copy)
    for i in (0, 1, 3):
        d.expect(0, "cuMemMap", base + i * GRANULE, GRANULE, 0, handles[min(i, 2)], 0)
    d.expect(INVALID_VALUE, "cuMemMap", base, GRANULE, 0, handles[2], 0)
    d.expect(INVALID_VALUE, *copy)
    d.access(base, 2 * GRANULE)
    d.access(base + 3 * GRANULE, GRANULE)
    d.expect(INVALID_VALUE, "cuMemSetAccess", base, 4 * GRANULE, (ctypes.c_int * 3)(1, 0, 3), 1)
    d.expect(0, *copy)
    assert d.read(base + GRANULE - 4096, 8192) == b"v" * 8192
    d.expect(INVALID_VALUE, "cuMemcpyHtoD_v2", base + 2 * GRANULE - 4096, host, 8192)
    d.expect(INVALID_VALUE, "cuMemcpyHtoD_v2", base + 3 * GRANULE - 4096, host, 8192)
    d.access(base, GRANULE, flags=1)
    assert d.read(base, 4) == b"\0" * 4
    d.expect(INVALID_VALUE, "cuMemcpyHtoD_v2", base, host, 4)
    for handle in handles:
        d.expect(0, "cuMemRelease", handle)
    assert d.read(base + GRANULE - 4096, 4) == b"vvvv", "a mapping keeps released memory"
    again = d.get("cuMemRetainAllocationHandle", base)
    assert again == handles[0]
    d.expect(0, "cuMemRelease", again)
    d.expect(INVALID_VALUE, "cuMemRetainAllocationHandle", ctypes.byref(ctypes.c_uint64()), d.alloc(64))
    assert d.attribute(1, base) == 0
    assert d.attribute(10, base, ctypes.c_int) == 0
    assert d.attribute(14, base) == 0
    d.expect(INVALID_VALUE, "cuIpcGetMemHandle", ctypes.create_string_buffer(64), base)
    d.expect(INVALID_VALUE, "cuMemAddressFree", base, 4 * GRANULE)
    d.expect(INVALID_VALUE, "cuMemUnmap", base, GRANULE // 2)
    d.expect(0, "cuMemUnmap", base, 2 * GRANULE)
    d.expect(0, "cuMemUnmap", base + 3 * GRANULE, GRANULE)
    d.expect(INVALID_VALUE, *copy)
    d.expect(0, "cuMemAddressFree", base, 4 * GRANULE)
    d.expect(800, "cuMemCreate", ctypes.byref(ctypes.c_uint64()), GRANULE, d.properties(8), 0)


@case({"KVFERRY_CUDA_DOUBLE_MACHINE": f"selftest{os.getpid()}"})
def ipc() -> None:
    d = Driver()
    child = Child("helper_commands")
    assert d.alloc(4096) % 4096 != 0
    free = d.free_bytes()
    handle = child.ask("alloc 10000 65")
    taken = free - d.free_bytes()
    assert 10000 <= taken <= 16384, taken
    result, address = opened(d, handle)
    assert result == 0
    assert opened(d, handle) == (0, address)
    assert d.read(address, 10000) == b"A" * 10000
    assert d.attribute(10, address, ctypes.c_int) == 0
    d.put(address, b"from the other side")
    d.expect(0, "cuCtxSynchronize")
    assert bytes.fromhex(child.ask("read 19")) == b"from the other side"
    assert child.ask("free") == "freed"
    assert d.free_bytes() == free - taken, "it is in use for as long as anyone has it open"
    assert d.read(address, 4) == b"from", "the opened memory outlives the exporter's"
    d.expect(0, "cuIpcCloseMemHandle", address)
    assert d.read(address, 4) == b"from"
    d.expect(0, "cuIpcCloseMemHandle", address)
    assert d.free_bytes() == free
    d.expect(INVALID_VALUE, "cuMemcpyDtoH_v2", ctypes.create_string_buffer(4), address, 4)
    d.expect(INVALID_VALUE, "cuIpcCloseMemHandle", address)
    assert opened(d, handle)[0] in (1, 205), "its memory is gone"
    second = child.ask("alloc 4096 66")
    assert opened(d, handle)[0] in (1, 205), "another allocation with its descriptor is another"
    child.end()
    assert opened(d, second)[0] in (1, 205), "its process is gone"
    own = ctypes.create_string_buffer(64)
    d.expect(0, "cuIpcGetMemHandle", own, d.alloc(64))
    assert opened(d, own.raw.hex())[0] == INVALID_CONTEXT


@case()
def shared_descriptors() -> None:
    d = Driver()
    child = Child("helper_commands")
    number = int(child.ask("export"))
    descriptor = os.open(f"/proc/{child.process.pid}/fd/{number}", os.O_RDWR)
    handle = d.get("cuMemImportFromShareableHandle", descriptor, 1)
    os.close(descriptor)
    base = d.get("cuMemAddressReserve", GRANULE, 0, 0, 0)
    d.expect(0, "cuMemMap", base, GRANULE, 0, handle, 0)
    d.access(base, GRANULE)
    assert d.read(base, 6) == b"shared"
    child.end()
    assert d.read(base, 6) == b"shared"
    plain = d.create()
    d.expect(INVALID_VALUE, "cuMemExportToShareableHandle", ctypes.byref(ctypes.c_int()), plain, 1, 0)
    with open(__file__, "rb") as other:
        out = ctypes.byref(ctypes.c_uint64())
        d.expect(INVALID_VALUE, "cuMemImportFromShareableHandle", out, other.fileno(), 1)


@case()
def after_fork() -> None:
    Driver()
    child = Child("helper_commands")
    assert child.ask("fork") == "3"
    child.end()


@case({"KVFERRY_CUDA_DOUBLE_FAIL": "cuMemAlloc_v2:2:2,cuMemcpyBatchAsync:1+:999"})
def failures() -> None:
    d = Driver()
    a = d.alloc(64)
    d.expect(2, "cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 64)
    d.alloc(64)
    stream = d.stream()
    for _ in range(3):
        assert d.batch(stream, [(a, a + 8, 8)])[0] == 999


@case()
def pinned_memory() -> None:
    d = Driver()
    address = d.get("cuMemHostAlloc", 4096, 0)
    ctypes.memset(address, 65, 4096)
    assert d.attribute(2, address, ctypes.c_int) == 1
    device = d.alloc(4096)
    d.expect(0, "cuMemcpyAsync", device, address, 4096, 0)
    d.expect(0, "cuCtxSynchronize")
    assert d.read(device, 4096) == b"A" * 4096
    d.expect(INVALID_VALUE, "cuMemcpyAsync", device, address + 1, 4096, 0)
    d.expect(0, "cuMemFreeHost", address)
    host = ctypes.create_string_buffer(8192)
    d.expect(0, "cuMemHostRegister_v2", host, 8192, 1)
    d.expect(712, "cuMemHostRegister_v2", host, 8192, 1)
    assert d.attribute(2, ctypes.addressof(host), ctypes.c_int) == 1
    d.expect(0, "cuMemHostUnregister", host)
    d.expect(713, "cuMemHostUnregister", host)
    managed = d.get("cuMemAllocManaged", 4096, 1)
    ctypes.memset(managed, 66, 4096)
    assert d.attribute(8, managed, ctypes.c_int) == 1
    assert d.read(managed, 4096) == b"B" * 4096
    d.expect(0, "cuMemFree_v2", managed)


def kernel(d: Driver, stream: int, pairs: int, stretches: int, count: int, items: int) -> int:
    module = d.get("cuModuleLoadData", b"any image")
    d.expect(NOT_FOUND, "cuModuleGetFunction", ctypes.byref(ctypes.c_uint64()), module, b"nothing")
    function = d.get("cuModuleGetFunction", module, b"kvferry_copy_pieces")
    values = (ctypes.c_uint64 * 4)(pairs, stretches, count, items)
    arguments = (ctypes.c_void_p * 4)(*(ctypes.addressof(values) + 8 * number for number in range(4)))
    one = (1, 1, 1)
    return d.call("cuLaunchKernel", function, *one, 128, 1, 1, 0, stream, arguments, None)


def stretch(src: int, dst: int, src_stride: int, dst_stride: int, length: int, first: int, pairs: int) -> bytes:
    return struct.pack("=5Q4I", src, dst, src_stride, dst_stride, length, first, -(-length // 4096), pairs, 0)


@case()
def kernels() -> None:
    d = Driver()
    a, b, stream = d.alloc(32768), d.alloc(32768), d.stream()
    data = bytes(number * 7 % 251 for number in range(32768))
    d.put(a, data)
    d.expect(0, "cuCtxSynchronize")
    pairs = struct.pack("=6I", 0, 0, 3, 1, 1, 2)
    stretches = stretch(a, b + 100, 0, 0, 10, 0, 0) + stretch(a, b + 1000, 5000, 4999, 4999, 1, 1)
    table = d.get("cuMemHostAlloc", 24 + len(stretches), 0)
    ctypes.memmove(table, pairs + stretches, 24 + len(stretches))
    # 4,999 bytes are two items.
    assert kernel(d, stream, table, table + 24, 2, 1 + 2 * 2) == 0
    d.expect(0, "cuStreamSynchronize", stream)
    there = d.read(b, 32768)
    assert there[100:110] == data[:10]
    assert there[1000 + 4999 :][:4999] == data[15000:][:4999]
    assert there[1000 + 2 * 4999 :][:4999] == data[5000:][:4999]
    host = ctypes.addressof(ctypes.create_string_buffer(200))
    assert kernel(d, stream, host, host + 24, 2, 3) == INVALID_VALUE


@case(status=-signal.SIGABRT)
def kernels_see_no_pageable_memory() -> None:
    d = Driver()
    a, stream, host = d.alloc(4096), d.stream(), ctypes.create_string_buffer(64)
    table = d.get("cuMemHostAlloc", 64, 0)
    ctypes.memmove(table, bytes(8) + stretch(ctypes.addressof(host), a, 0, 0, 64, 0, 0), 64)
    kernel(d, stream, table, table + 8, 1, 1)
    d.call("cuStreamSynchronize", stream)


@case(status=-signal.SIGABRT)
def kernels_copy_no_more_than_their_items() -> None:
    d = Driver()
    a, b, stream = d.alloc(8192), d.alloc(8192), d.stream()
    table = d.get("cuMemHostAlloc", 64, 0)
    ctypes.memmove(table, bytes(8) + stretch(a, b, 0, 0, 5000, 0, 0), 64)
    kernel(d, stream, table, table + 8, 1, 1)
    d.call("cuStreamSynchronize", stream)


@case()
def names() -> None:
    d = Driver()
    found, status = ctypes.c_uint64(), ctypes.c_int(7)
    for name, version, result, expected, symbol in (
        (b"cuMemAlloc", 12080, 0, 0, "cuMemAlloc_v2"),
        (b"cuMemcpyBatchAsync", 12080, 0, 0, "cuMemcpyBatchAsync"),
        (b"cuCtxSetFlags", 12010, 0, 0, "cuCtxSetFlags"),
        (b"cuMemAlloc", 13000, NOT_FOUND, 2, None),
        (b"cuNothing", 12080, NOT_FOUND, 1, None),
    ):
        d.expect(result, "cuGetProcAddress_v2", name, ctypes.byref(found), version, 0, ctypes.byref(status))
        address = None if symbol is None else ctypes.cast(getattr(d.lib, symbol), ctypes.c_void_p).value
        assert (found.value or None, status.value) == (address, expected), name
    text = ctypes.c_char_p()
    d.expect(0, "cuGetErrorName", 1, ctypes.byref(text))
    assert text.value == b"CUDA_ERROR_INVALID_VALUE"
    nvml = ctypes.CDLL(f"{OUTDIR}/libnvidia-ml.so.1")
    count = ctypes.c_uint()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert count.value == 1


@case({"KVFERRY_CUDA_DOUBLE_DELAY_US": "100"})
def threads() -> None:
    d = Driver()
    source = d.alloc(MIB)
    data = os.urandom(MIB)
    d.put(source, data)
    d.expect(0, "cuCtxSynchronize")
    done = []

    def work(seed: int) -> None:
        d.expect(0, "cuCtxSetCurrent", d.context)
        stream, event = d.stream(NON_BLOCKING if seed % 2 else 0), d.get("cuEventCreate", 2)
        host = ctypes.create_string_buffer(4096)
        for i in range(60):
            offset = (seed * 60 + i) * 4096 % MIB
            memory = d.alloc(4096)
            assert d.batch(stream, [(memory + j, source + offset + j, 512) for j in range(0, 4096, 512)])[0] == 0
            d.expect(0, "cuMemcpyDtoHAsync_v2", host, memory, 4096, stream)
            d.expect(0, "cuEventRecord", event, stream)
            d.expect(0, "cuEventSynchronize", event)
            d.expect(0, "cuMemFree_v2", memory)
            assert host.raw == data[offset : offset + 4096]
            assert d.read(source + offset, 64) == host.raw[:64]
        done.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(done) == 4


@case({"KVFERRY_CUDA_DOUBLE_DELAY_US": "5000000"})
def exit_does_not_wait() -> None:
    d = Driver()
    d.expect(0, "cuMemsetD8Async", d.alloc(64), 1, 64, d.stream())


def main() -> int:
    """Runs one test by name, or all in processes of their own; the exit status."""
    if len(sys.argv) > 2 and sys.argv[2] == "helper_commands":
        helper_commands()
        return 0
    if len(sys.argv) > 2:
        try:
            TESTS[sys.argv[2]][0]()
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    failed = []
    for name, (_, settings, status) in TESTS.items():
        start = time.monotonic()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVFERRY_CUDA_DOUBLE_", "CUDA_"))}
        command = [sys.executable, __file__, OUTDIR, name]
        try:
            given = {**environment, **settings}
            ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
            good, text = ended.returncode == status, ended.stdout + ended.stderr
            # An abort must be the double's own.
            good = good and (status != -signal.SIGABRT or "cuda double: " in text)
        except subprocess.TimeoutExpired:
            good, text = False, "it hangs"
        print(f"{'passed' if good else 'FAILED'}  {name} ({time.monotonic() - start:.2f} s)", flush=True)
        if not good:
            failed.append(name)
            print(text)
    print(f"{len(TESTS) - len(failed)} passed, {len(failed)} failed{''.join(f', {name}' for name in failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
