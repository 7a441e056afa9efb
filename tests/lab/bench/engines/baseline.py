"""The baseline: the medium itself, without an engine, which no engine on it can be faster than.

- `vm`: `process_vm_readv` and `process_vm_writev` with up to 1,024 pieces a call, piece lists made beforehand, pieces
  that are neighbours on both sides merged.
- `memcpy`: one plain copy per layer of the same number of bytes inside one process.
- `device`: one plain copy per layer of the same number of bytes inside the GPU.
- `socket`: one TCP stream over the loopback, the same number of bytes in one go.
- `am`: UCX's own 1 MiB active messages over TCP, by the program `benches/am_limit.rs`.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import time
from typing import Any

import numpy as np
from kvferry import ucx_info
from kvferry.bench.engines.engine import Setup, Stopwatch, Took
from kvferry.bench.memory import Memory
from kvferry.bench.work import Ids
from numpy.typing import NDArray

_IOV_MAX = 1024
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_LIMIT_S = 120.0

Pairs = list[tuple[Ids, Ids]]


class _Idle:
    """The other side where it has nothing to do."""

    def __init__(self, setup: Setup, memory: Memory) -> None:
        # Where Yama guards processes, only relatives and those that are named may be read.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
        self._address = memory.address

    def hello(self) -> Any:
        return os.getpid(), self._address

    def expect(self) -> Any:
        return None

    def known(self, timeout: float) -> float | None:
        return None

    def close(self) -> None:
        """There is nothing to end."""


class _Bare:
    def meet(self, hello: Any) -> None:
        """There is nobody, or the other side is its own."""

    def warm(self) -> None:
        """There is no engine to warm."""

    def close(self) -> None:
        """There is nothing to end."""


class _Vm(_Bare):
    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        self._setup, self._memory = setup, memory
        self._pids = (os.getpid(), other)
        libc = ctypes.CDLL(None, use_errno=True)
        self._call = libc.process_vm_readv if setup.work.direction == "read" else libc.process_vm_writev
        self._call.restype = ctypes.c_ssize_t
        self._call.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]
        self._pid = other
        self._pieces: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = None

    def meet(self, hello: Any) -> None:
        self._pid, theirs = hello
        work, memory = self._setup.work, self._memory
        written, read = (np.concatenate(ids).astype(np.uint64) for ids in zip(*work.ids(), strict=True))
        layers = np.arange(work.layers, dtype=np.uint64)[:, None] * np.uint64(memory.layer_bytes)
        places = [(layers + ids[None, :] * np.uint64(work.block_bytes)).ravel() for ids in (written, read)]
        if work.direction == "write":
            places.reverse()
        local, remote = places
        size = np.uint64(work.block_bytes)
        starts = np.ones(len(local), dtype=bool)
        starts[1:] = (np.diff(local) != size) | (np.diff(remote) != size)
        first = np.flatnonzero(starts)
        sizes = np.diff(np.append(first, len(local))).astype(np.uint64) * size
        self._pieces = tuple(  # type: ignore[assignment]
            np.ascontiguousarray(np.stack([place[first] + np.uint64(base), sizes], axis=1))
            for place, base in ((local, memory.address), (remote, theirs))
        )

    def run(self, prepared: Any) -> Took:
        assert self._pieces is not None
        local, remote = self._pieces
        ours, theirs, count, call, pid = local.ctypes.data, remote.ctypes.data, len(local), self._call, self._pid
        moved = 0
        watch = Stopwatch(self._pids)
        for first in range(0, count, _IOV_MAX):
            number = min(_IOV_MAX, count - first)
            got = call(pid, ours + 16 * first, number, theirs + 16 * first, number, 0)
            if got < 0:
                raise OSError(ctypes.get_errno(), "process_vm_readv")
            moved += got
        took = watch.took(None)
        if moved != self._setup.work.bytes:
            raise OSError(f"{moved} of {self._setup.work.bytes} bytes were moved")
        return took


def in_order(setup: Setup) -> Pairs:
    """The blocks that a plain copy or a stream moves: the first ones of every layer."""
    ids = np.arange(setup.work.blocks * setup.work.requests, dtype=np.uint32)
    return [(ids, ids)]


def _runs(setup: Setup, memory: Memory) -> list[tuple[int, int]]:
    size = setup.work.blocks * setup.work.requests * setup.work.block_bytes
    return [(layer * memory.layer_bytes, size) for layer in range(setup.work.layers)]


class _Memcpy(_Bare):
    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        self._memory, self._source = memory, Memory(setup.work)
        self._source.fill()
        self._runs = _runs(setup, memory)
        self._pids = (os.getpid(),)
        self.pairs = in_order(setup)

    def run(self, prepared: Any) -> Took:
        to, source, copy = self._memory.address, self._source.address, ctypes.memmove
        watch = Stopwatch(self._pids)
        for offset, size in self._runs:
            copy(to + offset, source + offset, size)
        return watch.took(None)


class _DeviceCopy(_Bare):
    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        from kvferry.bench.cuda import CudaMemory

        assert isinstance(memory, CudaMemory)
        self._memory, self._source = memory, CudaMemory(setup.work)
        self._source.fill()
        self._runs = _runs(setup, memory)
        self._pids = (os.getpid(),)
        self.pairs = in_order(setup)

    def run(self, prepared: Any) -> Took:
        watch = Stopwatch(self._pids)
        self._memory.copy_from(self._source, self._runs)
        return watch.took(None)


class _SocketSide(_Bare):
    def __init__(self, setup: Setup, memory: Memory) -> None:
        flat = memoryview(memory.words.reshape(-1).data).cast("B")
        self._views = [flat[offset : offset + size] for offset, size in _runs(setup, memory)]
        self._reads = setup.work.direction == "read"
        self.pairs = in_order(setup)

    def _send(self, stream: socket.socket) -> None:
        for view in self._views:
            stream.sendall(view)

    def _receive(self, stream: socket.socket) -> None:
        for view in self._views:
            at = 0
            while at < len(view):
                got = stream.recv_into(view[at:])
                if not got:
                    raise ConnectionResetError("the other side of the stream is gone")
                at += got


class _SocketStarter(_SocketSide):
    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        super().__init__(setup, memory)
        self._pids = (os.getpid(), other)
        self._stream: socket.socket | None = None

    def meet(self, hello: Any) -> None:
        self._stream = socket.create_connection(("127.0.0.1", hello), _LIMIT_S)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, prepared: Any) -> Took:
        assert self._stream is not None
        watch = Stopwatch(self._pids)
        if self._reads:
            self._stream.sendall(b"g")
            self._receive(self._stream)
        else:
            self._send(self._stream)
            self._stream.recv(1)
        return watch.took(None)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class _SocketOther(_SocketSide):
    def __init__(self, setup: Setup, memory: Memory) -> None:
        super().__init__(setup, memory)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stream: socket.socket | None = None

    def hello(self) -> Any:
        return self._listener.getsockname()[1]

    def expect(self) -> Any:
        return None

    def known(self, timeout: float) -> float | None:
        if self._stream is None:
            self._stream = self._listener.accept()[0]
            self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream.settimeout(timeout)
        if self._reads:
            self._stream.recv(1)
            self._send(self._stream)
        else:
            self._receive(self._stream)
            self._stream.sendall(b"g")
        return None

    def close(self) -> None:
        self._listener.close()


class _Messages(_Bare):
    """Drives the program: a line with a number of bytes in, a line of JSON (`seconds`, `cpu_s`, `placed_s`) out."""

    pairs: Pairs | None = None

    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        self._bytes = setup.work.bytes
        self._program = subprocess.Popen(
            [setup.options["program"], str(self._bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The same UCX as kvferry's, wherever that was found, with its messages elsewhere than among the answers.
            env={**os.environ, "KVFERRY_UCX_LIB": str(ucx_info()["path"]), "UCX_LOG_FILE": "stderr"},
        )

    def run(self, prepared: Any) -> Took:
        stdin, stdout = self._program.stdin, self._program.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("go\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the program of UCX's messages ended with {self._program.wait()}")
        figures = json.loads(line)
        return Took(figures["seconds"], None, time.monotonic(), figures["cpu_s"], {"placed": figures["placed_s"]})

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(10)


_STARTERS = {"vm": _Vm, "memcpy": _Memcpy, "device": _DeviceCopy, "socket": _SocketStarter, "am": _Messages}


def starter(setup: Setup, memory: Memory, other: int) -> Any:
    return _STARTERS[setup.options["kind"]](setup, memory, other)


def other(setup: Setup, memory: Memory) -> Any:
    return _SocketOther(setup, memory) if setup.options["kind"] == "socket" else _Idle(setup, memory)
