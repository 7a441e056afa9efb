"""A small proxy between clients, a prefill server and a decode server.

    python proxy.py --prefill http://HOST:8100 --decode http://HOST:8200 --port 8000

Each completion goes to the prefill server first, limited to one token and marked for remote decode. The
`kv_transfer_params` of the answer go with the original request to the decode server, whose answer is passed on as it
comes. Other requests go to the decode server. Several may run side by side.

With --at-once both servers get a completion at the same time, under one `transfer_id`, and the decode engine asks the
prefill engine for the rest. Where that engine is, the proxy has from an answer, so the first completion, and the next
after one that failed, go the other way. --prefill is then the address of one engine, not of a load balancer.

`kv_transfer_params` stay between the proxy and the servers, because they tell a server which address to connect to.
They are removed from what clients send, and from what clients are sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping, MutableMapping
from typing import Any

import aiohttp
from aiohttp import web

REQUEST_ID = "X-Request-Id"
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
DROPPED = ("content-length", "host", "transfer-encoding", "connection", "content-encoding")
PLACE = ("remote_engine_id", "remote_host", "remote_port")
"""What of a prefill engine's `kv_transfer_params` says where it is."""
PARAMS = "kv_transfer_params"
Headers = MutableMapping[str, str]


def open_session() -> aiohttp.ClientSession:
    """An HTTP client for servers that may be slow: a request has no time limit.

    Each has a connection of its own: vLLM closes idle ones after a few seconds, which may hit a request on its way.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)


def passed_on(headers: Any) -> Headers:
    """The headers that mean something to the next side too. Names in them are equal in any case of letters."""
    kept = headers.copy()
    for name in DROPPED:
        kept.popall(name, None)
    return kept  # type: ignore[no-any-return]


def without_params(value: Any) -> Any:
    """A JSON value without `kv_transfer_params`, at any depth: `extra_args` of a generate request hold them too."""
    if isinstance(value, dict):
        return {key: without_params(inner) for key, inner in value.items() if key != PARAMS}
    if isinstance(value, list):
        return [without_params(inner) if isinstance(inner, dict | list) else inner for inner in value]
    return value


def stripped(text: bytes) -> bytes:
    """The same for encoded JSON. Text without the key stays as it is, byte for byte.

    Raises `RecursionError` for JSON that is nested too deeply to be looked through, and `ValueError` for text with the
    key that is no JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        if PARAMS.encode() in text:
            raise
        return text
    kept = without_params(value)
    return text if kept == value else json.dumps(kept).encode()


def for_client(text: bytes) -> bytes:
    """The same for a server's answer; nothing where it cannot be looked through."""
    try:
        return stripped(text)
    except (ValueError, RecursionError):
        return b""


def stripped_line(line: bytes) -> bytes:
    """A line of an event stream."""
    prefix = b"data:"
    return prefix + for_client(line[len(prefix) :]) if line.startswith(prefix) else line


async def stripped_events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of an event stream as they come, `kv_transfer_params` taken out of the data."""
    rest = b""
    async for chunk in answer.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if whole := b"".join(stripped_line(line) + b"\n" for line in lines):
            yield whole
    if rest:
        yield stripped_line(rest)


async def stripped_answer(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """A server's answer as the client may see it."""
    if answer.content_type == "text/event-stream":
        async for lines in stripped_events(answer):
            yield lines
    elif answer.content_type.endswith("json"):
        yield for_client(await answer.read())
    else:
        async for chunk in answer.content.iter_any():
            yield chunk


