"""Handshakes per second of one listener, with many clients at once.

A handshake is a client's whole visit: it connects, exchanges ZMQ's greetings, asks for all ranks, has the answer and is
gone. The clients are in other processes and speak ZMQ's protocol themselves, since a library's client would cost more
than the listener. The listener's process is kept on one processor and the clients are kept off it, where there are two.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from .. import Listener, Worker
from .cache import GROUPS, area
from .engines.engine import cpu_of
from .figures import Row, columns, number
from .remote import Remote

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""ZMTP 3.0, mechanism NULL, as a client."""
_READY_BODY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_READY = bytes([4, len(_READY_BODY)]) + _READY_BODY
_LIMIT_S = 120.0
_GONE = struct.pack("ii", 1, 0)
_BLOCK_BYTES = 4096


def _query() -> bytes:
    """A query for all ranks as one ZMQ frame."""
    import msgpack

    body = {"query": {"id": 7, "engine": "bench", "ranks": []}}
    message: bytes = msgpack.packb({"magic": "kvferry", "version": 4, "kind": "handshake_request", "body": body})
    return bytes([0, len(message)]) + message


class _Served:
    """A listener with one rank's metadata, on the first processor."""

    def __init__(self, alone: bool) -> None:
        if alone:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        self._cache = np.zeros((64, _BLOCK_BYTES), dtype=np.uint8)
        with Worker({"engine_id": "bench", "transport": "tcp"}) as worker:
            worker.register(self._cache.ctypes.data, self._cache.nbytes)
            worker.set_geometry({"groups": GROUPS, "areas": [area("0", 64, _BLOCK_BYTES)]})
            metadata = worker.metadata()
        self._size = len(metadata)
        self._listener = Listener({"engine_id": "bench", "host": "127.0.0.1", "port": 0, "advertise_local": True})
        self._listener.offer(metadata)

    def where(self) -> tuple[str, int, int]:
        """Host, port, and the bytes of the metadata, which every answer is longer than."""
        return (*self._listener.address, self._size)

    def close(self) -> None:
        self._listener.close()


class _Clients:
    """`count` visitors at once, until all of them together have made `total` visits."""

    def __init__(self, host: str, port: int, size: int, alone: bool) -> None:
        if alone:
            os.sched_setaffinity(0, os.sched_getaffinity(0) - {min(os.sched_getaffinity(0))})
        self._address, self._size = (host, port), size
        self._hello, self._query = _GREETING + _READY, _query()

    def visit(self, count: int, total: int) -> float:
        """Seconds that all visits took."""
        poll = select.epoll()
        open_: dict[int, tuple[socket.socket, bytearray]] = {}
        asked: set[int] = set()
        started = ended = 0

        def enter() -> None:
            visitor = socket.socket()
            visitor.setblocking(False)
            # No waiting port is left behind: thousands of visits would use them all up.
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _GONE)
            visitor.connect_ex(self._address)
            open_[visitor.fileno()] = (visitor, bytearray())
            poll.register(visitor.fileno(), select.EPOLLOUT)

        begin = time.monotonic()
        while ended < total:
            while started < total and len(open_) < count:
                enter()
                started += 1
            events = poll.poll(_LIMIT_S, 256)
            if not events:
                raise TimeoutError(f"{len(open_)} clients had no answer within {_LIMIT_S:.0f} s")
            for number_, what in events:
                visitor, heard = open_[number_]
                if what & select.EPOLLOUT:
                    error = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if error or visitor.send(self._hello) != len(self._hello):
                        raise ConnectionError(f"a client could not connect: {os.strerror(error)}")
                    poll.modify(number_, select.EPOLLIN)
                    continue
                got = visitor.recv(1 << 16)
                if not got:
                    raise ConnectionResetError("the listener closed a client's connection")
                heard += got
                # ZMQ takes no message before it has answered the greeting.
                if number_ not in asked:
                    if self._greeted(heard):
                        asked.add(number_)
                        visitor.sendall(self._query)
                elif self._complete(heard):
                    poll.unregister(number_)
                    visitor.close()
                    del open_[number_]
                    asked.discard(number_)
                    ended += 1
        return time.monotonic() - begin

    def _greeted(self, heard: bytearray) -> bool:
        return len(heard) >= 66 and len(heard) >= 66 + heard[65]

    def _complete(self, heard: bytearray) -> bool:
        """Whether the whole answer has come: greeting, READY, then one frame."""
        at = 66 + heard[65]
        if len(heard) < at + 9:
            return False
        long = heard[at] & 2
        size, start = (struct.unpack_from(">Q", heard, at + 1)[0], at + 9) if long else (heard[at + 1], at + 2)
        if len(heard) < start + size:
            return False
        if size < self._size or b"handshake_reply" not in heard or b"refused" in heard:
            raise RuntimeError(f"the listener answered something else: {bytes(heard[start : start + 200])!r}")
        return True

    def close(self) -> None:
        """There is nothing left."""


class Visits(NamedTuple):
    """`total` visits by `clients` at once: seconds, and the listener's processor seconds."""

    clients: int
    total: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        """Per second, as seen by the clients."""
        return self.total / self.seconds

    @property
    def rate_of_a_core(self) -> float:
        """Per second of the listener's processor time: what it would do if the clients were not the slower side."""
        return self.total / self.cpu


def measure(clients: int, total: int) -> Visits:
    """All clients visit until `total` visits are made; a tenth of them before, uncounted."""
    alone = len(os.sched_getaffinity(0)) > 1
    with ExitStack() as stack:
        served = stack.enter_context(Remote("listener", _Served, alone))
        visitors = stack.enter_context(Remote("clients", _Clients, *served.ask("where"), alone))
        visitors.ask("visit", clients, max(clients, total // 10))
        before = cpu_of(served.pid)
        seconds = visitors.ask("visit", clients, total)
        return Visits(clients, total, seconds, cpu_of(served.pid) - before)


def summary(visits: Visits) -> Row:
    """The row: `ours_ms` is time by the clock per handshake, `caller_us` the listener's processor time for it."""
    work = f"listener, {visits.clients:,} clients at once, per handshake"
    figures = {"ours_ms": 1e3 / visits.rate, "caller_us": visits.cpu / visits.total * 1e6}
    return {"work": work, "transport": "tcp", **figures}


def table(visits: Visits) -> str:
    """The figures."""
    cells: Any = (f"{visits.clients:,} clients", f"{visits.total:,}", number(visits.seconds))
    line = (*cells, number(visits.rate), number(visits.cpu / visits.total * 1e6), number(visits.rate_of_a_core))
    head = ("", "handshakes", "seconds", "per second", "listener's us each", "per second of its core")
    return columns(head, [line])
