"""Tests of the double: streams, copies and kernels."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import threading
import time

from cases import case
from driver import (
    GRANULE,
    INVALID_HANDLE,
    INVALID_VALUE,
    MIB,
    NON_BLOCKING,
    NOT_FOUND,
    NOT_READY,
    Child,
    Driver,
    opened,
)


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


@case({"KVFERRY_CUDA_DOUBLE_CALLS_WAIT": "1"})
def calls_that_wait() -> None:
    d = Driver()
    child = Child("helper_commands")
    result, imported = opened(d, child.ask("alloc 4096 65"))
    assert result == 0
    device, stream, base = d.alloc(4096), d.stream(), d.get("cuMemAddressReserve", GRANULE, 0, 0, 0)
    d.expect(0, "cuMemMap", base, GRANULE, 0, d.create(), 0)
    out = ctypes.byref(ctypes.c_uint64())
    for call in (
        ("cuMemAlloc_v2", out, 64),
        ("cuMemHostAlloc", out, 64, 0),
        ("cuMemFreeHost", d.get("cuMemHostAlloc", 64, 0)),
        ("cuModuleLoadData", out, b"any image"),
        ("cuModuleUnload", d.get("cuModuleLoadData", b"any image")),
        ("cuIpcCloseMemHandle", imported),
        ("cuMemUnmap", base, GRANULE),
        # Its own work is waited for as well.
        ("cuMemFree_v2", device),
    ):
        may_end = threading.Event()
        held = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _, event=may_end: event.wait(45) or os.abort())
        d.expect(0, "cuLaunchHostFunc", stream, held, None)
        d.expect(0, "cuMemsetD8Async", device, 1, 4096, stream)
        d.expect(NOT_READY, "cuStreamQuery", stream)
        # A call that does not wait returns before that, and finds the stream still held.
        threading.Timer(0.05, may_end.set).start()
        d.expect(0, *call)
        d.expect(0, "cuStreamQuery", stream)
    child.end()
