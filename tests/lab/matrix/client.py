"""Requests of the fault matrix, and the tokens that they should be answered with."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from lab.matrix.judge import Outcome
from lab.servers.client import SERVED_NAME
from lab.servers.model import VOCAB
from lab.servers.proxy import REQUEST_ID

LIMIT_S = 60.0
"""A request that has not ended after so long hangs."""

_FIRST_TOKEN = 4


@dataclass(frozen=True)
class Prompt:
    """One prompt; its tokens follow from its name and length."""

    name: str
    length: int
    max_tokens: int

    @property
    def tokens(self) -> list[int]:
        """The token ids, others for each name from the first one on."""
        dice = random.Random(f"{self.name}/{self.length}")
        return [dice.randrange(_FIRST_TOKEN, VOCAB) for _ in range(self.length)]


@dataclass
class Reply:
    """What came back."""

    status: int | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    params: dict[str, Any] | None = None
    error: str | None = None
    hung: bool = False
    seconds: float = 0.0


def body(prompt: Prompt, **more: Any) -> dict[str, Any]:
    """A greedy completion request: the likeliest of one token, because vLLM refuses `n` > 1 without a temperature."""
    return {
        "model": SERVED_NAME,
        "prompt": prompt.tokens,
        "max_tokens": prompt.max_tokens,
        "temperature": 1.0,
        "top_k": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


async def post(
    session: aiohttp.ClientSession,
    url: str,
    request: dict[str, Any],
    request_id: str,
    limit_s: float = LIMIT_S,
    begun: Callable[[], None] | None = None,
) -> Reply:
    """Sends one request and waits for its end, for `limit_s` at most; after that its connection is closed.

    `begun` is called at the first token of a streaming request.
    """
    reply, start = Reply(), time.monotonic()
    try:
        await asyncio.wait_for(_post(session, url, request, request_id, reply, begun), limit_s)
    except (TimeoutError, asyncio.TimeoutError):
        reply.hung, reply.error = True, f"no end within {limit_s:.0f} s"
    except (aiohttp.ClientError, OSError, ValueError) as problem:
        reply.error = f"{type(problem).__name__}: {problem}"
    reply.seconds = time.monotonic() - start
    return reply


async def _post(
    session: aiohttp.ClientSession,
    url: str,
    request: dict[str, Any],
    request_id: str,
    reply: Reply,
    begun: Callable[[], None] | None,
) -> None:
    headers = {REQUEST_ID: request_id}
    async with session.post(f"{url}/v1/completions", json=request, headers=headers) as response:
        reply.status = response.status
        if response.status != 200:
            reply.error = (await response.text())[:600]
        elif request.get("stream"):
            await _read_stream(response, reply, begun)
        else:
            value = await response.json()
            reply.params = value.get("kv_transfer_params")
            choices = sorted(value.get("choices", ()), key=lambda choice: choice["index"])
            reply.choices = tuple(tuple(choice.get("token_ids") or ()) for choice in choices)


async def _read_stream(response: aiohttp.ClientResponse, reply: Reply, begun: Callable[[], None] | None) -> None:
    """One choice, event by event."""
    tokens: list[int] = []
    async for line in response.content:
        text = line.decode(errors="replace").strip().removeprefix("data:").strip()
        if not text or text == "[DONE]":
            continue
        event = json.loads(text)
        if "error" in event:
            reply.error = json.dumps(event["error"])[:600]
            return
        for choice in event.get("choices", ()):
            tokens.extend(choice.get("token_ids") or ())
        reply.choices = (tuple(tokens),)
        if tokens and begun is not None:
            begun()


def as_outcome(label: str, reply: Reply, expected: tuple[int, ...], count: int = 1) -> Outcome:
    """A reply, for the judge."""
    return Outcome(
        label, reply.status, reply.choices, expected, count, reply.error, reply.hung, round(reply.seconds, 1)
    )


class Oracle:
    """The greedy tokens of a single server without a connector, which is started when it is first asked.

    What it said is kept in a file, because it depends on nothing but the model, vLLM's version and the prompt.
    """

    def __init__(self, session: aiohttp.ClientSession, file: Path, start: Callable[[], Awaitable[str]]) -> None:
        self._session, self._file, self._start = session, file, start
        self._known: dict[str, list[int]] = json.loads(file.read_text()) if file.exists() else {}
        self._url: str | None = None
        self._starting = asyncio.Lock()

    @property
    def is_new(self) -> bool:
        """Whether nothing is known yet."""
        return not self._known

    async def start(self) -> str:
        """Starts the server unless it runs; its URL."""
        async with self._starting:
            if self._url is None:
                self._url = await self._start()
            return self._url

    async def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """What the answer must be."""
        key = hashlib.sha256(f"{prompt.name} {prompt.length} {prompt.max_tokens}".encode()).hexdigest()[:24]
        if key not in self._known:
            url = await self.start()
            reply = await post(self._session, url, body(prompt), f"oracle-{key}", 10 * LIMIT_S)
            if reply.error is not None or len(reply.choices) != 1 or len(reply.choices[0]) != prompt.max_tokens:
                raise RuntimeError(f"the single server did not answer {prompt.name}: {reply.error}")
            self._known[key] = list(reply.choices[0])
            scratch = self._file.with_suffix(".new")
            scratch.write_text(json.dumps(self._known))
            scratch.replace(self._file)
        return tuple(self._known[key])
