"""Requests of every kind that vLLM's API has, through a proxy and by the decode server alone."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import aiohttp

from lab.servers.client import SERVED_NAME
from lab.servers.metrics import fetch_metrics, open_requests, total
from lab.servers.server import Server

ADAPTER_NAME = "adapter"
"""What the servers call their LoRA adapter."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT_TOKENS, ANSWER_TOKENS = 300, 16
CROWD, CROWD_TOKENS = 6, 300
"""Requests at once, and the tokens of their answers."""
ROUNDING = 1e-3
"""By how much log-probabilities may differ with states: a prompt's last token goes through another kernel where it is
computed by itself."""
GONE_LIMIT_S = 60.0
LIMIT = aiohttp.ClientTimeout(total=300)

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "two samples": {"n": 2, "temperature": 0.9, "seed": 11},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 5},
    "log-probabilities": {"logprobs": 3},
    "log-probabilities of the prompt": {"prompt_logprobs": 1},
    "echo": {"echo": True},
    "echo with log-probabilities": {"echo": True, "logprobs": 1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "biased": {"logit_bias": {"77": 4.0, "78": -100.0}},
    "allowed tokens": {"allowed_token_ids": [20, 21, 22, 23]},
    "least number of tokens": {"min_tokens": 8, "ignore_eos": False},
    "cut prompt": {"truncate_prompt_tokens": 100},
    "priority": {"priority": 3},
    "structured": {"structured_outputs": {"choice": ["t20", "t21"]}, "ignore_eos": False},
}
"""By what they add to a greedy completion."""

OWN = ("id", "created", "kv_transfer_params", "system_fingerprint", "model", "metrics")
"""Parts of an answer that say nothing of its content."""


