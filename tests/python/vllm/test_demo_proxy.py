"""The demo's proxy, where a server behind it dies."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")

from aiohttp import web
from demo_lib.client import Answer, complete
from demo_lib.proxy import Proxy, open_session
from demo_lib.workload import Prompt

ENDS_WITHIN_S = 60.0


async def _serve(handler: web.RequestHandler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


async def _prefill(_request: web.Request) -> web.Response:
    return web.json_response({"kv_transfer_params": {"do_remote_prefill": True}})


async def _die_in_the_stream(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    await answer.write(b'data: {"choices": [{"token_ids": [7, 8]}]}\n\n')
    assert request.transport is not None
    request.transport.abort()
    return answer


async def _ask() -> Answer:
    prefill, prefill_url = await _serve(_prefill)
    decode, decode_url = await _serve(_die_in_the_stream)
    proxy = Proxy(prefill_url, decode_url)
    await proxy.start()
    try:
        async with open_session() as session:
            return await asyncio.wait_for(
                complete(session, proxy.url, Prompt("p", (1, 2, 3)), "request"), ENDS_WITHIN_S
            )
    finally:
        await proxy.stop()
        await decode.cleanup()
        await prefill.cleanup()


def test_a_server_that_dies_in_its_answer_ends_the_clients_too() -> None:
    answer = asyncio.run(_ask())
    assert answer.error is not None
    assert answer.tokens == [7, 8]
