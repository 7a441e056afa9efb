"""Tests of the double: devices, contexts, names and settings."""

from __future__ import annotations

import ctypes

from cases import case
from driver import GRANULE, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, OUTDIR, Child, Driver


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
    base = d.get("cuMemAddressReserve", GRANULE, 0, 0, 0)
    d.expect(0, "cuMemMap", base, GRANULE, 0, d.create(), 0)
    d.expect(101, "cuMemSetAccess", base, GRANULE, (ctypes.c_int * 3)(1, 1, 3), 1)
    d.access(base, GRANULE)


@case({"KVFERRY_CUDA_DOUBLE_DEVICES": "0"})
def no_device() -> None:
    lib = ctypes.CDLL(f"{OUTDIR}/libcuda.so.1")
    assert lib.cuInit(0) == 100
    assert lib.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 3


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
def names() -> None:
    d = Driver()
    found, status = ctypes.c_uint64(), ctypes.c_int(7)
    for name, version, result, expected, symbol in (
        (b"cuMemAlloc", 12080, 0, 0, "cuMemAlloc_v2"),
        (b"cuMemcpyBatchAsync", 12080, 0, 0, "cuMemcpyBatchAsync"),
        (b"cuMemcpyBatchAsync", 12070, NOT_FOUND, 2, None),
        (b"cuCtxSetFlags", 12010, 0, 0, "cuCtxSetFlags"),
        (b"cuStreamBeginCapture", 10000, 0, 0, "cuStreamBeginCapture"),
        (b"cuStreamBeginCapture", 12080, 0, 0, "cuStreamBeginCapture_v2"),
        (b"cuStreamGetCaptureInfo", 12020, 0, 0, "cuStreamGetCaptureInfo_v2"),
        (b"cuStreamGetCaptureInfo", 12030, 0, 0, "cuStreamGetCaptureInfo_v3"),
        (b"cuThreadExchangeStreamCaptureMode", 10000, NOT_FOUND, 2, None),
        (b"cuThreadExchangeStreamCaptureMode", 10010, 0, 0, "cuThreadExchangeStreamCaptureMode"),
        (b"cuDeviceGetUuid", 11030, 0, 0, "cuDeviceGetUuid"),
        (b"cuDeviceGetUuid", 11040, 0, 0, "cuDeviceGetUuid_v2"),
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
    device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetUUID(device, uuid, 96) == 0
    assert uuid.value == b"GPU-6b766665-7272-7900-646f-75626c650000"
    assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0, ctypes.byref(device)) == 6


@case({"KVFERRY_CUDA_DOUBLE_DELAY_US": "5000000"})
def exit_does_not_wait() -> None:
    d = Driver()
    d.expect(0, "cuMemsetD8Async", d.alloc(64), 1, 64, d.stream())
