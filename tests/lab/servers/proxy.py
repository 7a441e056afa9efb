"""The proxy of examples/kubernetes in front of a prefill and a decode server, with what the demo adds.

It writes down when a request's prefill was answered and when its first token came, and lets a caller exchange the
parameters of two requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from examples.kubernetes import proxy
from examples.kubernetes.proxy import PLACE, REQUEST_ID, open_session

__all__ = ["REQUEST_ID", "KvParams", "Proxy", "Record", "open_session"]

KvParams = dict[str, Any]

ASKED: KvParams = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys((*PLACE, "remote_block_ids")),
}
"""As vLLM's own proxies ask a prefill server."""


@dataclass
class Record:
    """What the proxy saw of one request; times are of time.perf_counter()."""

    arrived: float = field(default_factory=time.perf_counter)
    prefill_answered: float | None = None
    first_token: float | None = None
    params: KvParams | None = None
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def handover_ms(self) -> float | None:
        """Prefill's answer to decode's first token."""
        if self.prefill_answered is None or self.first_token is None:
            return None
        return (self.first_token - self.prefill_answered) * 1e3

    @property
    def first_token_ms(self) -> float | None:
        """The request's arrival to decode's first token, the prefill included."""
        return None if self.first_token is None else (self.first_token - self.arrived) * 1e3


class Proxy(proxy.Proxy):
    """One proxy; `records` holds a Record per request id."""

    asked = ASKED

    def __init__(self, prefill_url: str, decode_url: str, at_once: bool = False) -> None:
        super().__init__(prefill_url, decode_url, at_once)
        self.records: dict[str, Record] = {}
        # Sees each answer of the prefill server and may replace its parameters (for the negative control).
        self.exchange: Callable[[str, KvParams], Any] | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listens on a free port of the loopback interface."""
        app = self.application()
        app.on_response_prepare.append(self._answer_begins)
        # With handler_cancellation the handler ends when its client has gone.
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Closes everything."""
        if self._runner is not None:
            await self._runner.cleanup()

    def record(self, request_id: str) -> Record:
        """The record of a request, made when it is new."""
        return self.records.setdefault(request_id, Record())

    async def _answer_begins(self, request: web.Request, response: web.StreamResponse) -> None:
        """What is passed on begins with the first token; errors are answers of another kind."""
        if response.status == 200 and not isinstance(response, web.Response):
            self.record(request.headers.get(REQUEST_ID, "")).first_token = time.perf_counter()

    async def hand_over(self, request: web.Request, body: dict[str, Any], headers: proxy.Headers) -> web.StreamResponse:
        # Made now, for its time of arrival.
        self.record(headers[REQUEST_ID])
        if self.exchange is None:
            return await super().hand_over(request, body, headers)
        params = await self.prefill(request.path, body, headers, self.asked)
        if isinstance(params, web.Response):
            return params
        params = await self.exchange(headers[REQUEST_ID], params)
        return await self.decode(request, body, headers, params)

    async def prefill(
        self, path: str, body: dict[str, Any], headers: proxy.Headers, asked: Mapping[str, Any]
    ) -> KvParams | web.Response:
        params = await super().prefill(path, body, headers, asked)
        if isinstance(params, web.Response):
            return params
        if params is None:
            text = "the prefill server's answer has no kv_transfer_params: is a KV connector configured there?"
            return web.json_response({"error": text}, status=502)
        record = self.record(headers[REQUEST_ID])
        record.prefill_answered = time.perf_counter()
        record.params = params
        record.prefilled.set()
        return params
