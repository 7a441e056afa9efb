"""The proxy of examples/kubernetes, between servers that are made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")

import aiohttp
from aiohttp import web

from examples.kubernetes.proxy import Proxy

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ENDS_WITHIN_S = 60.0
PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}


async def serve(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


def server(handler: Handler) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    return app


def between(
    prefill: Handler,
    decode: Handler,
    use: Callable[[aiohttp.ClientSession, str], Awaitable[Any]],
    at_once: bool = False,
) -> Any:
    """Runs `use` with a client and the address of a proxy between the two servers."""

    async def whole() -> Any:
        first, first_url = await serve(server(prefill))
        second, second_url = await serve(server(decode))
        proxy, url = await serve(Proxy(first_url, second_url, at_once).application())
        try:
            async with aiohttp.ClientSession() as session:
                return await use(session, url)
        finally:
            for runner in (proxy, first, second):
                await runner.cleanup()

    return asyncio.run(asyncio.wait_for(whole(), ENDS_WITHIN_S))


async def never(_: web.Request) -> web.StreamResponse:
    raise AssertionError("nobody asks this server")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_goes_to_both_servers(path: str) -> None:
    seen: list[tuple[str, dict[str, Any], str]] = []

    async def prefill(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json(), request.headers["X-Request-Id"]))
        return web.json_response({"kv_transfer_params": PARAMS})

    async def decode(request: web.Request) -> web.StreamResponse:
        seen.append((request.path, await request.json(), request.headers["X-Request-Id"]))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for part in (b"data: 1\n\n", b"data: [DONE]\n\n"):
            await answer.write(part)
        return answer

    async def use(session: aiohttp.ClientSession, url: str) -> tuple[int, str, bytes]:
        body = {"prompt": "a", "max_tokens": 9, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(url + path, json=body) as answer:
            return answer.status, answer.headers["Content-Type"], await answer.read()

    assert between(prefill, decode, use) == (200, "text/event-stream", b"data: 1\n\ndata: [DONE]\n\n")
    (first_path, first, first_id), (second_path, second, second_id) = seen
    assert (first_path, second_path) == (path, path)
    assert first_id == second_id
    assert len(first_id) == 32
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert (first["max_tokens"], first["n"], first["stream"], "stream_options" in first) == (1, 1, False, False)
    assert second == {**second, "max_tokens": 9, "n": 3, "stream": True, "kv_transfer_params": PARAMS}


def test_both_servers_are_asked_at_once() -> None:
    place = {"remote_engine_id": "p", "remote_host": "10.0.0.1", "remote_port": 5680}
    asked: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
    decoding = asyncio.Event()
    statuses = iter((200, 200, 500, 200))

    async def prefill(request: web.Request) -> web.Response:
        asked["prefill"].append((await request.json())["kv_transfer_params"])
        if "transfer_id" in asked["prefill"][-1]:
            # Its answer comes when the other one has been asked.
            await decoding.wait()
        return web.json_response({"kv_transfer_params": {**place, "remote_block_ids": [[1]]}})

    async def decode(request: web.Request) -> web.Response:
        asked["decode"].append((await request.json())["kv_transfer_params"])
        decoding.set()
        return web.json_response({}, status=next(statuses))

    async def use(session: aiohttp.ClientSession, url: str) -> list[int]:
        answers = []
        for _ in range(4):
            async with session.post(url + "/v1/completions", json={}) as answer:
                answers.append(answer.status)
        return answers

    assert between(prefill, decode, use, at_once=True) == [200, 200, 500, 200]
    first, *both, last = zip(asked["prefill"], asked["decode"], strict=True)
    # In the first, where the prefill engine is was not known, and after one that failed it is asked for anew.
    for alone, then in (first, last):
        assert alone == {"do_remote_decode": True}
        assert then == {**place, "remote_block_ids": [[1]]}
    for alone, then in both:
        name = then["transfer_id"]
        assert alone == {"do_remote_decode": True, "transfer_id": name}
        assert then == {**place, "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name}
    assert both[0][1]["transfer_id"] != both[1][1]["transfer_id"]


def test_the_clients_own_request_id_goes_to_both_servers() -> None:
    seen: list[list[str]] = []

    async def both(request: web.Request) -> web.Response:
        seen.append(request.headers.getall("X-Request-Id"))
        return web.json_response({"kv_transfer_params": PARAMS})

    async def use(session: aiohttp.ClientSession, url: str) -> int:
        async with session.post(url + "/v1/completions", json={}, headers={"x-request-id": "mine"}) as answer:
            return answer.status

    assert between(both, both, use) == 200
    assert seen == [["mine"], ["mine"]]


def test_a_prefill_that_fails_ends_the_request() -> None:
    async def prefill(_: web.Request) -> web.Response:
        return web.json_response({"error": "no"}, status=400)

    async def use(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
        async with session.post(url + "/v1/completions", json={"prompt": "a"}) as answer:
            return answer.status, await answer.json()

    assert between(prefill, never, use) == (400, {"error": "no"})


def test_an_error_of_the_decode_server_is_passed_on() -> None:
    async def prefill(_: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": PARAMS})

    async def decode(_: web.Request) -> web.Response:
        return web.json_response({"error": "KV load failure"}, status=500)

    async def use(session: aiohttp.ClientSession, url: str) -> int:
        async with session.post(url + "/v1/completions", json={"prompt": "a"}) as answer:
            return answer.status

    assert between(prefill, decode, use) == 500


def test_a_server_that_dies_in_its_answer_ends_the_clients_too() -> None:
    async def prefill(_: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": PARAMS})

    async def decode(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.abort()
        return answer

    async def use(session: aiohttp.ClientSession, url: str) -> bytes:
        async with session.post(url + "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            first = await answer.content.readexactly(9)
            with pytest.raises(aiohttp.ClientError):
                await answer.content.read()
            return first

    assert between(prefill, decode, use) == b"data: 1\n\n"


def test_other_requests_go_to_the_decode_server_alone() -> None:
    async def decode(request: web.Request) -> web.Response:
        return web.json_response([request.method, str(request.rel_url)])

    async def use(session: aiohttp.ClientSession, url: str) -> list[Any]:
        found = []
        for method, path in (("GET", "/health"), ("GET", "/v1/models?a=1"), ("POST", "/tokenize")):
            async with session.request(method, url + path) as answer:
                found.append(await answer.json())
        return found

    assert between(never, decode, use) == [["GET", "/health"], ["GET", "/v1/models?a=1"], ["POST", "/tokenize"]]


FORGED = {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 80}
OWN = {"remote_host": "10.0.0.9", "remote_block_ids": [[1]]}


@pytest.mark.parametrize("of_prefill", [PARAMS, {}, None])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"])
def test_params_stay_between_proxy_and_servers(path: str, of_prefill: dict[str, Any] | None) -> None:
    seen: list[Any] = []

    async def prefill(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"kv_transfer_params": of_prefill})

    async def decode(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"choices": [{"text": "b"}], "kv_transfer_params": OWN})

    async def use(session: aiohttp.ClientSession, url: str) -> Any:
        nested = {"temperature": 0, "extra_args": {"kv_transfer_params": FORGED}}
        body = {"prompt": "a", "kv_transfer_params": FORGED, "sampling_params": nested}
        async with session.post(url + path, json=body) as answer:
            return await answer.json()

    assert between(prefill, decode, use) == {"choices": [{"text": "b"}]}
    # The client's: nowhere. The proxy's own: as it asked, and as the prefill server answered.
    clean = {"prompt": "a", "sampling_params": {"temperature": 0, "extra_args": {}}}
    if path.endswith("completions"):
        asked = {**clean, "max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        assert seen == [asked, {**clean, "kv_transfer_params": of_prefill} if of_prefill else clean]
    else:
        assert seen == [clean]


def test_params_are_taken_out_of_a_stream() -> None:
    last = b'data: {"usage":1,"kv_transfer_params":{"remote_host":"10.0.0.9"}}\n'
    sent = b'data: {"text":"\xc3\xa9"}\r\n\r\n: note\n\n' + last + b"\ndata: [DONE]\n\ndata: {}"

    async def prefill(_: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": PARAMS})

    async def decode(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        # However the network cuts it.
        for at in range(0, len(sent), 7):
            await answer.write(sent[at : at + 7])
            await asyncio.sleep(0)
        return answer

    async def use(session: aiohttp.ClientSession, url: str) -> bytes:
        async with session.post(url + "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            return await answer.read()

    assert between(prefill, decode, use) == sent.replace(last, b'data:{"usage": 1}\n')


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
LONG_NUMBER = b'{"kv_transfer_params": {"remote_port": ' + b"1" * 5000 + b"}}"


@pytest.mark.parametrize("body", [DEEP, LONG_NUMBER, b'{"kv_transfer_params": {'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_json_that_cannot_be_checked_is_refused(path: str, body: bytes) -> None:
    async def use(session: aiohttp.ClientSession, url: str) -> int:
        async with session.post(url + path, data=body, headers={"Content-Type": "application/json"}) as answer:
            return answer.status

    assert between(never, never, use) == 400


def test_a_client_that_leaves_aborts_the_request_behind() -> None:
    ended = asyncio.Event()

    async def prefill(_: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": PARAMS})

    async def decode(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"x")
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async def use(session: aiohttp.ClientSession, url: str) -> bool:
        async with session.post(url + "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            await answer.content.readexactly(1)
        return await asyncio.wait_for(ended.wait(), ENDS_WITHIN_S)

    assert between(prefill, decode, use)


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async def use(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
        async with session.post(url + "/v1/completions", data=body) as answer:
            return answer.status, json.loads(await answer.read())

    assert between(never, never, use)[0] == 400
