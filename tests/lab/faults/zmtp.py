"""As much of ZMTP 3.0 as a client needs that has no ZMQ, and wants to say wrong things in it."""

from __future__ import annotations

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""Version 3.0, mechanism NULL, as a client."""


def command(name: bytes, body: bytes) -> bytes:
    """A command frame."""
    payload = bytes([len(name)]) + name + body
    return bytes([4, len(payload)]) + payload


def ready(kind: bytes = b"DEALER") -> bytes:
    """The command that ends the greeting."""
    return command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind)


def frame(body: bytes, more: bool = False) -> bytes:
    """One message frame."""
    flags = 1 if more else 0
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


class Client:
    """A DEALER over one TCP connection."""

    def __init__(self, address: tuple[str, int], timeout: float, source: str | None = None) -> None:
        self.socket = socket.create_connection(address, timeout, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(GREETING + ready())
        self._read(64)
        self._frame()

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = self.socket.recv(min(count, 1 << 16))
            if not part:
                raise ConnectionResetError("the listener closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _frame(self) -> tuple[int, bytes]:
        flags = self._read(1)[0]
        size = struct.unpack(">Q", self._read(8))[0] if flags & 2 else self._read(1)[0]
        return flags, self._read(size)

    def ask(self, request: bytes) -> bytes:
        """The answer to one request."""
        self.socket.sendall(frame(request))
        while True:
            flags, body = self._frame()
            if not flags & 4 and not flags & 1:
                return body

    def drain(self) -> None:
        """Takes what has arrived, without looking at it."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1 << 18):
                pass
        except BlockingIOError:
            pass
        finally:
            self.socket.settimeout(30)

    def close(self) -> None:
        """At once, so that no port waits."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
