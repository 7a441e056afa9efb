"""The demo's proxy: where a server behind it dies, and where it asks both at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")

from aiohttp import web
from lab.demo.workload import Prompt
from lab.servers.client import Answer, complete
from lab.servers.proxy import Proxy, open_session

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ENDS_WITHIN_S = 60.0


async def _serve(handler: Handler, handler_cancellation: bool = False) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, handler_cancellation=handler_cancellation)
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


async def _ask(prefilling: Handler, decoding: Handler) -> Answer:
    """An answer through a proxy that asks one server after the other."""
    prefill, prefill_url = await _serve(prefilling)
    decode, decode_url = await _serve(decoding)
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
    answer = asyncio.run(_ask(_prefill, _die_in_the_stream))
    assert answer.error is not None
    assert answer.tokens == [7, 8]


PLACE = {"remote_engine_id": "p", "remote_host": "10.0.0.1", "remote_port": 5680}


class Pair:
    """A prefill and a decode server that say what they were asked, and answer when they are let."""

    def __init__(self) -> None:
        self.prefilled: list[dict[str, Any]] = []
        self.decoded: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.asked_both = asyncio.Event()
        # Which of them fails when both are asked at once, and which does not answer.
        self.broken = ""
        self.hold_prefill = self.hold_decode = False
        self.answer: dict[str, Any] = {
            "kv_transfer_params": {
                **PLACE,
                "do_remote_prefill": True,
                "remote_request_id": "r",
                "remote_block_ids": [[1]],
            }
        }

    async def _hold(self, what: str, held: bool) -> None:
        if len(self.prefilled) == len(self.decoded):
            self.asked_both.set()
        await asyncio.wait_for(self.asked_both.wait(), ENDS_WITHIN_S)
        try:
            if held:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.aborted.append(what)
            raise

    async def prefill(self, request: web.Request) -> web.Response:
        self.prefilled.append((await request.json())["kv_transfer_params"])
        if "transfer_id" in self.prefilled[-1]:
            await self._hold("prefill", self.hold_prefill)
            if self.broken == "prefill":
                return web.json_response({"error": "no"}, status=503)
        return web.json_response(self.answer)

    async def decode(self, request: web.Request) -> web.StreamResponse:
        self.decoded.append((await request.json()).get("kv_transfer_params", {}))
        if "transfer_id" in self.decoded[-1]:
            await self._hold("decode", self.hold_decode)
            if self.broken == "decode":
                return web.json_response({"error": "no"}, status=503)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices": [{"token_ids": [7]}]}\n\ndata: [DONE]\n\n')
        return answer


@pytest.mark.parametrize("answer", [{}, {"kv_transfer_params": None}], ids=["absent", "null"])
def test_a_prefill_server_without_a_connector_is_told(answer: dict[str, Any]) -> None:
    """Its answer would otherwise be right: the decode server computes everything."""
    pair = Pair()
    pair.answer = answer
    told = asyncio.run(_ask(pair.prefill, pair.decode))
    assert told.error is not None
    assert "502" in told.error
    assert "is a KV connector configured there?" in told.error
    assert pair.decoded == []


def test_a_prefill_that_leaves_nothing_to_load_is_none_of_that() -> None:
    pair = Pair()
    pair.answer = {"kv_transfer_params": {}}
    told = asyncio.run(_ask(pair.prefill, pair.decode))
    assert (told.error, told.tokens) == (None, [7])
    assert pair.decoded == [{}]


async def _ask_twice(pair: Pair) -> tuple[Answer, Answer, Proxy]:
    """The first answer, for which nothing is known of the prefill server, and the second one."""
    prefill, prefill_url = await _serve(pair.prefill, handler_cancellation=True)
    decode, decode_url = await _serve(pair.decode, handler_cancellation=True)
    proxy = Proxy(prefill_url, decode_url, at_once=True)
    await proxy.start()
    try:
        async with open_session() as session:
            first = await complete(session, proxy.url, Prompt("p", (1, 2, 3)), "first")
            second = complete(session, proxy.url, Prompt("p", (1, 2, 3)), "second")
            answer = await asyncio.wait_for(second, ENDS_WITHIN_S)
            # A server notices a while later that its client has gone.
            held = (pair.hold_prefill, pair.hold_decode).count(True)
            for _ in range(600):
                if len(pair.aborted) >= held:
                    break
                await asyncio.sleep(0.1)
            return first, answer, proxy
    finally:
        await proxy.stop()
        await decode.cleanup()
        await prefill.cleanup()


def test_both_servers_are_asked_at_the_same_time() -> None:
    async def run() -> None:
        pair = Pair()
        first, second, proxy = await _ask_twice(pair)
        assert (first.error, first.tokens, second.error, second.tokens) == (None, [7], None, [7])
        assert "transfer_id" not in pair.prefilled[0]
        assert pair.decoded[0]["remote_block_ids"] == [[1]]
        name = pair.prefilled[1].pop("transfer_id")
        assert len(name) == 32
        assert pair.prefilled[1] == pair.prefilled[0]
        assert pair.decoded[1] == {
            **PLACE,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": name,
        }
        record = proxy.record("second")
        assert record.prefilled.is_set()
        assert record.first_token_ms is not None
        assert record.first_token_ms > 0

    asyncio.run(run())


@pytest.mark.parametrize(("broken", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_where_one_server_fails_the_others_request_is_aborted(broken: str, other: str) -> None:
    async def run() -> None:
        pair = Pair()
        pair.broken = broken
        setattr(pair, f"hold_{other}", True)
        first, second, _ = await _ask_twice(pair)
        assert first.error is None
        assert second.error is not None
        assert "503" in second.error
        assert pair.aborted == [other]

    asyncio.run(run())
