"""Decides whether a run proved what it should."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from lab.demo.cache_check import check_prompt
from lab.demo.report import Result
from lab.demo.workload import Workload
from lab.servers.client import Answer, Prompt
from lab.servers.metrics import Counters, fetch_metrics, open_requests
from lab.servers.server import Server

# The decode engine computes the last token of each prompt itself, to have logits for the next one.
LAST_TOKEN = 1
_DRAIN_LIMIT_S = 120.0


def check_counters(wave: Sequence[Prompt], answers: dict[str, Answer], grown: Counters) -> list[str]:
    """What vLLM's counters on the decode server say against a wave's cache having come from outside.

    `grown` is by how much they grew in the wave. The tokens taken from outside must cover the wave's prompts but for
    what they share with earlier ones, together with the server's own cache all of them, and nothing but last tokens
    may have been computed.
    """
    names = " ".join(prompt.name for prompt in wave)
    whole = [prompt for prompt in wave if prompt.abort is None and answers[prompt.name].error is None]
    tokens = sum(len(prompt.tokens) - LAST_TOKEN for prompt in whole)
    shared = sum(prompt.shared for prompt in whole)
    failures = []
    if whole and (grown.hits <= 0 or grown.external < tokens - shared):
        failures.append(
            f"{names}: vLLM counts {grown.external:.0f} prompt tokens by external_kv_transfer on the decode server "
            f"({grown.hits:.0f} external cache hits), expected at least {tokens - shared}"
        )
    if grown.external + grown.local_hit < tokens:
        failures.append(
            f"{names}: vLLM counts {grown.external:.0f} prompt tokens by external_kv_transfer and "
            f"{grown.local_hit:.0f} by local_cache_hit on the decode server, expected at least {tokens} together"
        )
    if grown.computed > LAST_TOKEN * len(wave):
        failures.append(
            f"{names}: vLLM counts {grown.computed:.0f} prompt tokens computed on the decode server, expected at most "
            f"the last one of each of {len(wave)} prompts"
        )
    return failures


def check_aborted(workload: Workload, answers: dict[str, Answer]) -> list[str]:
    """A request whose client leaves early must not have failed by itself before."""
    return [
        f"{prompt.name}, whose client leaves early, failed before that: {error[:200]}"
        for wave in workload.waves
        for prompt in wave
        if prompt.abort is not None and (error := answers[prompt.name].error) is not None
    ]


def served_tokens_note(grown: Counters) -> str:
    """The counters in one line."""
    return (
        f"vLLM's counters on the decode server: {grown.external:.0f} prompt tokens by external_kv_transfer, "
        f"{grown.local_hit:.0f} from its own cache, {grown.computed:.0f} computed; external cache hits "
        f"{grown.hits:.0f} of {grown.queries:.0f}"
    )


def check_control(
    workload: Workload, answers: dict[str, Answer], baseline: dict[str, list[int]], result: Result
) -> None:
    """Both control prompts, decoded with foreign KV blocks, must have another output than the baseline's."""
    for prompt in workload.control:
        answer = answers[prompt.name]
        if answer.error is not None:
            result.failures.append(f"negative control: {prompt.name} failed: {answer.error[:200]}")
        elif answer.tokens == baseline[prompt.name]:
            result.failures.append(
                f"negative control: {prompt.name} has the baseline's output although it was decoded with another "
                "prompt's KV blocks: equality proves nothing here"
            )
        else:
            differing = sum(a != b for a, b in zip(answer.tokens, baseline[prompt.name], strict=True))
            result.notes.append(
                f"negative control: {prompt.name} with another prompt's KV blocks differs from the baseline in "
                f"{differing} of {len(answer.tokens)} tokens, as it must"
            )


async def check_drained(session: aiohttp.ClientSession, servers: Sequence[Server], result: Result) -> None:
    """No request may be left running or waiting on any server, the aborted ones included."""
    deadline = time.monotonic() + _DRAIN_LIMIT_S
    for server in servers:
        while True:
            text = await fetch_metrics(session, server.url)
            left = open_requests(text)
            if left == 0:
                break
            if time.monotonic() > deadline:
                result.failures.append(f"{left} requests are still open on the {server.name} server")
                break
            await asyncio.sleep(0.5)


async def check_cache_control(workload: Workload, folder: Path, ranks: tuple[int, int], result: Result) -> None:
    """The cache of both control prompts must be that of the other one and must differ from their own.

    `ranks` are the prefill and the decode engine's.
    """
    first, second = workload.control
    for prompt, other in ((first, second), (second, first)):
        foreign = await check_prompt(folder, other.name, prompt.name, *ranks)
        own = await check_prompt(folder, prompt.name, prompt.name, *ranks)
        if not foreign.equal:
            result.failures.append(
                f"negative control: {prompt.name} was given the KV blocks of {other.name}, but {foreign.differing} of "
                f"{foreign.compared} bytes differ from them" + (f": {foreign.problem}" if foreign.problem else "")
            )
        elif own.problem is not None or own.differing * 2 < own.compared:
            result.failures.append(
                f"negative control: with the KV blocks of {other.name}, {prompt.name} differs from its own cache in "
                f"only {own.differing} of {own.compared} bytes: equality proves nothing here"
            )
        else:
            result.notes.append(
                f"negative control: {prompt.name} got the bytes of {other.name}, and differs from its own in "
                f"{own.differing} of {own.compared} bytes, as it must"
            )
