"""The proxy in front of a prefill and a decode server.

A request goes to the prefill server first, limited to one token and marked for remote decode. The
`kv_transfer_params` of its answer go with the original request to the decode server, whose stream is passed on.
When the client leaves, the connection to the server that works for it is closed, which aborts the request there.

With `at_once` both servers get the request at the same time, under one `transfer_id`, and the decode engine asks the
prefill engine for the rest. Where that engine is, the proxy has from its first answer, so the first request goes the
other way.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

REQUEST_ID = "X-Request-Id"

KvParams = dict[str, Any]


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


def open_session() -> aiohttp.ClientSession:
    """An HTTP client for servers that may be slow.

    There is no limit on a request's time: a first hand-over may wait long on a busy machine. Each request has a
    connection of its own: vLLM closes idle ones after 5 s, and a request that is just being sent on one then fails.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)


class Proxy:
    """One proxy; `records` holds a Record per request id."""

    def __init__(self, prefill_url: str, decode_url: str, at_once: bool = False) -> None:
        self.records: dict[str, Record] = {}
        # Sees each answer of the prefill server and may replace its parameters (for the negative control).
        self.exchange: Callable[[str, KvParams], Any] | None = None
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._at_once = at_once
        # What a decode engine needs to find the prefill engine, from the last answer.
        self._place: KvParams | None = None
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listens on a free port of the loopback interface."""
        self._session = open_session()
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_post("/v1/completions", self._completions)
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
        if self._session is not None:
            await self._session.close()

    def record(self, request_id: str) -> Record:
        """The record of a request, made when it is new."""
        return self.records.setdefault(request_id, Record())

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._hand_over(request)
        except aiohttp.ClientError as problem:
            text = f"a server behind the proxy failed: {type(problem).__name__}: {problem}"
            return web.json_response({"error": text}, status=502)

    async def _hand_over(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        body: dict[str, Any] = await request.json()
        request_id = request.headers.get(REQUEST_ID, "")
        if not request_id or not body.get("stream"):
            return web.json_response({"error": f"expected a streaming request with a {REQUEST_ID} header"}, status=400)
        record = self.record(request_id)
        headers = {REQUEST_ID: request_id}
        if self._at_once and self._place is not None and self.exchange is None:
            return await self._ask_both(request, body, headers, record)

        params, failure = await self._prefill(body, headers, record)
        if params is None:
            return failure or web.json_response({"error": "prefill failed"}, status=502)
        if self.exchange is not None:
            params = await self.exchange(request_id, params)
        return await self._decode(request, body, headers, record, params)

    async def _ask_both(
        self, request: web.Request, body: dict[str, Any], headers: dict[str, str], record: Record
    ) -> web.StreamResponse:
        """Both servers at the same time. Where one fails, the other's request is aborted."""
        assert self._place is not None
        name = uuid.uuid4().hex
        params = {**self._place, "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name}
        prefill = asyncio.create_task(self._prefill(body, headers, record, name))
        decode = asyncio.create_task(self._decode(request, body, headers, record, params))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done():
                found, failure = prefill.result()
                if found is None:
                    return failure or web.json_response({"error": "prefill failed"}, status=502)
            return await decode
        finally:
            for task in (prefill, decode):
                task.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    async def _decode(
        self,
        request: web.Request,
        body: dict[str, Any],
        headers: dict[str, str],
        record: Record,
        params: KvParams,
    ) -> web.StreamResponse:
        assert self._session is not None
        decode_body = {**body, "kv_transfer_params": params}
        url = f"{self._decode_url}/v1/completions"
        async with self._session.post(url, json=decode_body, headers=headers) as source:
            if source.status != 200:
                return web.Response(status=source.status, body=await source.read(), content_type="application/json")
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            try:
                async for line in source.content:
                    # Not before there is something to pass on: until then the prefill server may fail.
                    if not answer.prepared:
                        await answer.prepare(request)
                    # The prompt's ids come in the first chunk too: lines are long, and only their beginning is looked
                    # at.
                    if record.first_token is None and line.startswith(b"data:"):
                        record.first_token = time.perf_counter()
                    await answer.write(line)
                if answer.prepared:
                    await answer.write_eof()
            except aiohttp.ClientError:
                if not answer.prepared:
                    raise
                # The decode server died. Another answer cannot follow a part of this one: the client must see it end
                # too, and would wait for ever otherwise.
                if request.transport is not None:
                    request.transport.abort()
            return answer

    async def _prefill(
        self, body: dict[str, Any], headers: dict[str, str], record: Record, transfer_id: str | None = None
    ) -> tuple[KvParams | None, web.Response | None]:
        assert self._session is not None
        prefill_body = {
            **body,
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
                **({} if transfer_id is None else {"transfer_id": transfer_id}),
            },
        }
        async with self._session.post(
            f"{self._prefill_url}/v1/completions", json=prefill_body, headers=headers
        ) as answer:
            content = await answer.read()
        if answer.status != 200:
            return None, web.Response(status=answer.status, body=content, content_type="application/json")
        params = json.loads(content).get("kv_transfer_params")
        if not isinstance(params, dict):
            text = "the prefill server's answer has no kv_transfer_params: is a KV connector configured there?"
            return None, web.json_response({"error": text}, status=502)
        self._place = {key: params.get(key) for key in ("remote_engine_id", "remote_host", "remote_port")}
        record.prefill_answered = time.perf_counter()
        record.params = params
        record.prefilled.set()
        return params, None
