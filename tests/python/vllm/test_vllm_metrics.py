"""Two real vLLM servers: every metric is at their /metrics, and not zero where something happened; the log has its
lines, and the trace the requests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvferry import stats, trace
from kvferry.vllm.stats import PREFIX
from lab.demo.options import Options, parse_options
from lab.servers.model import make_model
from lab.servers.proxy import open_session
from lab.servers.server import Server, ServerGroup, ServerSpec, available_gib
from lab.servers.specs import Outputs, engine_spec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[3]
DEPS = ROOT / ".deps"
GENEROUS = 240.0
"""Seconds that anything may take on a busy machine. No test waits so long when all goes well."""
NEEDED_GIB = 8.0
METRICS = [metric for metric in stats.metrics() if metric.scope == "worker"]


class Kvferry:
    """The connector as `lab.servers.connectors.Connector` gives it to servers, with a short lease: one that runs out in
    seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arguments(self, role: str, options: Options) -> list[str]:
        extra = {"port": 0, "lease_ms": 20_000 if role == "kv_producer" else 30_000}
        config: dict[str, Any] = {"kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.vllm"}
        config |= {"kv_role": role, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
        return ["--kv-transfer-config", json.dumps(config)]

    def environment(self, role: str, options: Options, request_log: Path, dump: Path) -> dict[str, str]:
        paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        return {"KVFERRY_TRACE": str(self._folder / f"{role}-%p.json"), "PYTHONPATH": os.pathsep.join(paths)}


class Servers:
    """A prefill and a decode server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.group = folder, ServerGroup(folder)
        self.prefill, self.decode = (self.group.start(self._spec(role)) for role in ("kv_producer", "kv_consumer"))
        self.names = 0

    def _spec(self, role: str) -> ServerSpec:
        model = make_model("llama", DEPS / "models")
        outputs = Outputs(self.folder / "receives.jsonl", self.folder / "dump")
        connector: Any = Kvferry(self.folder)
        return engine_spec(role, model, parse_options([]), connector, outputs)

    async def start(self) -> None:
        async with open_session() as session:
            await self.group.wait_ready((self.prefill, self.decode), session, GENEROUS)

    async def ask(self, server: Server, words: list[int], params: dict[str, Any], tokens: int) -> dict[str, Any]:
        """A completion's answer."""
        body = {"model": "demo", "prompt": words, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        async with open_session() as session:
            url = f"{server.url}/v1/completions"
            async with session.post(url, json={**body, "kv_transfer_params": params}) as answer:
                found: dict[str, Any] = await answer.json()
                assert answer.status == 200, found
                return found

    async def prefilled(self, words: list[int]) -> dict[str, Any]:
        answer = await self.ask(self.prefill, words, {"do_remote_decode": True}, 1)
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params

    async def metrics(self, server: Server) -> dict[str, Metric]:
        timeout = aiohttp.ClientTimeout(total=GENEROUS)
        async with open_session() as session, session.get(f"{server.url}/metrics", timeout=timeout) as answer:
            families = text_string_to_metric_families(await answer.text())
            return {
                family.name: family
                for family in families
                if family.name.startswith(PREFIX) and not family.name.endswith("_created")
            }

    async def until(self, server: Server, enough: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The samples without labels but vLLM's own, by their short name and `cause`, once they are enough."""
        deadline = time.monotonic() + GENEROUS
        while True:
            values = {}
            for family in (await self.metrics(server)).values():
                for sample in family.samples:
                    if "le" not in sample.labels:
                        cause = sample.labels.get("cause")
                        name = sample.name.removeprefix(PREFIX)
                        values[f"{name} {cause}" if cause else name] = sample.value
            if enough(values):
                return values
            assert time.monotonic() < deadline, values
            await asyncio.sleep(0.5)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    if available_gib() < NEEDED_GIB:
        pytest.skip(f"two vLLM servers need {NEEDED_GIB} GiB of memory, {available_gib():.1f} are free")
    made = Servers(tmp_path_factory.mktemp("servers"))
    try:
        asyncio.run(made.start())
        yield made
    finally:
        made.group.stop()


def prompt(seed: int, count: int = 300) -> list[int]:
    return [(seed * 7919 + index * 31) % 200 + 10 for index in range(count)]


async def use(servers: Servers) -> None:
    """A hand-over, a prefill that is given back, one that nobody fetches, and one that fails."""
    words = prompt(1)
    await servers.ask(servers.decode, words, await servers.prefilled(words), 4)
    # Its prompt is in the decode engine's prefix cache now, but for its last block: a short one has all.
    again = prompt(1, 128)
    await servers.ask(servers.decode, again, await servers.prefilled(again), 4)
    await servers.prefilled(prompt(2))
    words = prompt(3)
    params = await servers.prefilled(words)
    with socket.socket() as probe:
        # Bound and not listening: connections are refused, and nobody else takes the port meanwhile.
        probe.bind(("127.0.0.1", 0))
        await servers.ask(
            servers.decode, words, {**params, "remote_port": probe.getsockname()[1], "remote_engine_id": "x"}, 4
        )


def test_every_metric_is_served_and_counts(servers: Servers) -> None:
    async def run() -> None:
        await use(servers)
        decode = await servers.until(
            servers.decode, lambda v: v["recvs_total"] >= 1 and v["recv_failures_total handshake_failed"] >= 1
        )
        prefill = await servers.until(servers.prefill, lambda v: v["sends_expired_total"] >= 1 and v["leases"] == 0)
        for server in (servers.prefill, servers.decode):
            families = await servers.metrics(server)
            assert set(families) == {PREFIX + metric.name for metric in METRICS}
            for metric in METRICS:
                family = families[PREFIX + metric.name]
                assert (family.type, family.documentation) == (metric.kind, metric.help)
                assert all({"model_name", "engine"} <= set(sample.labels) for sample in family.samples)
                if metric.kind == "histogram":
                    edges = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
                    assert edges == [*(bound / metric.divisor for bound in metric.bounds), float("inf")]
        for name in ("recvs", "bytes", "blocks", "operations", "handshakes", "handshake_failures"):
            assert decode[f"{name}_total"] > 0, name
        for metric in METRICS:
            if metric.kind == "histogram":
                assert decode[f"{metric.name}_count"] > 0, metric.name
                # A receive that was posted in one go took no time between its first and its last read.
                assert decode[f"{metric.name}_sum"] > 0 or metric.key == "posting_time", metric.name
        assert decode["recv_bytes_sum"] == decode["bytes_total"]
        for name in ("peers", "endpoints", "registered_bytes"):
            assert decode[name] > 0, name
            assert prefill[name] > 0, name
        for name in ("sends_granted", "sends_read", "sends_expired", "renewals"):
            assert prefill[f"{name}_total"] > 0, name
        ended = sum(prefill[f"sends_{how}_total"] for how in ("read", "released", "expired"))
        assert prefill["sends_granted_total"] == ended == 4

    asyncio.run(run())


def test_the_log_has_its_lines(servers: Servers) -> None:
    async def run() -> str:
        await use(servers)
        deadline = time.monotonic() + GENEROUS
        # vLLM's line of figures comes every 10 s.
        while "KV Transfer metrics: Receives=" not in (text := servers.decode.log.read_text(errors="replace")):
            assert time.monotonic() < deadline, servers.decode.tail()
            await asyncio.sleep(0.5)
        return text

    text = asyncio.run(run())
    (line, *_) = re.findall(r"KV Transfer metrics: (.*)", text)
    for name in (
        "Failed receives",
        "MB received",
        "P90 transfer time (ms)",
        "Avg hand-over time (ms)",
        "Sends granted",
    ):
        assert f"{name}=" in line, line
    # The library's own lines, by vLLM's handler and in its form.
    connected = re.findall(r"INFO .*connected to rank \(pp 0, tp 0\) of engine .*", text)
    assert connected
    for part in ("an engine of tp 1 x", "over ", "host memory is", "this engine is of tp 1 x"):
        assert part in connected[0], connected[0]
    assert re.search(r"WARNING .*was not received \(handshake_failed\)", text)


def test_the_trace_has_the_requests(servers: Servers) -> None:
    files = sorted(servers.folder.glob("kv_*.json"))
    assert len(files) == 2
    # Two processes write them.
    deadline = time.monotonic() + GENEROUS
    while (summary := trace.summarize(trace.read(files)))["sends"].get("read") != summary["received"]:
        assert time.monotonic() < deadline, summary
        time.sleep(0.1)
    assert summary["received"] > 0
    assert summary["damaged"] == 0
    assert {one["cause"] for one in summary["failures"]} == {"handshake_failed"}
    assert all(one["request"].startswith("cmpl-") for one in summary["slowest"])