def of_prefill(body: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: one token, one sample, no stream."""
    left_out = ("stream_options", "min_tokens", "max_completion_tokens")
    short = {key: value for key, value in body.items() if key not in left_out}
    return {**short, "max_tokens": 1, "n": 1, "stream": False, PARAMS: dict(asked)}


class Proxy:
    """Handlers for one prefill and one decode address. Either may be a load balancer in front of several servers, but
    for the prefill address of a proxy that asks both `at_once`.

    Attributes:
        asked: The `kv_transfer_params` for the prefill server.
    """

    asked: Mapping[str, Any] = {"do_remote_decode": True}

    def __init__(self, prefill: str, decode: str, at_once: bool = False) -> None:
        self._prefill, self._decode = prefill.rstrip("/"), decode.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._at_once = at_once
        self._place: dict[str, Any] | None = None

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=64 * 2**20)
        app.cleanup_ctx.append(self._client)
        for path in COMPLETIONS:
            app.router.add_post(path, self._complete)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _client(self, _: web.Application) -> Any:
        self._session = open_session()
        yield
        await self._session.close()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = without_params(await request.json())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return web.json_response({"error": "the body is not a JSON object"}, status=400)
        headers = passed_on(request.headers)
        headers.setdefault(REQUEST_ID, uuid.uuid4().hex)
        try:
            return await self.hand_over(request, body, headers)
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"a server behind the proxy failed: {error!r}"}, status=502)

    async def hand_over(self, request: web.Request, body: dict[str, Any], headers: Headers) -> web.StreamResponse:
        """The prefill server first, then the decode server; or both at once."""
        if self._at_once and self._place is not None:
            return await self._ask_both(request, body, headers, self._place)
        params = await self.prefill(request.path, body, headers, self.asked)
        if isinstance(params, web.Response):
            return params
        return await self.decode(request, body, headers, params)

    async def _ask_both(
        self, request: web.Request, body: dict[str, Any], headers: Headers, place: dict[str, Any]
    ) -> web.StreamResponse:
        """Both servers at the same time. Where one fails, the other's request is aborted."""
        name = uuid.uuid4().hex
        params = {**place, "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name}
        prefill = asyncio.create_task(self.prefill(request.path, body, headers, {**self.asked, "transfer_id": name}))
        decode = asyncio.create_task(self.decode(request, body, headers, params))
        ended = False
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            answer: Any = prefill.result() if prefill.done() else None
            if not isinstance(answer, web.Response):
                answer = await decode
            ended = answer.status == 200
            return answer
        finally:
            if not ended:
                # The engine may have moved, or the client has left.
                self._place = None
            for task in (prefill, decode):
                task.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    async def prefill(
        self, path: str, body: dict[str, Any], headers: Headers, asked: Mapping[str, Any]
    ) -> dict[str, Any] | web.Response | None:
        """The `kv_transfer_params` that `asked` gets: empty where nothing is to be loaded, None where there are none
        (of an engine without a connector). A failure as the client gets it."""
        assert self._session is not None
        async with self._session.post(self._prefill + path, json=of_prefill(body, asked), headers=headers) as answer:
            if answer.status != 200:
                failure = for_client(await answer.read())
                return web.Response(status=answer.status, body=failure, content_type="application/json")
            params: dict[str, Any] | None = (await answer.json()).get(PARAMS)
        if params is not None and all(key in params for key in PLACE):
            self._place = {key: params[key] for key in PLACE}
        return params

    async def decode(
        self, request: web.Request, body: dict[str, Any], headers: Headers, params: dict[str, Any] | None
    ) -> web.StreamResponse:
        """The decode server's answer to the whole request."""
        assert self._session is not None
        whole = {**body, PARAMS: params} if params else body
        async with self._session.post(self._decode + request.path, json=whole, headers=headers) as answer:
            return await self._relay(request, answer)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = passed_on(request.headers)
        url = self._decode + str(request.rel_url)
        try:
            data = stripped(await request.read())
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": f"the body cannot be looked through: {error}"}, status=400)
        try:
            async with self._session.request(request.method, url, data=data, headers=headers) as answer:
                return await self._relay(request, answer)
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"the decode server failed: {error!r}"}, status=502)

    async def _relay(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Passes an answer on as it comes. When the client leaves, the connection behind is closed, which aborts."""
        response = web.StreamResponse(status=answer.status, headers=passed_on(answer.headers))
        try:
            async for chunk in stripped_answer(answer):
                # Not before there is something to pass on: until then the request can still end with an error.
                if not response.prepared:
                    await response.prepare(request)
                await response.write(chunk)
        except aiohttp.ClientError:
            if not response.prepared:
                raise
            # No other answer can follow a part of this one: the client must see it end, or would wait for ever.
            if request.transport is not None:
                request.transport.abort()
            return response
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        return response


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--at-once", action="store_true", help="ask both servers at the same time")
    given = parser.parse_args()
    app = Proxy(given.prefill, given.decode, given.at_once).application()
    # With handler_cancellation a handler ends when its client has gone.
    web.run_app(app, host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
