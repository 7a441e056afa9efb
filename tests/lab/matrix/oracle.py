"""The tokens that requests of the fault matrix should be answered with."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from lab.servers.client import LIMIT_S, Prompt, body, post


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
        words = f"{prompt.name} {len(prompt.tokens)} {prompt.max_tokens}"
        key = hashlib.sha256(words.encode()).hexdigest()[:24]
        if key not in self._known:
            url = await self.start()
            answer = await post(self._session, url, body(prompt), f"oracle-{key}", 10 * LIMIT_S)
            if answer.error is not None or len(answer.tokens) != prompt.max_tokens:
                raise RuntimeError(f"the single server did not answer {prompt.name}: {answer.error}")
            self._known[key] = answer.tokens
            scratch = self._file.with_suffix(".new")
            scratch.write_text(json.dumps(self._known))
            scratch.replace(self._file)
        return tuple(self._known[key])
