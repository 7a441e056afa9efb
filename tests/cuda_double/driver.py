"""The double through ctypes, for its tests."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

OUTDIR = os.path.abspath(sys.argv[1])
MIB = 1 << 20
GRANULE = 2 * MIB
INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, NOT_FOUND, NOT_READY = 1, 201, 400, 500, 600
NON_BLOCKING = 1
DESCRIPTOR, FABRIC = 1, 8


class Driver:
    """The double with the primary context of device 0 current. Every call is `driver.cuName(...)`."""

    def __init__(self, context: bool = True) -> None:
        self.lib = ctypes.CDLL(f"{OUTDIR}/libcuda.so.1")
        self.expect(0, "cuInit", 0)
        if context:
            self.context = self.retain(0)
            self.expect(0, "cuCtxSetCurrent", self.context)

    def call(self, name: str, *arguments: object) -> int:
        converted = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.lib, name)(*converted))

    def expect(self, result: int, name: str, *arguments: object) -> None:
        got = self.call(name, *arguments)
        assert got == result, f"{name} returned {got}, not {result}"

    def get(self, name: str, *arguments: object, kind: type = ctypes.c_uint64) -> int:
        """Calls a function that writes its answer through its first argument."""
        out = kind()
        self.expect(0, name, ctypes.byref(out), *arguments)
        return int(out.value or 0)

    def retain(self, device: int) -> int:
        return self.get("cuDevicePrimaryCtxRetain", device)

    def alloc(self, size: int) -> int:
        return self.get("cuMemAlloc_v2", size)

    def attribute(self, which: int, address: int, kind: type = ctypes.c_uint64) -> int:
        return self.get("cuPointerGetAttribute", which, address, kind=kind)

    def put(self, address: int, data: bytes) -> None:
        self.expect(0, "cuMemcpyHtoD_v2", address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        out = ctypes.create_string_buffer(size)
        self.expect(0, "cuMemcpyDtoH_v2", out, address, size)
        return out.raw

    def free_bytes(self) -> int:
        return self.get("cuMemGetInfo_v2", ctypes.byref(ctypes.c_uint64()))

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.get("cuStreamCreate", flags)

    def properties(self, types: int = 0, device: int = 0) -> ctypes.Array[ctypes.c_int]:
        return (ctypes.c_int * 8)(1, types, 1, device)

    def create(self, size: int = GRANULE, types: int = 0) -> int:
        return self.get("cuMemCreate", size, self.properties(types), 0)

    def access(self, address: int, size: int, flags: int = 3) -> None:
        self.expect(0, "cuMemSetAccess", address, size, (ctypes.c_int * 3)(1, 0, flags), 1)

    def batch(self, stream: int, pieces: list[tuple[int, int, int]], order: int = 1) -> tuple[int, int]:
        """The result of cuMemcpyBatchAsync of (dst, src, size) and the index of the piece it refused."""
        arrays = [(ctypes.c_uint64 * len(pieces))(*column) for column in zip(*pieces, strict=True)]
        attributes = (ctypes.c_int * 6)(order)
        failed = ctypes.c_uint64(77)
        result = self.call(
            "cuMemcpyBatchAsync",
            *arrays,
            len(pieces),
            attributes,
            (ctypes.c_uint64 * 1)(0),
            1,
            ctypes.byref(failed),
            stream,
        )
        return result, failed.value


class Child:
    """Another process that runs the test `name` and talks by lines."""

    def __init__(self, name: str, **settings: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("selftest.py")), OUTDIR, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(120) == 0


class Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * 64)]


def opened(d: Driver, handle: str) -> tuple[int, int]:
    out = ctypes.c_uint64()
    value = Handle.from_buffer_copy(bytes.fromhex(handle))
    d.lib.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    return int(d.lib.cuIpcOpenMemHandle_v2(ctypes.byref(out), value, 1)), out.value


def helper_commands() -> None:
    """The other process of the tests of sharing: does what its standard input says."""
    d = Driver()
    known: dict[str, int] = {}
    for line in sys.stdin:
        command, *words = line.split()
        if command == "alloc":
            known["a"] = d.alloc(int(words[0]))
            d.put(known["a"], bytes([int(words[1])]) * int(words[0]))
            d.expect(0, "cuCtxSynchronize")
            handle = ctypes.create_string_buffer(64)
            d.expect(0, "cuIpcGetMemHandle", handle, known["a"])
            answer = handle.raw.hex()
        elif command == "free":
            d.expect(0, "cuMemFree_v2", known["a"])
            answer = "freed"
        elif command == "read":
            answer = d.read(known["a"], int(words[0])).hex()
        elif command == "fork":
            child = os.fork()
            if child == 0:
                os._exit(d.call("cuCtxSynchronize"))
            answer = str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        elif command == "export":
            types, by = map(int, words)
            handle_value = d.create(types=types)
            base = d.get("cuMemAddressReserve", GRANULE, 0, 0, 0)
            d.expect(0, "cuMemMap", base, GRANULE, 0, handle_value, 0)
            d.access(base, GRANULE)
            d.put(base, b"shared")
            d.expect(0, "cuCtxSynchronize")
            assert d.attribute(14, base) == types
            known |= {"handle": handle_value, "base": base}
            shared = ctypes.create_string_buffer(64)
            d.expect(0, "cuMemExportToShareableHandle", shared, handle_value, by, 0)
            answer = shared.raw.hex() if by == FABRIC else str(int.from_bytes(shared.raw[:4], sys.byteorder))
        elif command == "release":
            d.expect(0, "cuMemRelease", known["handle"])
            answer = "released"
        elif command == "unmap":
            d.expect(0, "cuMemUnmap", known["base"], GRANULE)
            answer = "unmapped"
        else:
            raise AssertionError(line)
        print(answer, flush=True)
