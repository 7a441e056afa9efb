"""Tests of the double: stream capture."""

from __future__ import annotations

import ctypes
import threading

from cases import case
from driver import GRANULE, INVALID_VALUE, NON_BLOCKING, Driver

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NONE, ACTIVE, INVALIDATED = 0, 1, 2
ILLEGAL_STATE, UNSUPPORTED, INVALID, ISOLATION, IMPLICIT, EVENT, WRONG_THREAD = 401, 900, 901, 905, 906, 907, 908


def status(d: Driver, stream: int) -> int:
    out = ctypes.c_int()
    d.expect(0, "cuStreamIsCapturing", stream, ctypes.byref(out))
    return out.value


def end(d: Driver, stream: int, result: int = 0) -> int:
    """Ends a capture; how many operations it has."""
    graph, count = ctypes.c_uint64(9), ctypes.c_uint64()
    d.expect(result, "cuStreamEndCapture", stream, ctypes.byref(graph))
    assert status(d, stream) == NONE
    if result != 0:
        assert graph.value == 0
        return 0
    d.expect(0, "cuGraphGetNodes", graph, None, ctypes.byref(count))
    d.expect(0, "cuGraphDestroy", graph)
    d.expect(INVALID_VALUE, "cuGraphDestroy", graph)
    return count.value


def exchange(d: Driver, mode: int) -> int:
    """Sets the calling thread's mode; the one it had."""
    value = ctypes.c_int(mode)
    d.expect(0, "cuThreadExchangeStreamCaptureMode", ctypes.byref(value))
    return value.value


def elsewhere(d: Driver, mode: int, name: str, *arguments: object) -> int:
    """What a call returns in another thread, which has this mode."""
    results = []

    def work() -> None:
        d.expect(0, "cuCtxSetCurrent", d.context)
        assert exchange(d, mode) == GLOBAL
        results.append(d.call(name, *arguments))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def out() -> object:
    return ctypes.byref(ctypes.c_uint64())


def unsafe_calls(d: Driver) -> list[tuple[object, ...]]:
    """One of each call that a capture forbids. What they name is there, so that nothing else is wrong with them."""
    host = ctypes.create_string_buffer(64)
    device, pinned, free = d.alloc(64), d.get("cuMemHostAlloc", 64, 0), d.stream()
    event, blocking = d.get("cuEventCreate", 2), d.stream(0)
    d.expect(0, "cuEventRecord", event, free)
    module = d.get("cuModuleLoadData", b"any image")
    handle, base = d.create(types=1), d.get("cuMemAddressReserve", 2 * GRANULE, 0, 0, 0)
    shared = d.get("cuMemExportToShareableHandle", handle, 1, 0, kind=ctypes.c_int)
    d.expect(0, "cuMemMap", base, GRANULE, 0, handle, 0)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    d.expect(0, "cuCtxSynchronize")
    return [
        ("cuMemAlloc_v2", out(), 64),
        ("cuMemAllocManaged", out(), 64, 1),
        ("cuMemFree_v2", device),
        ("cuMemHostAlloc", out(), 64, 0),
        ("cuMemAllocHost_v2", out(), 64),
        ("cuMemFreeHost", pinned),
        ("cuMemHostRegister_v2", host, 64, 0),
        ("cuMemHostUnregister", host),
        ("cuModuleLoadData", out(), b"any image"),
        ("cuModuleUnload", module),
        ("cuEventQuery", event),
        ("cuEventSynchronize", event),
        ("cuStreamQuery", free),
        ("cuStreamSynchronize", free),
        ("cuStreamSynchronize", blocking),
        ("cuStreamSynchronize", 0),
        ("cuCtxSynchronize",),
        ("cuIpcOpenMemHandle_v2", out(), *(0,) * 5, *(0,) * 8),
        ("cuIpcCloseMemHandle", device),
        ("cuMemCreate", out(), GRANULE, d.properties(), 0),
        ("cuMemRelease", handle),
        ("cuMemImportFromShareableHandle", out(), shared, 1),
        ("cuMemAddressReserve", out(), GRANULE, 0, 0, 0),
        ("cuMemAddressFree", base, 2 * GRANULE),
        ("cuMemMap", base + GRANULE, GRANULE, 0, handle, 0),
        ("cuMemUnmap", base, GRANULE),
        ("cuMemSetAccess", base, GRANULE, (ctypes.c_int * 3)(1, 0, 3), 1),
        ("cuMemcpy", device, device + 32, 32),
        ("cuMemcpyDtoH_v2", host, device, 64),
        ("cuMemcpyHtoD_v2", device, host, 64),
        ("cuMemcpyDtoD_v2", device, device + 32, 32),
        ("cuMemcpyAsync", device, device + 32, 32, 0),
        ("cuMemsetD8_v2", device, 1, 64),
        ("cuMemsetD8Async", device, 1, 64, 1),
        ("cuLaunchHostFunc", 0, call, None),
        ("cuEventRecord", event, 0),
    ]


