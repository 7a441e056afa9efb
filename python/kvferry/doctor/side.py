"""One side of the doctor's transfers, as the object of a process of its own (`bench.remote.Remote`)."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Mapping
from typing import Any

from .. import Agent, Segment
from ..bench.driver import DEVICE, DeviceMemory

BLOCK_BYTES, BLOCKS = 16384, 2048
"""32 MiB in scattered blocks of 16 KiB: enough to see a path's speed, and moved within a second over 1 Gbit/s."""
POOL = BLOCKS + BLOCKS // 8
"""Blocks on either side: more than are moved, so that what must not change is seen."""
LIMIT_S = 60.0
_PATHS = ("copied_bytes", "device_copied_bytes", "one_sided_bytes", "served_bytes")


def block_ids() -> tuple[list[int], list[int]]:
    """The blocks that are written and those that are read, the same in every process."""
    draw = random.Random(20260101)
    return draw.sample(range(POOL), BLOCKS), draw.sample(range(POOL), BLOCKS)


def source_bytes() -> bytes:
    """The bytes of the side that is read from, the same in every process."""
    return random.Random(7).randbytes(POOL * BLOCK_BYTES)


class Side:
    """Memory of `kind` ("host" or "cuda") registered with an agent of this configuration. What this process prints goes
    to the file `said`."""

    def __init__(self, config: Mapping[str, object], kind: str, said: str) -> None:
        printed = os.open(said, os.O_WRONLY | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(printed, standard)
        os.close(printed)
        self._host = bytearray(POOL * BLOCK_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
        self._device = DeviceMemory(len(self._host)) if kind == "cuda" else None
        self._agent = Agent({"name": "doctor", **config})
        if self._device is None:
            self._agent.register(self._host)
        else:
            self._agent.register((self._device.address, self._device.nbytes), kind="cuda", device=DEVICE)
        self._peer = -1

    def serve(self) -> bytes:
        """Fills the memory, and gives what the other side needs to read it."""
        self._set(source_bytes())
        return self._agent.metadata()

    def meet(self, metadata: bytes) -> None:
        """Connects to the side that serves."""
        self._peer = self._agent.connect(metadata)

    def read(self, number: int) -> dict[str, Any]:
        """Reads all blocks and compares every byte: `seconds`, `bytes`, `wrong` (blocks), `route`, and the bytes by the
        path that they took."""
        blank = bytes([number % 251 + 1]) * BLOCK_BYTES
        self._set(blank * POOL)
        written, read = block_ids()
        segment = Segment(0, 0, 0, 0, 0, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES)
        before = self._agent.stats()
        start = time.monotonic()
        self._agent.read(self._peer, [segment], [(written, read)]).wait(LIMIT_S)
        seconds = time.monotonic() - start
        after = self._agent.stats()
        route = self._agent.route(self._peer)
        return {
            "seconds": seconds,
            "bytes": BLOCKS * BLOCK_BYTES,
            "wrong": self._wrong(written, read, blank),
            "lanes": route.lanes if route else "",
            **{path: int(str(after[path])) - int(str(before[path])) for path in _PATHS},
        }

    def _set(self, data: bytes) -> None:
        self._host[:] = data
        if self._device is not None:
            self._device.upload(self._address)

    def _wrong(self, written: list[int], read: list[int], blank: bytes) -> int:
        if self._device is not None:
            self._device.download(self._address)
        source, ours = memoryview(source_bytes()), memoryview(self._host)
        expected = dict(zip(written, read, strict=True))
        wrong = 0
        for block in range(POOL):
            found = bytes(ours[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
            place = expected.get(block)
            wanted = blank if place is None else bytes(source[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES])
            wrong += found != wanted
        return wrong

    def close(self) -> None:
        """Before the process ends."""
        self._agent.shutdown()


class _Vector(ctypes.Structure):
    """`struct iovec` (sys/uio.h)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Neighbour:
    """A process that another one tries to read, and the other one. Needs no libkvferry."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(random.Random(os.getpid()).randbytes(4096), 4096)

    def place(self) -> tuple[int, int]:
        """Its pid, and where its 4096 bytes are."""
        return os.getpid(), ctypes.addressof(self._memory)

    def content(self) -> bytes:
        """They."""
        return self._memory.raw

    def read(self, pid: int, address: int) -> tuple[bytes | None, int]:
        """4096 bytes of another process by `process_vm_readv`, or None and the number of the error."""
        libc = ctypes.CDLL(None, use_errno=True)
        here = ctypes.create_string_buffer(4096)
        ours, theirs = _Vector(ctypes.addressof(here), 4096), _Vector(address, 4096)
        call = libc.process_vm_readv
        call.restype = ctypes.c_ssize_t
        vector = (ctypes.c_void_p, ctypes.c_ulong)
        call.argtypes = (ctypes.c_int, *vector, *vector, ctypes.c_ulong)
        copied = call(pid, ctypes.addressof(ours), 1, ctypes.addressof(theirs), 1, 0)
        return (here.raw, 0) if copied == 4096 else (None, ctypes.get_errno())

    def close(self) -> None:
        """Nothing to end."""
