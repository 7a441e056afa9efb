"""Tests of the double: memory and what is known about an address."""

from __future__ import annotations

import ctypes
import signal

from cases import case
from driver import GRANULE, INVALID_VALUE, MIB, Driver


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


@case({"KVFERRY_CUDA_DOUBLE_DELAY_US": "1000000"}, status=-signal.SIGABRT)
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
