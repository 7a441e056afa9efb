"""The HTTP server that proxies of Mooncake's dialect ask for the engines behind a prefill server's URL.

It answers `GET /query` as the bootstrap server of vLLM's `MooncakeConnector` does: a JSON object by data-parallel rank,
with the `engine_id` of each. Where that has the addresses of workers, there is nothing here, because an engine id says
where the engine's listener is (`dialects.addressed_id`). Engines of further data-parallel ranks of the host add
themselves by `POST /register`, which only this host may.

A stranger who reaches the port can read its answers and keep it busy, but takes no more of the engine's memory,
descriptors or threads than `MOST_CONNECTIONS` connections do.
"""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any, Protocol

from .bootstrap_port import bound, listen, rank_of
from .config import Options
from .log import logger

MOST_CONNECTIONS = 32
MOST_RANKS = 4096
MOST_BYTES = 4096
"""The longest body of a request."""
STALLED_S = 5.0
"""The longest silence of a connection, in seconds."""
AGAIN_S = 1.0
KNOWN_S = 20.0
WARN_EVERY_S = 60.0


class Announcement(Protocol):
    """Makes an engine known until it is closed."""

    def close(self) -> None:
        """Ends it. May be called again."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = STALLED_S
    server: _Server

    def do_GET(self) -> None:
        if self.path != "/query":
            return self._answer(404, {"detail": "expected GET /query"})
        ranks = sorted(self.server.ranks.items())
        self._answer(200, {str(rank): {"engine_id": name, "worker_addr": {}} for rank, name in ranks})

    def do_POST(self) -> None:
        if self.path != "/register" or self.client_address[0] not in self.server.own_addresses(self.connection):
            return self._answer(404, {"detail": "expected POST /register from an engine of this host"})
        try:
            length = int(self.headers.get("content-length") or 0)
            body: Any = json.loads(self.rfile.read(length)) if 0 < length <= MOST_BYTES else None
            rank, engine_id = body["dp_rank"], body["engine_id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            rank = engine_id = None
        if type(rank) is not int or not 0 <= rank < MOST_RANKS or not isinstance(engine_id, str):
            detail = f"expected a JSON object with dp_rank, from 0 to {MOST_RANKS - 1}, and the text engine_id"
            return self._answer(400, {"detail": detail})
        # A rank that was started again has another id.
        self.server.ranks[rank] = engine_id
        self._answer(200, {"status": "ok"})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, ranks: dict[int, str]) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.ranks = listening, ranks
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def own_addresses(self, connection: socket.socket) -> set[str]:
        """Addresses of this host, as a connection's other end may have one."""
        return {"127.0.0.1", "::1", "::ffff:127.0.0.1", str(connection.getsockname()[0])}

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # There are no more threads.
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: a client that leaves or stalls is no fault of the engine's."""


class BootstrapServer:
    """The HTTP server; it runs until `close`."""

    def __init__(self, port: int, bind: str | None = None, ranks: dict[int, str] | None = None) -> None:
        """Binds `port` (0: a free one) of `bind`, or of all addresses of this host. `ranks` are those known so far.

        Raises `InvalidArgumentError` if the port cannot be bound."""
        listening = listen(port, bind)
        self.port: int = listening.getsockname()[1]
        self._server: _Server | None = _Server(listening, dict(ranks or {}))
        threading.Thread(target=self._server.serve_forever, name="kvferry-bootstrap", daemon=True).start()

    def close(self) -> None:
        """Ends the server. May be called again."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class Registration:
    """Registers another data-parallel rank's engine with this host's server, again and again: engines start in any
    order, and the first one may be restarted."""

    def __init__(self, port: int, bind: str | None, rank: int, engine_id: str) -> None:
        body = json.dumps({"dp_rank": rank, "engine_id": engine_id}).encode()
        host = bind or "127.0.0.1"
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._request = urllib.request.Request(
            f"http://{self._where}/register", data=body, headers={"content-type": "application/json"}
        )
        # The environment's HTTP proxies are for what is outside.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._rank, self._ended = rank, threading.Event()
        threading.Thread(target=self._run, name="kvferry-bootstrap", daemon=True).start()

    def close(self) -> None:
        """Stops. May be called again."""
        self._ended.set()

    def _run(self) -> None:
        warned = time.monotonic()
        while not self._ended.is_set():
            try:
                with self._opener.open(self._request, timeout=STALLED_S):
                    warned = time.monotonic()
                    self._ended.wait(KNOWN_S)
                    continue
            except urllib.error.HTTPError as error:
                why = str(error)
            except (OSError, http.client.HTTPException) as error:
                why = str(error) or type(error).__name__
            if time.monotonic() - warned > WARN_EVERY_S:
                warned = time.monotonic()
                logger.warning(
                    "The bootstrap server at %s, which the first data-parallel rank of this host has, does not know "
                    "rank %d yet, and proxies do not find it: %s",
                    self._where,
                    self._rank,
                    why,
                )
            self._ended.wait(AGAIN_S)


def announce(parallel: Any, options: Options, engine_id: str) -> Announcement:
    """Makes the engine of one data-parallel rank known at `options.bootstrap_port`: by a server of its own, or by that
    of the first rank of this host. `parallel` is vLLM's `ParallelConfig`."""
    port = options.bootstrap_port
    assert port is not None
    rank = rank_of(parallel)
    if rank == 0:
        return BootstrapServer(port, bound(options), {rank: engine_id})
    return Registration(port, bound(options), rank, engine_id)