@case({"KVFERRY_CUDA_DOUBLE_DELAY_US": "20000"})
def captured_work_does_not_run() -> None:
    d = Driver()
    a, stream, other = d.alloc(4096), d.stream(), d.stream()
    d.put(a, b"A" * 4096)
    d.expect(0, "cuCtxSynchronize")
    assert exchange(d, RELAXED) == GLOBAL
    d.expect(0, "cuStreamBeginCapture_v2", stream, GLOBAL)
    assert (status(d, stream), status(d, other), status(d, 0)) == (ACTIVE, NONE, NONE)
    d.expect(ILLEGAL_STATE, "cuStreamBeginCapture_v2", stream, GLOBAL)
    end(d, stream, INVALID)
    d.expect(ILLEGAL_STATE, "cuStreamEndCapture", stream, out())
    d.expect(0, "cuStreamBeginCapture_v2", stream, GLOBAL)
    event, before = d.get("cuEventCreate", 2), d.get("cuEventCreate", 2)
    d.expect(0, "cuEventRecord", before, other)
    d.expect(0, "cuMemsetD8Async", a, 1, 2048, stream)
    assert d.batch(stream, [(a, a + 2048, 8)])[0] == 0
    d.expect(INVALID_VALUE, "cuMemsetD8Async", a + 4090, 1, 8, stream)
    d.expect(0, "cuEventRecord", event, stream)
    d.expect(0, "cuStreamWaitEvent", stream, event, 0)
    # Another stream's work goes on.
    d.expect(0, "cuMemsetD8Async", a + 2048, 2, 2048, other)
    d.expect(0, "cuStreamSynchronize", other)
    state, number = ctypes.c_int(), ctypes.c_uint64()
    d.expect(0, "cuStreamGetCaptureInfo", stream, ctypes.byref(state), ctypes.byref(number))
    assert state.value == ACTIVE
    assert number.value != 0
    assert end(d, stream) == 4
    d.expect(0, "cuStreamSynchronize", stream)
    assert d.read(a, 4096) == b"A" * 2048 + b"\2" * 2048
    d.expect(EVENT, "cuEventSynchronize", event)
    d.expect(0, "cuEventRecord", event, stream)
    d.expect(0, "cuEventSynchronize", event)


@case()
def captures_forbid_unsafe_calls() -> None:
    d = Driver()
    stream, calls = d.stream(), unsafe_calls(d)
    for name, *arguments in calls:
        d.expect(0, "cuStreamBeginCapture_v2", stream, GLOBAL)
        assert elsewhere(d, GLOBAL, str(name), *arguments) == UNSUPPORTED, name
        assert status(d, stream) == INVALIDATED, name
        d.expect(INVALID, "cuLaunchHostFunc", stream, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None), None)
        end(d, stream, INVALID)
        for mode in (GLOBAL, THREAD_LOCAL):
            d.expect(0, "cuStreamBeginCapture_v2", stream, mode)
            d.expect(UNSUPPORTED, str(name), *arguments)
            end(d, stream, INVALID)


