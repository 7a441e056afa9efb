"""Sends completions and collects their token ids."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lab.demo.workload import ABORT_AFTER_TOKENS, Prompt
from lab.servers.proxy import REQUEST_ID, Proxy

SERVED_NAME = "demo"


@dataclass
class Answer:
    """What came back for a prompt."""

    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    aborted: bool = False


def request_body(prompt: Prompt) -> dict[str, Any]:
    """A greedy completion request for exactly `max_tokens` tokens."""
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt.tokens),
        "max_tokens": prompt.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


async def complete(session: aiohttp.ClientSession, url: str, prompt: Prompt, request_id: str) -> Answer:
    """Sends the prompt and reads its whole stream, or leaves early where the prompt says so."""
    answer = Answer()
    try:
        async with session.post(
            f"{url}/v1/completions",
            json=request_body(prompt),
            headers={REQUEST_ID: request_id},
            timeout=aiohttp.ClientTimeout(total=None, sock_read=600),
        ) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:400]}"
                return answer
            async for line in response.content:
                _take(answer, line)
                if answer.error is not None:
                    return answer
                if prompt.abort is not None and len(answer.tokens) >= ABORT_AFTER_TOKENS:
                    answer.aborted = True
                    return answer
    except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
        answer.error = f"{type(problem).__name__}: {problem}"
    return answer


def _take(answer: Answer, line: bytes) -> None:
    """Adds one line of the event stream to the answer."""
    text = line.decode(errors="replace").strip()
    if not text.startswith("data:"):
        return
    payload = text[5:].strip()
    if payload == "[DONE]":
        return
    event = json.loads(payload)
    if "error" in event:
        answer.error = json.dumps(event["error"])[:400]
        return
    for choice in event.get("choices", ()):
        answer.tokens.extend(choice.get("token_ids") or ())


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
