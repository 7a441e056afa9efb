"""The HTTP server that proxies of Mooncake's dialect ask for the engines behind a prefill server's URL.

It answers `GET /query` as the bootstrap server of vLLM's `MooncakeConnector` does: a JSON object by data-parallel rank,
with the `engine_id` of each. Where that has the addresses of workers, there is nothing here, because an engine id says
where the engine's listener is (`dialects.place`). Engines of further data-parallel ranks add themselves by
`POST /register`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from .._errors import make_error

MOST_RANKS = 4096
MOST_BYTES = 65_536
"""Of a request's body."""
REGISTER_S = 120.0
"""How long the first rank's server may take to be there."""
ASK_S = 5.0
START_S = 30.0

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class BootstrapServer:
    """Serves until `close`. Its thread does nothing unless asked."""

    def __init__(self, port: int, host: str | None = None) -> None:
        """Binds `port` (0: a free one) of `host`, or of all addresses of this host.

        Raises `InvalidArgumentError` if the port cannot be bound."""
        self._ranks: dict[int, str] = {}
        try:
            if host is None and socket.has_dualstack_ipv6():
                self._socket = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            else:
                family = socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
                self._socket = socket.create_server((host or "", port), family=family)
        except OSError as error:
            message = f"bootstrap_port {port} cannot be bound: {error.strerror}; choose another port"
            raise make_error(-1, "invalid_argument", message) from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self._answer, interface="asgi3", lifespan="off", ws="none", log_level="warning", access_log=False
        )
        self._server = uvicorn.Server(config)
        sockets = [self._socket]
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=sockets), name="kvferry-bootstrap", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def add(self, rank: int, engine_id: str) -> str | None:
        """Names the engine of a data-parallel rank; what is wrong with it, None if nothing is."""
        if not 0 <= rank < MOST_RANKS:
            return f"dp_rank: expected 0 to {MOST_RANKS - 1}, got {rank}"
        # An identical repeat is a client that has not heard the answer.
        known = self._ranks.setdefault(rank, engine_id)
        return None if known == engine_id else f"dp_rank {rank} is engine {known!r} already"

    def close(self) -> None:
        """Ends the server. May be called again."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        method, path = scope.get("method"), scope.get("path")
        status: int
        answer: dict[str, Any]
        if (method, path) == ("GET", "/query"):
            status = 200
            answer = {str(rank): {"engine_id": name, "worker_addr": {}} for rank, name in sorted(self._ranks.items())}
        elif (method, path) == ("POST", "/register"):
            status, answer = self._register(await _body(receive))
        else:
            status, answer = 404, {"detail": "expected GET /query or POST /register"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _register(self, body: bytes | None) -> tuple[int, dict[str, Any]]:
        try:
            told = json.loads(body or b"")
            rank, engine_id = told["dp_rank"], told["engine_id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            rank = engine_id = None
        if type(rank) is not int or not isinstance(engine_id, str):
            return 400, {"detail": "expected a JSON object with a number dp_rank and a text engine_id"}
        wrong = self.add(rank, engine_id)
        return (200, {"status": "ok"}) if wrong is None else (400, {"detail": wrong})


async def _body(receive: Receive) -> bytes | None:
    """A request's body; None if it is longer than any that is meant for this, or does not come."""
    body, more = b"", True
    while more and len(body) <= MOST_BYTES:
        try:
            message = await asyncio.wait_for(receive(), ASK_S)
        except asyncio.TimeoutError:
            return None
        body += message.get("body", b"")
        more = bool(message.get("more_body"))
    return body if len(body) <= MOST_BYTES else None


def register(host: str, port: int, rank: int, engine_id: str, limit_s: float = REGISTER_S) -> None:
    """Tells the server of the first data-parallel rank, which may still be starting, of another rank's engine.

    Raises `InvalidArgumentError` if it refuses, or does not answer within `limit_s`."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    body = json.dumps({"dp_rank": rank, "engine_id": engine_id}).encode()
    request = urllib.request.Request(
        f"http://{where}/register", data=body, headers={"content-type": "application/json"}
    )
    # The environment's HTTP proxies are for what is outside.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with opener.open(request, timeout=ASK_S):
                return
        except urllib.error.HTTPError as error:
            said = error.read(1000).decode(errors="replace")
            why = f"the bootstrap server at {where} refuses data-parallel rank {rank}: {said}"
            raise make_error(-1, "invalid_argument", why) from error
        except OSError as error:
            if time.monotonic() >= deadline:
                why = f"no bootstrap server answers at {where} ({error}); the first data-parallel rank's engine has it"
                raise make_error(-1, "invalid_argument", why) from error
            time.sleep(0.2)


def announce(parallel: Any, port: int, host: str | None, engine_id: str) -> BootstrapServer | None:
    """Makes the engine of one data-parallel rank known to those who ask at `port`: by a server of its own, which comes
    back, or by that of the first rank. `parallel` is vLLM's `ParallelConfig`; which rank has the server is as for
    `MooncakeConnector`."""
    local = bool(parallel.local_engines_only)
    rank = int((parallel.data_parallel_rank_local if local else parallel.data_parallel_index) or 0)
    if rank == 0:
        server = BootstrapServer(port, host)
        server.add(rank, engine_id)
        return server
    register("127.0.0.1" if local else str(parallel.data_parallel_master_ip), port, rank, engine_id)
    return None
