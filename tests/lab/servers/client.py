"""Prompts, requests with them, and the tokens that come back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from lab.servers.model import VOCAB
from lab.servers.proxy import REQUEST_ID, Proxy
from lab.servers.server import ServerFailed

SERVED_NAME = "demo"
FIRST_TOKEN = 4
"""Those before it are special."""

LIMIT_S = 60.0
"""A request of the fault matrix that has not ended after so long hangs."""

ABORT_AFTER_TOKENS = 4
_SILENCE = aiohttp.ClientTimeout(total=None, sock_read=600)


@dataclass(frozen=True)
class Prompt:
    """One request's tokens."""

    name: str
    tokens: tuple[int, ...]
    # Enough for a small error in the context to show, few enough for a CPU.
    max_tokens: int = 24
    # How many first tokens it has in common with an earlier prompt: these may be in the decode engine's own cache.
    shared: int = 0
    # "decode": the client leaves after some tokens; "load": as soon as the prefill is done.
    abort: str | None = None


def prompt_of(name: str, length: int, max_tokens: int) -> Prompt:
    """A prompt whose tokens follow from its name and length: others for each name from the first one on."""
    dice = random.Random(f"{name}/{length}")
    return Prompt(name, tuple(dice.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)), max_tokens)


@dataclass
class Answer:
    """What came back. `status` is None where no answer came."""

    status: int | None = None
    # The token ids of each choice.
    choices: tuple[tuple[int, ...], ...] = ()
    params: dict[str, Any] | None = None
    error: str | None = None
    # It has not ended within the limit.
    hung: bool = False
    # The client has left.
    aborted: bool = False
    seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """Of the only choice."""
        return list(self.choices[0]) if self.choices else []


def body(prompt: Prompt, n: int = 1, **more: Any) -> dict[str, Any]:
    """A greedy completion request for exactly `max_tokens` tokens."""
    # vLLM refuses `n` > 1 without a temperature: the likeliest of one token then.
    greedy = {"temperature": 0.0} if n == 1 else {"temperature": 1.0, "top_k": 1, "n": n}
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt.tokens),
        "max_tokens": prompt.max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **greedy,
        **more,
    }


async def post(
    session: aiohttp.ClientSession,
    url: str,
    request: dict[str, Any],
    request_id: str | None = None,
    limit_s: float | None = None,
    begun: Callable[[], None] | None = None,
    leave_after: int | None = None,
) -> Answer:
    """Sends one request and waits for its end, for `limit_s` seconds at most; after that its connection is closed.

    Of a streaming request, `begun` is called at the first token, and the client leaves after `leave_after` tokens.
    """
    answer, start = Answer(), time.monotonic()
    try:
        await asyncio.wait_for(_post(session, url, request, request_id, answer, begun, leave_after), limit_s)
    except (aiohttp.ClientError, ValueError, OSError, asyncio.TimeoutError) as problem:
        answer.hung = limit_s is not None and isinstance(problem, (TimeoutError, asyncio.TimeoutError))
        answer.error = f"no end within {limit_s:.0f} s" if answer.hung else f"{type(problem).__name__}: {problem}"
    answer.seconds = time.monotonic() - start
    return answer


async def _post(
    session: aiohttp.ClientSession,
    url: str,
    request: dict[str, Any],
    request_id: str | None,
    answer: Answer,
    begun: Callable[[], None] | None,
    leave_after: int | None,
) -> None:
    headers = {} if request_id is None else {REQUEST_ID: request_id}
    completions = f"{url}/v1/completions"
    async with session.post(completions, json=request, headers=headers, timeout=_SILENCE) as response:
        answer.status = response.status
        if response.status != 200:
            answer.error = (await response.text())[:600]
        elif request.get("stream"):
            await _read_stream(response, answer, begun, leave_after)
        else:
            value = await response.json()
            answer.params = value.get("kv_transfer_params")
            choices = sorted(value.get("choices", ()), key=lambda choice: choice["index"])
            answer.choices = tuple(tuple(choice.get("token_ids") or ()) for choice in choices)


async def _read_stream(
    response: aiohttp.ClientResponse, answer: Answer, begun: Callable[[], None] | None, leave_after: int | None
) -> None:
    """One choice, event by event."""
    tokens: list[int] = []
    async for line in response.content:
        text = line.decode(errors="replace").strip().removeprefix("data:").strip()
        if not text or text == "[DONE]":
            continue
        event = json.loads(text)
        if "error" in event:
            answer.error = json.dumps(event["error"])[:600]
            return
        for choice in event.get("choices", ()):
            tokens.extend(choice.get("token_ids") or ())
        answer.choices = (tuple(tokens),)
        if tokens and begun is not None:
            begun()
        if leave_after is not None and len(tokens) >= leave_after:
            answer.aborted = True
            return


async def complete(session: aiohttp.ClientSession, url: str, prompt: Prompt, request_id: str) -> Answer:
    """Sends the prompt and reads its whole stream, or leaves early where the prompt says so."""
    leave_after = None if prompt.abort is None else ABORT_AFTER_TOKENS
    answer = await post(session, url, body(prompt, stream=True), request_id, leave_after=leave_after)
    if answer.status not in (None, 200):
        answer.error = f"HTTP {answer.status}: {answer.error}"
    return answer


async def complete_through(session: aiohttp.ClientSession, proxy: Proxy, prompt: Prompt, request_id: str) -> Answer:
    """Sends the prompt through the proxy; a prompt aborted in its load leaves when its prefill is done."""
    work = asyncio.create_task(complete(session, proxy.url, prompt, request_id))
    if prompt.abort != "load":
        return await work
    prefilled = asyncio.create_task(proxy.record(request_id).prefilled.wait())
    await asyncio.wait({work, prefilled}, return_when=asyncio.FIRST_COMPLETED)
    if prefilled.done() and not work.done():
        # One turn of the loop lets the proxy send the request to the decode server before its client leaves.
        await asyncio.sleep(0.02)
    prefilled.cancel()
    if work.done():
        return work.result()
    work.cancel()
    await asyncio.wait({work})
    return Answer(aborted=True)


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int, **more: Any) -> list[int]:
    """The greedy answer to a prompt, of exactly `tokens` tokens. Raises `ServerFailed` with what was said instead."""
    answer = await post(session, url, body(Prompt("asked", tuple(prompt), tokens), stream=True, **more))
    if answer.error is not None or len(answer.tokens) != tokens:
        told = f"HTTP {answer.status}, {len(answer.tokens)} of {tokens} tokens"
        raise ServerFailed(f"{told}: {(answer.error or '')[-300:]}")
    return answer.tokens
