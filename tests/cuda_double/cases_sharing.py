"""Tests of the double: memory that goes from process to process."""

from __future__ import annotations

import ctypes
import os

from cases import case
from driver import DESCRIPTOR, FABRIC, GRANULE, INVALID_CONTEXT, INVALID_VALUE, OUTDIR, Child, Driver, opened


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
    number = int(child.ask("export 1 1"))
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


@case({"KVFERRY_CUDA_DOUBLE_FABRIC": "1", "KVFERRY_CUDA_DOUBLE_MACHINE": f"selftest{os.getpid()}"})
def fabric_handles() -> None:
    d = Driver()
    assert d.get("cuDeviceGetAttribute", 128, 0, kind=ctypes.c_int) == 1
    child, free = Child("helper_commands"), d.free_bytes()
    # By a fabric handle alone, and by either.
    for types in (FABRIC, FABRIC | DESCRIPTOR):
        shared = bytes.fromhex(child.ask(f"export {types} {FABRIC}"))
        assert free - d.free_bytes() == GRANULE
        handle = d.get("cuMemImportFromShareableHandle", shared, FABRIC)
        base = d.get("cuMemAddressReserve", GRANULE, 0, 0, 0)
        d.expect(0, "cuMemMap", base, GRANULE, 0, handle, 0)
        d.expect(0, "cuMemRelease", handle)
        d.access(base, GRANULE)
        assert d.read(base, 6) == b"shared"
        assert d.attribute(14, base) == types
        assert child.ask("release") == "released"
        d.expect(0, "cuMemRelease", d.get("cuMemImportFromShareableHandle", shared, FABRIC))
        assert child.ask("unmap") == "unmapped"
        assert d.read(base, 6) == b"shared", "who has it mapped keeps it"
        assert free - d.free_bytes() == GRANULE
        for gone in (shared, bytes(64), os.urandom(64)):
            d.expect(INVALID_VALUE, "cuMemImportFromShareableHandle", ctypes.byref(ctypes.c_uint64()), gone, FABRIC)
        d.expect(0, "cuMemUnmap", base, GRANULE)
        assert free == d.free_bytes()
    # A handle of another type is none.
    out, into = ctypes.byref(ctypes.c_uint64()), ctypes.create_string_buffer(64)
    by_descriptor, by_fabric = d.create(types=DESCRIPTOR), d.create(types=FABRIC)
    d.expect(INVALID_VALUE, "cuMemExportToShareableHandle", into, by_descriptor, FABRIC, 0)
    d.expect(INVALID_VALUE, "cuMemExportToShareableHandle", into, by_fabric, DESCRIPTOR, 0)
    d.expect(INVALID_VALUE, "cuMemImportFromShareableHandle", out, bytes.fromhex(child.ask("alloc 64 1")), FABRIC)
    d.expect(0, "cuMemExportToShareableHandle", into, by_fabric, FABRIC, 0)
    assert opened(d, into.raw.hex())[0] == INVALID_VALUE
    d.expect(INVALID_VALUE, "cuMemImportFromShareableHandle", out, ctypes.addressof(into), DESCRIPTOR)
    shared = bytes.fromhex(child.ask(f"export {FABRIC} {FABRIC}"))
    child.end()
    d.expect(INVALID_VALUE, "cuMemImportFromShareableHandle", out, shared, FABRIC)


@case()
def no_fabric_handles() -> None:
    d = Driver()
    assert d.get("cuDeviceGetAttribute", 128, 0, kind=ctypes.c_int) == 0
    out, into = ctypes.byref(ctypes.c_uint64()), ctypes.create_string_buffer(64)
    d.expect(800, "cuMemCreate", out, GRANULE, d.properties(FABRIC | DESCRIPTOR), 0)
    d.expect(INVALID_VALUE, "cuMemExportToShareableHandle", into, d.create(types=DESCRIPTOR), FABRIC, 0)
    child = Child("helper_commands", KVFERRY_CUDA_DOUBLE_FABRIC="1")
    shared = bytes.fromhex(child.ask(f"export {FABRIC} {FABRIC}"))
    d.expect(INVALID_VALUE, "cuMemImportFromShareableHandle", out, shared, FABRIC)
    child.end()


CARD = "GPU-6b766665-7272-7900-646f-75626c650000"
INSTANCES = [f"MIG-6b766665-7272-7900-646f-75626c654d0{number}" for number in range(2)]


@case(
    {
        "KVFERRY_CUDA_DOUBLE_MIG": "1",
        "CUDA_VISIBLE_DEVICES": f"{INSTANCES[1]},{INSTANCES[0]}",
        "KVFERRY_CUDA_DOUBLE_MACHINE": f"selftest{os.getpid()}",
    }
)
def instances_of_a_card() -> None:
    d = Driver()
    assert d.get("cuDeviceGetCount", kind=ctypes.c_int) == 1
    names = []
    for call in ("cuDeviceGetUuid", "cuDeviceGetUuid_v2"):
        uuid = ctypes.create_string_buffer(16)
        d.expect(0, call, uuid, 0)
        names.append(uuid.raw.hex())
    assert names == [name[4:].replace("-", "") for name in (CARD, INSTANCES[1])]
    nvml, device, uuid = ctypes.CDLL(f"{OUTDIR}/libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.create_string_buffer(96)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(device)) != 0
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 1, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetUUID(device, uuid, 96) == 0
    assert uuid.value.decode() == INSTANCES[1]
    # One's memory cannot be had in the other.
    free = d.free_bytes()
    with_same = Child("helper_commands", CUDA_VISIBLE_DEVICES=INSTANCES[1])
    assert opened(d, with_same.ask("alloc 4096 65"))[0] == 0
    assert d.free_bytes() < free
    free = d.free_bytes()
    for visible in (INSTANCES[0], CARD, "0"):
        other = Child("helper_commands", CUDA_VISIBLE_DEVICES=visible)
        assert opened(d, other.ask("alloc 4096 65"))[0] == 101
        assert d.free_bytes() == free
        number = int(other.ask("export 1 1"))
        descriptor = os.open(f"/proc/{other.process.pid}/fd/{number}", os.O_RDWR)
        d.expect(101, "cuMemImportFromShareableHandle", ctypes.byref(ctypes.c_uint64()), descriptor, 1)
        other.end()
    with_same.end()


@case({"KVFERRY_CUDA_DOUBLE_MIG": "1", "CUDA_VISIBLE_DEVICES": "1"})
def a_number_names_a_card() -> None:
    assert ctypes.CDLL(f"{OUTDIR}/libcuda.so.1").cuInit(0) == 100


@case({"CUDA_VISIBLE_DEVICES": INSTANCES[0]})
def no_instances() -> None:
    assert ctypes.CDLL(f"{OUTDIR}/libcuda.so.1").cuInit(0) == 100
