"""Reads vLLM's Prometheus counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


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


def _samples(text: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of every sample of `name`."""
    for family in text_string_to_metric_families(text):
        yield from ((sample.labels, sample.value) for sample in family.samples if sample.name == name)


def total(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of `name` that carry `labels`, 0 where there is none."""
    return sum(value for found, value in _samples(text, name) if labels.items() <= found.items())


def totals_by(text: str, name: str, label: str) -> dict[str, float]:
    """The samples of `name` that are not 0, summed by the value of `label`."""
    result: dict[str, float] = {}
    for found, value in _samples(text, name):
        if value:
            result[found.get(label, "")] = result.get(found.get(label, ""), 0.0) + value
    return result


def open_requests(text: str) -> int:
    """How many requests the engine runs, and has waiting."""
    return int(total(text, "vllm:num_requests_running") + total(text, "vllm:num_requests_waiting"))


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
