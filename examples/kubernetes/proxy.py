"""A small proxy between clients, a prefill server and a decode server.

    python proxy.py --prefill http://HOST:8100 --decode http://HOST:8200 --port 8000

Each completion goes to the prefill server first, limited to one token and marked for remote decode. The
`kv_transfer_params` of the answer go with the original request to the decode server, whose answer is passed on as it
comes. Other requests go to the decode server. It keeps no state, so several may run side by side.
"""

from __future__ import annotations

import argparse
import uuid
from typing import Any

import aiohttp
from aiohttp import web

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
DROPPED = {"content-length", "host", "transfer-encoding", "connection", "content-encoding"}


def of_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: one token, one sample, no stream."""
    left_out = ("stream_options", "min_tokens", "max_completion_tokens")
    short = {key: value for key, value in body.items() if key not in left_out}
    return {**short, "max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}


class Proxy:
    """Handlers for one prefill and one decode address; either may be a load balancer in front of several servers."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill.rstrip("/"), decode.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=64 * 2**20)
        app.cleanup_ctx.append(self._client)
        for path in COMPLETIONS:
            app.router.add_post(path, self._complete)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _client(self, _: web.Application) -> Any:
        # A connection per request: vLLM closes idle ones after a few seconds, which may hit a request on its way.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)
        yield
        await self._session.close()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return web.json_response({"error": "the body is not a JSON object"}, status=400)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in DROPPED}
        headers.setdefault("X-Request-Id", uuid.uuid4().hex)
        try:
            url = self._prefill + request.path
            async with self._session.post(url, json=of_prefill(body), headers=headers) as answer:
                if answer.status != 200:
                    return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
                params = (await answer.json()).get("kv_transfer_params")
            if params:
                body["kv_transfer_params"] = params
            async with self._session.post(self._decode + request.path, json=body, headers=headers) as answer:
                return await self._relay(request, answer)
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"a server behind the proxy failed: {error!r}"}, status=502)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = {key: value for key, value in request.headers.items() if key.lower() not in DROPPED}
        url = self._decode + str(request.rel_url)
        try:
            async with self._session.request(request.method, url, data=await request.read(), headers=headers) as answer:
                return await self._relay(request, answer)
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"the decode server failed: {error!r}"}, status=502)

    async def _relay(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Passes an answer on as it comes. When the client leaves, the connection behind is closed, which aborts."""
        headers = {key: value for key, value in answer.headers.items() if key.lower() not in DROPPED}
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    app = Proxy(given.prefill, given.decode).application()
    # With handler_cancellation a handler ends when its client has gone.
    web.run_app(app, host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
