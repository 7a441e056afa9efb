"""The TCP port of the HTTP server that `bootstrap` runs."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from .._errors import make_error
from .config import Options


def listen(port: int, bind: str | None = None) -> socket.socket:
    """Binds `port` (0: a free one) of `bind`, or of all addresses of this host.

    Raises `InvalidArgumentError` if the port cannot be bound.
    """
    try:
        return _listen(port, bind)
    except OSError as error:
        where = f"bootstrap_port {port}" + (f" of {bind}" if bind else "")
        message = f"{where} cannot be bound: {error.strerror or error}; choose another"
        raise make_error(-1, "invalid_argument", message) from error


def _listen(port: int, bind: str | None) -> socket.socket:
    if bind is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET
    if bind is not None:
        family = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((bind or "", port), family=family)


def bound(options: Options) -> str | None:
    """Returns the address that the server binds, or None if it binds all.

    As with the listener, it is `bind`, or `host` if that is a loopback address.
    """
    text = (options.bind or options.host or "").removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text if options.bind else None
    return text if address.is_loopback or (options.bind and not address.is_unspecified) else None


def rank_of(parallel: Any) -> int:
    """Returns an engine's number among those of one bootstrap server; rank 0 runs it. `parallel` is vLLM's
    `ParallelConfig`. Ranks are numbered as by `MooncakeConnector`: within the host where it has an API server of its
    own, otherwise over all hosts."""
    local = bool(parallel.local_engines_only)
    return int((parallel.data_parallel_rank_local if local else parallel.data_parallel_index) or 0)