class Kinds:
    """Asks a proxy and the decode server the same."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, prefill: Server, decode: Server, seed: str, stateful: bool
    ) -> None:
        self._session, self._url, self._prefill, self._decode = session, url, prefill, decode
        self._stateful = stateful
        self._dice = random.Random(f"kinds-{seed}")
        self.asked = 0
        self.equal = 0
        self.notes: list[str] = []

    async def run(self) -> None:
        """All kinds."""
        for name, more in KINDS.items():
            await self._compare(name, COMPLETIONS, self._body(**more))
        await self._stops()
        if self._stateful:
            await self._crowd()
        else:
            await self._adapter()
        messages = [{"role": "user", "content": " ".join(f"t{self._dice.randrange(10, 500)}" for _ in range(120))}]
        for name, more in [("chat", {}), ("chat with log-probabilities", {"logprobs": True, "top_logprobs": 2})]:
            body = {"model": SERVED_NAME, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0.0}
            await self._compare(name, CHAT, {**body, "ignore_eos": True, "return_token_ids": True, **more})
        await self._several()
        await self._streamed()
        await self._left()

    def _body(self, **more: Any) -> dict[str, Any]:
        prompt = [self._dice.randrange(10, 500) for _ in range(PROMPT_TOKENS)]
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.0}
        return {**body, "ignore_eos": True, "return_token_ids": True, **more}

    async def _ask(self, url: str, path: str, body: dict[str, Any]) -> Any:
        try:
            status, text = await self._post(url, path, body)
        except aiohttp.ClientError as error:
            # A proxy that has begun its answer can tell of an error only by breaking it off.
            return {"status": 0, "text": str(error)[:300]}
        if status != 200:
            return {"status": status, "text": text[:300]}
        if body.get("stream"):
            events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
            answers = [json.loads(event) for event in events if event != "[DONE]"]
            return _joined([choice for answer in answers for choice in answer.get("choices", ())])
        return {key: value for key, value in json.loads(text).items() if key not in OWN}

    async def _post(self, url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
        async with self._session.post(f"{url}{path}", json=body, timeout=LIMIT) as response:
            return response.status, await response.text()

    async def _alone(self, path: str, body: dict[str, Any]) -> Any:
        """The decode server's own answer, which has nothing of the request in its prefix cache."""
        return await self._ask(self._decode.url, path, {**body, "cache_salt": f"alone-{self._dice.random()}"})

    async def _compare(self, name: str, path: str, body: dict[str, Any]) -> None:
        self.asked += 1
        found = await self._ask(self._url, path, body)
        alone = await self._alone(path, body)
        if "status" in alone:
            self.notes.append(f"{name}: the decode server alone answers {alone['status']}: {alone['text'][:150]}")
        # How a proxy words what a server refuses is its own.
        if self._same(found, alone) or ("status" in found and "status" in alone):
            self.equal += 1
        else:
            self.notes.append(f"{name}: {json.dumps(found)[:300]} is not {json.dumps(alone)[:300]}")

    def _same(self, found: Any, alone: Any) -> bool:
        return _alike(found, alone) if self._stateful else bool(found == alone)

    async def _stops(self) -> None:
        """Answers that end before their longest, by a token and by a text in them."""
        for name in ("a token that stops", "a text that stops"):
            body = self._body()
            whole = (await self._alone(COMPLETIONS, body))["choices"][0]
            if name == "a token that stops":
                stop: dict[str, Any] = {"stop_token_ids": [whole["token_ids"][5]]}
            else:
                stop = {"stop": [whole["text"].split()[5]]}
            await self._compare(name, COMPLETIONS, {**body, **stop})

    async def _several(self) -> None:
        """Several prompts in a completion, the longest first. A proxy that asks one server after the other has the
        params of one of them only; the others must not get its cache. An error is no wrong answer."""
        self.asked += 1
        body = self._body()
        body["prompt"] = [body["prompt"], *(body["prompt"][length:] for length in (50, 100))]
        found, alone = await self._ask(self._url, COMPLETIONS, body), await self._alone(COMPLETIONS, body)
        if found == alone or "status" in found:
            self.equal += 1
        if "status" in found:
            self.notes.append(f"several prompts in a completion: refused: {found['text'][:100]}")
        elif found != alone:
            self.notes.append(f"several prompts in a completion: {json.dumps(found)[:300]} is not what they are alone")

    async def _adapter(self) -> None:
        """A LoRA adapter, and then the same prompt without it: neither may get the other's cache."""
        body = self._body()
        await self._compare("adapter", COMPLETIONS, {**body, "model": ADAPTER_NAME})
        await self._compare("the same without the adapter", COMPLETIONS, body)
        answers = [await self._alone(COMPLETIONS, {**body, "model": name}) for name in (ADAPTER_NAME, SERVED_NAME)]
        if answers[0] == answers[1] or "status" in answers[0]:
            self.equal -= 1
            self.notes.append("the adapter is not there or changes nothing, so that its requests show nothing")

    async def _crowd(self) -> None:
        """More requests at once than the decode server has blocks for, so that it preempts some."""
        bodies = [self._body(max_tokens=CROWD_TOKENS) for _ in range(CROWD)]
        before = [await self._preemptions(server) for server in (self._prefill, self._decode)]
        found = await asyncio.gather(*(self._ask(self._url, COMPLETIONS, body) for body in bodies))
        after = [await self._preemptions(server) for server in (self._prefill, self._decode)]
        self.asked += CROWD
        for number, body in enumerate(bodies):
            alone = await self._alone(COMPLETIONS, body)
            if found[number] == alone and "status" not in alone:
                self.equal += 1
            else:
                self.notes.append(f"of a crowd: {json.dumps(found[number])[:300]} is not {json.dumps(alone)[:300]}")
        prefill, decode = (int(end - begin) for begin, end in zip(before, after, strict=True))
        self.notes.append(f"of {CROWD} at once, the prefill server preempted {prefill}, the decode server {decode}")
        if not decode:
            self.equal -= 1

    async def _preemptions(self, server: Server) -> float:
        return total(await fetch_metrics(self._session, server.url), "vllm:num_preemptions_total")

    async def _streamed(self) -> None:
        for name, more in [("streamed", {}), ("streamed samples", {"n": 2, "temperature": 0.9, "seed": 3})]:
            await self._compare(name, COMPLETIONS, self._body(stream=True, **more))

    async def _left(self) -> None:
        """A client that leaves in the middle of its answer. Nothing of it may be left in either engine."""
        self.asked += 1
        body = self._body(stream=True, max_tokens=1000)
        async with self._session.post(f"{self._url}{COMPLETIONS}", json=body, timeout=LIMIT) as response:
            await response.content.readline()
        for _ in range(int(GONE_LIMIT_S)):
            left = [await self._busy(server) for server in (self._prefill, self._decode)]
            if left == [0, 0]:
                self.equal += 1
                return
            await asyncio.sleep(1)
        self.notes.append(f"a client that left: {left} requests are left in the engines after {GONE_LIMIT_S:.0f} s")

    async def _busy(self, server: Server) -> int:
        text = await fetch_metrics(self._session, server.url)
        return open_requests(text)


def _alike(found: Any, alone: Any) -> bool:
    """Whether two answers are equal, but for the rounding of numbers."""
    if isinstance(found, float) and isinstance(alone, float):
        return math.isclose(found, alone, rel_tol=0, abs_tol=ROUNDING)
    if isinstance(found, dict) and isinstance(alone, dict):
        return found.keys() == alone.keys() and all(_alike(found[key], alone[key]) for key in found)
    if isinstance(found, list) and isinstance(alone, list):
        return len(found) == len(alone) and all(map(_alike, found, alone))
    return bool(found == alone)


def _joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What the pieces of a stream add up to, by sample."""
    samples: dict[str, Any] = {}
    for choice in choices:
        sample = samples.setdefault(str(choice["index"]), {"text": "", "tokens": [], "reason": None})
        sample["text"] += choice.get("text") or ""
        sample["tokens"] += choice.get("token_ids") or []
        sample["reason"] = choice.get("finish_reason") or sample["reason"]
    return samples