@case()
def modes_of_captures_and_threads() -> None:
    d = Driver()
    stream, event = d.stream(), d.get("cuEventCreate", 2)
    d.expect(0, "cuEventRecord", event, d.stream())
    d.expect(0, "cuCtxSynchronize")
    looks = ("cuEventQuery", event)
    for capture, caller, result in (
        (GLOBAL, GLOBAL, UNSUPPORTED),
        (GLOBAL, THREAD_LOCAL, 0),
        (GLOBAL, RELAXED, 0),
        (THREAD_LOCAL, GLOBAL, 0),
        (RELAXED, GLOBAL, 0),
    ):
        d.expect(0, "cuStreamBeginCapture_v2", stream, capture)
        assert elsewhere(d, caller, *looks) == result, (capture, caller)
        end(d, stream, INVALID if result else 0)
    for capture, caller, result in (
        (GLOBAL, THREAD_LOCAL, UNSUPPORTED),
        (THREAD_LOCAL, THREAD_LOCAL, UNSUPPORTED),
        (GLOBAL, RELAXED, 0),
        (RELAXED, GLOBAL, 0),
    ):
        before = exchange(d, caller)
        d.expect(0, "cuStreamBeginCapture_v2", stream, capture)
        d.expect(result, *looks)
        end(d, stream, INVALID if result else 0)
        assert exchange(d, before) == caller
    d.expect(INVALID_VALUE, "cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(3)))
    d.expect(INVALID_VALUE, "cuStreamBeginCapture_v2", stream, 3)
    # One thread ends what another began in relaxed mode alone.
    d.expect(0, "cuStreamBeginCapture", stream)
    assert elsewhere(d, GLOBAL, "cuStreamEndCapture", stream, out()) == WRONG_THREAD
    end(d, stream, INVALID)
    d.expect(0, "cuStreamBeginCapture_v2", stream, RELAXED)
    assert elsewhere(d, GLOBAL, "cuStreamEndCapture", stream, out()) == 0


@case()
def what_conflicts_with_a_capture_in_every_mode() -> None:
    d = Driver()
    exchange(d, RELAXED)
    captured, outside = d.get("cuEventCreate", 2), d.get("cuEventCreate", 2)
    device, other = d.alloc(64), d.stream()
    d.expect(0, "cuEventRecord", outside, other)
    for flags, result, name, *arguments in (
        (NON_BLOCKING, UNSUPPORTED, "cuStreamSynchronize", "captured stream"),
        (NON_BLOCKING, UNSUPPORTED, "cuStreamQuery", "captured stream"),
        (NON_BLOCKING, UNSUPPORTED, "cuCtxSynchronize"),
        (NON_BLOCKING, EVENT, "cuEventQuery", captured),
        (NON_BLOCKING, EVENT, "cuEventSynchronize", captured),
        (NON_BLOCKING, ISOLATION, "cuStreamWaitEvent", "captured stream", outside, 0),
        (NON_BLOCKING, 801, "cuStreamWaitEvent", other, captured, 0),
        (NON_BLOCKING, 801, "cuMemAllocAsync", out(), 64, "captured stream"),
        (0, IMPLICIT, "cuMemcpyAsync", device, device + 32, 32, 0),
        (0, IMPLICIT, "cuStreamSynchronize", 0),
    ):
        stream = d.stream(int(flags))
        d.expect(0, "cuStreamBeginCapture_v2", stream, RELAXED)
        d.expect(0, "cuEventRecord", captured, stream)
        given = [stream if argument == "captured stream" else argument for argument in arguments]
        d.expect(int(result), str(name), *given)
        end(d, stream, INVALID)
    d.expect(UNSUPPORTED, "cuStreamBeginCapture_v2", 0, RELAXED)
    # With a stream that the legacy one does not wait for, it may be used in relaxed mode.
    stream = d.stream()
    d.expect(0, "cuStreamBeginCapture_v2", stream, GLOBAL)
    d.expect(0, "cuMemcpyAsync", device, device + 32, 32, 0)
    end(d, stream)
    blocking = d.stream(0)
    d.expect(0, "cuStreamBeginCapture_v2", blocking, GLOBAL)
    d.expect(IMPLICIT, "cuStreamIsCapturing", 0, ctypes.byref(ctypes.c_int()))
    end(d, blocking)
    # A destroyed stream's capture forbids nothing any more.
    d.expect(0, "cuStreamBeginCapture_v2", stream, GLOBAL)
    d.expect(0, "cuStreamDestroy_v2", stream)
    exchange(d, GLOBAL)
    d.expect(0, "cuCtxSynchronize")
