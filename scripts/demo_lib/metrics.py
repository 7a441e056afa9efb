"""Reads vLLM's Prometheus counters."""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Counters:
    """What a decode server says about the origin of its prompts' tokens, summed over engines."""

    queries: float = 0.0
    hits: float = 0.0
    external: float = 0.0
    local_hit: float = 0.0
    computed: float = 0.0

    def since(self, earlier: Counters) -> Counters:
        """The growth from `earlier` to this."""
        return Counters(
            self.queries - earlier.queries,
            self.hits - earlier.hits,
            self.external - earlier.external,
            self.local_hit - earlier.local_hit,
            self.computed - earlier.computed,
        )


def total(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of `name` that carry `labels`, 0 where there is none."""
    result = 0.0
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match["name"] != name:
            continue
        found = dict(_LABEL.findall(match["labels"] or ""))
        if all(found.get(key) == value for key, value in labels.items()):
            result += float(match["value"])
    return result


def totals_by(text: str, name: str, label: str) -> dict[str, float]:
    """The samples of `name` that are not 0, summed by the value of `label`."""
    result: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None and match["name"] == name and float(match["value"]):
            value = dict(_LABEL.findall(match["labels"] or "")).get(label, "")
            result[value] = result.get(value, 0.0) + float(match["value"])
    return result


def parse_counters(text: str) -> Counters:
    """The counters in an answer of /metrics."""
    source = "vllm:prompt_tokens_by_source_total"
    return Counters(
        queries=total(text, "vllm:external_prefix_cache_queries_total"),
        hits=total(text, "vllm:external_prefix_cache_hits_total"),
        external=total(text, source, source="external_kv_transfer"),
        local_hit=total(text, source, source="local_cache_hit"),
        computed=total(text, source, source="local_compute"),
    )


async def fetch_metrics(session: aiohttp.ClientSession, url: str) -> str:
    """The text of a server's /metrics."""
    async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=120)) as answer:
        answer.raise_for_status()
        text: str = await answer.text()
        return text
