"""What a row of the fault matrix may do to its requests, servers and network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from lab.matrix.judge import Outcome, Verdict, judge_request
from lab.matrix.oracle import Oracle
from lab.matrix.pair import Pair
from lab.matrix.peers import POOL_TOKENS
from lab.servers.client import LIMIT_S, Answer, Prompt, body, post, prompt_of
from lab.servers.proxy import ASKED

SHORT, LONG = 600, 1500
"""Tokens of a prompt: five blocks of 128 tokens, and one whose read the slowed link makes last six seconds."""

OUTPUT_TOKENS = 24
_IN_THE_READ = 600_000
"""Bytes after which a read is under way: a tenth of a long prompt's, and far more than any handshake has."""

_FILLER = 1024
_BEGIN_LIMIT_S = 40.0


class CannotRun(Exception):
    """The row did not come to its fault or its end: it shows no more than the outcomes that it has noted."""


class Judged(Exception):
    """The row is over: the prefill that its fault is meant for failed, which is its outcome."""


@dataclass(frozen=True)
class Reference:
    """A prefill that waits to be fetched: what its proxy knows."""

    prompt: Prompt
    request_id: str
    params: dict[str, Any]

    def but(self, **params: Any) -> Reference:
        """The same with other params."""
        return replace(self, params={**self.params, **params})


def as_outcome(label: str, answer: Answer, expected: tuple[int, ...], count: int = 1) -> Outcome:
    """An answer, for the judge."""
    seconds = round(answer.seconds, 1)
    return Outcome(label, answer.status, answer.choices, expected, count, answer.error, answer.hung, seconds)


