"""Ports for servers that are started later."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now.

    It lies below the range from which the kernel takes ports for connections (32768 and up by default): a server that
    starts slowly would else find its port taken by any connection made meanwhile.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free TCP port from {_PORTS.start} to {_PORTS.stop - 1} on 127.0.0.1")