class Case:
    """One run of one row."""

    def __init__(self, name: str, pair: Pair, oracle: Oracle) -> None:
        self.name, self.pair, self.network, self._oracle = name, pair, pair.network, oracle
        self.outcomes: list[Outcome] = []
        self._prompts = 0

    def prompt(self, length: int = SHORT, max_tokens: int = OUTPUT_TOKENS) -> Prompt:
        """One that no engine has seen."""
        self._prompts += 1
        return prompt_of(f"{self.name}-{self._prompts}", length, max_tokens)

    async def prefill(
        self, prompt: Prompt, request_id: str | None = None, judged: bool = False, n: int = 1, **params: Any
    ) -> Reference:
        """Asks P. An error is an outcome of the row. `judged`: it is what comes of the fault, and the row is over;
        otherwise the row is not run."""
        name = request_id or f"{prompt.name}-request"
        # Said by the single server while nothing waits.
        expected = await self._oracle.tokens(prompt)
        request = {**body(prompt, n, kv_transfer_params={**ASKED, **params}), "max_tokens": 1}
        reply = await post(self.pair.session, self.pair.url("prefill"), request, name)
        if reply.error is None and not isinstance(reply.params, dict):
            # There is nothing to hand over: a proxy answers with an error.
            reply.error = "no kv_transfer_params in the prefill engine's answer"
        if reply.error is not None or reply.params is None:
            self.outcomes.append(as_outcome("prefill", reply, expected[:1]))
            if not judged:
                raise CannotRun(f"the prefill failed: {reply.error}")
            raise Judged
        return Reference(prompt, name, reply.params)

    async def decode(
        self,
        reference: Reference,
        label: str = "decode",
        limit_s: float = LIMIT_S,
        n: int = 1,
        first_token: asyncio.Event | None = None,
    ) -> Outcome:
        """Asks D, and notes what comes of it."""
        expected = await self._oracle.tokens(reference.prompt)
        more: dict[str, Any] = {"kv_transfer_params": reference.params}
        if first_token is not None:
            more["stream"] = True
        reply = await post(
            self.pair.session,
            self.pair.url("decode"),
            body(reference.prompt, n, **more),
            reference.request_id,
            limit_s,
            first_token.set if first_token is not None else None,
        )
        outcome = as_outcome(label, reply, expected, n)
        self.outcomes.append(outcome)
        return outcome

    async def hand_over(self, label: str = "hand-over", length: int = SHORT, **params: Any) -> Outcome:
        """Both requests of a new prompt, as a proxy sends them. A prefill that fails is its outcome."""
        try:
            reference = await self.prefill(self.prompt(length), judged=True, **params)
        except Judged:
            return self.outcomes[-1]
        return await self.decode(reference, label)

    async def works(self, label: str) -> None:
        """A hand-over that must be right: else the row did not come to its fault."""
        count = len(self.outcomes)
        outcome = await self.hand_over(label)
        if judge_request(outcome) is not Verdict.RIGHT:
            raise CannotRun(f"{label}: {judge_request(outcome).value}: {outcome.error}")
        del self.outcomes[count:]

    async def plain(self, role: str, label: str) -> None:
        """A request without hand-over, judged as the others."""
        prompt = self.prompt(100, 4)
        expected = await self._oracle.tokens(prompt)
        reply = await post(self.pair.session, self.pair.url(role), body(prompt), f"{prompt.name}-plain")
        self.outcomes.append(as_outcome(label, reply, expected))

    async def fill(self, role: str) -> None:
        """Other prompts go through all of an engine's pool: every block that is free has theirs afterwards."""
        for _ in range(POOL_TOKENS // _FILLER + 2):
            prompt = self.prompt(_FILLER, 1)
            reply = await post(self.pair.session, self.pair.url(role), body(prompt), f"{prompt.name}-fill", 4 * LIMIT_S)
            if reply.error is not None:
                self.outcomes.append(as_outcome(f"plain request to the {role} engine", reply, ()))
                raise CannotRun(f"a plain request to the {role} engine failed: {reply.error}")

    async def blocks_back(self, role: str) -> None:
        """Waits until an engine has freed what it kept. Where it does not, the row goes on, and the judge sees it."""
        await self.pair.drained(role)

    @contextlib.asynccontextmanager
    async def reading(self, reference: Reference, limit_s: float = LIMIT_S) -> AsyncIterator[None]:
        """Inside, D reads the reference over the slowed link, and is nowhere near its end.

        The link tells: so many bytes have left P's host since D was asked that the read has begun, and so few that
        seconds are left.
        """
        self.network.slow()
        start = self.network.bytes_from_prefill()
        work = asyncio.create_task(self.decode(reference, "read", limit_s))
        try:
            for _ in range(round(_BEGIN_LIMIT_S / 0.02)):
                if work.done() or self.network.bytes_from_prefill() - start > _IN_THE_READ:
                    break
                await asyncio.sleep(0.02)
            check_under_way(work, "the read")
            if self.network.bytes_from_prefill() - start <= _IN_THE_READ:
                raise CannotRun(f"no read began within {_BEGIN_LIMIT_S:.0f} s")
            yield
            await work
        finally:
            work.cancel()
            await asyncio.wait({work})
            self.network.restore()

    @contextlib.asynccontextmanager
    async def answering(self, reference: Reference, limit_s: float = LIMIT_S) -> AsyncIterator[asyncio.Task[Outcome]]:
        """Inside, D has given the first token of its answer, so that its load has ended well, and not yet the last.

        Gives the task of the request, which is awaited at the end.
        """
        first = asyncio.Event()
        work = asyncio.create_task(self.decode(reference, "decode", limit_s, first_token=first))
        begun = asyncio.create_task(first.wait())
        try:
            await asyncio.wait({work, begun}, return_when=asyncio.FIRST_COMPLETED)
            check_under_way(work, "the answer")
            yield work
            await work
        finally:
            for task in (work, begun):
                task.cancel()
            await asyncio.wait({work, begun})

    async def leave(self, reference: Reference) -> None:
        """A client that asks D and is gone when its read is under way."""
        expected = len(self.outcomes)
        with contextlib.suppress(_Left):
            async with self.reading(reference):
                raise _Left
        del self.outcomes[expected:]


def check_under_way(work: asyncio.Task[Outcome], words: str) -> None:
    """A request that a fault is meant for must not be over, be it well or with an error: nothing would be shown."""
    if work.done():
        raise CannotRun(f"{words} was over before its fault: {judge_request(work.result()).value}")


class _Left(Exception):
    """The client has gone."""
