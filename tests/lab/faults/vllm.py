"""Real vLLM servers that are killed and started again while requests run through them.

A prefill and a decode server with kvferry, a proxy, and a single server of the same model that says what the tokens
must be. In each round the prefill server is killed once and the decode server once, each by SIGKILL of its process
group, some milliseconds after a prefill was handed over. The one that was killed is started again with the same
command line, ports and engine id; nothing else is done. From round to round the decode server's
`kv_load_failure_policy` is `recompute` and `fail` in turn. After the rounds each server sleeps once in the middle of
its work and wakes up again, and at the end both are told to stop in the middle of theirs.
"""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.common import DEPS, make_folder
from lab.demo.options import Options as DemoOptions
from lab.demo.options import parse_options
from lab.demo.run import Setting, run_baseline
from lab.demo.workload import make_workload
from lab.faults.series import Options, Tally
from lab.servers import pair
from lab.servers.client import Answer, Prompt, complete, complete_through
from lab.servers.connectors import Connector
from lab.servers.metrics import fetch_metrics, totals_by
from lab.servers.model import make_model
from lab.servers.pair import GONE_WITHIN_S, KV_ROLES, ROLES, START_LIMIT_S, TIMED_OUT
from lab.servers.proxy import KvParams, Proxy, open_session
from lab.servers.server import Server, ServerGroup, ServerSpec
from lab.servers.specs import baseline_spec, engine_spec

POLICIES = ("recompute", "fail")
POOL = 24
BURST = 6
AFTER = 3
"""Prompts; those sent at once while a server is killed; those sent when it is back. A round takes all but a few of the
pool once, so that the decode server, which every round starts anew, has none of them in its own cache."""

ACT_WITHIN_S = 0.06
"""A load follows within so long of the prefill's answer: the fault falls before, into or after it."""

ENDS_WITHIN_S = 240.0
"""Longest time for a request, on a machine where a server may be starting beside it."""

DRAIN_LIMIT_S = 90.0
SHUTDOWN_S = 60
"""What a server may take to drain, which includes a lease that nobody asks for."""

# What a killed decode server had not read comes free after one lease. A prefill of the longest prompt takes less than
# a second, but the servers share two cores with one that starts.
TIMES = {
    "lease_ms": 20_000,
    "handshake_timeout_ms": 15_000,
    "transfer_timeout_ms": 60_000,
    "verdict_timeout_ms": 20_000,
}


@dataclass(frozen=True)
class FixedConnector(Connector):
    """kvferry with an engine id and a listener port that a server started again has too."""

    engine_id: str
    port: int
    policy: str

    def transfer_config(self, role: str, options: DemoOptions) -> dict[str, Any]:
        """The value of --kv-transfer-config."""
        return {
            "kv_connector": "KvferryConnector",
            "kv_role": role,
            "engine_id": self.engine_id,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"port": self.port, **TIMES},
        }


class Pair(pair.Pair):
    """The servers; `policy` is the decode server's."""

    policy = POLICIES[0]

    def spec(self, role: str) -> ServerSpec:
        """Without a time for its shutdown, vLLM kills its own processes at once."""
        policy = self.policy if role == "decode" else "fail"
        connector = FixedConnector(f"chaos-{role}", self.side_ports["prefill"], policy)
        found = engine_spec(KV_ROLES[role], self.setting.model, self.setting.options, connector, self.outputs)
        found.arguments += ["--shutdown-timeout", str(SHUTDOWN_S)]
        return found


ZEROS = (
    "wrong_tokens",
    "without_an_end",
    "failed_on_survivor",
    "failed_later",
    "faults_without_requests",
    "faults_without_failures",
    "blocks_held",
    "requests_open",
    "processes_left",
    "tracebacks",
)
"""What must not happen."""


class Series:
    """One run."""

    def __init__(self, setting: Setting, pair: Pair, baseline: dict[str, list[int]], seed: int) -> None:
        self.setting, self.pair, self.baseline = setting, pair, baseline
        self.dice = random.Random(seed)
        self.tally = Tally(*ZEROS)
        self.proxy = Proxy(pair.url("prefill"), pair.url("decode"))
        self.sent = 0
        self.fresh: list[Prompt] = []

    def shuffle(self) -> None:
        """All prompts may be sent again: the decode server is a new one."""
        self.fresh = list(self.setting.workload.checked)
        self.dice.shuffle(self.fresh)

    def take(self, count: int) -> list[Prompt]:
        """Prompts that the decode server has not seen."""
        taken, self.fresh = self.fresh[:count], self.fresh[count:]
        return taken

    def name(self, prompt: Prompt) -> str:
        """A request id that was not there before."""
        self.sent += 1
        return f"{prompt.name}-{self.sent}"

    async def ended(self, work: Any) -> Answer | None:
        """The answer, None if it does not come."""
        try:
            return await asyncio.wait_for(work, ENDS_WITHIN_S)
        except TIMED_OUT:
            return None

    async def through(self, prompts: list[Prompt]) -> list[tuple[str, Prompt, Answer | None]]:
        """Sends prompts through the proxy at once."""
        names = [self.name(prompt) for prompt in prompts]
        found = await asyncio.gather(
            *(
                self.ended(complete_through(self.setting.session, self.proxy, prompt, name))
                for name, prompt in zip(names, prompts, strict=True)
            )
        )
        return list(zip(names, prompts, found, strict=True))

    def right(self, name: str, prompt: Prompt, answer: Answer | None) -> bool:
        """Whether the answer is whole. Wrong tokens count even where it is not."""
        self.tally.figures["requests"] += 1
        if answer is None:
            self.tally.bad("without_an_end", f"{name} has not ended after {ENDS_WITHIN_S:.0f} s")
            return False
        wanted = self.baseline[prompt.name]
        if answer.tokens != wanted[: len(answer.tokens)]:
            self.tally.bad("wrong_tokens", f"{name}: {answer.tokens}, expected {wanted}")
        return answer.error is None and len(answer.tokens) == len(wanted)

    async def later(self) -> None:
        """With both servers up again, everything must be right."""
        for name, prompt, answer in await self.through(self.take(AFTER)):
            if self.right(name, prompt, answer):
                self.tally.figures["right_later"] += 1
            else:
                self.tally.bad("failed_later", f"{name}: {answer and (answer.error or len(answer.tokens))}")

    async def burst(
        self, act: Callable[[], Awaitable[None]], hold: bool = False
    ) -> list[tuple[str, Prompt, Answer | None]]:
        """Sends prompts at once, and acts some milliseconds after one of their prefills. `hold`: the decode server gets
        that one only then."""
        at, delay = self.dice.randrange(1, BURST), self.dice.uniform(0, ACT_WITHIN_S)
        handed_over, due, acted = 0, asyncio.Event(), asyncio.Event()

        async def watch(request: str, params: KvParams) -> KvParams:
            nonlocal handed_over
            handed_over += 1
            if handed_over == at:
                due.set()
                if hold:
                    await acted.wait()
            return params

        async def act_then() -> None:
            await due.wait()
            await asyncio.sleep(delay)
            still_open = sum(not work.done() for work in bursting)
            self.tally.figures["open_at_faults"] += still_open
            if not still_open:
                self.tally.bad("faults_without_requests", "all requests of a burst had ended")
            await act()
            acted.set()

        self.proxy.exchange = watch
        prompts = self.take(BURST)
        bursting = [asyncio.create_task(self.through([prompt])) for prompt in prompts]
        acting = asyncio.create_task(act_then())
        found = await asyncio.gather(*bursting)
        # Where too few prefills succeeded: what is to be done is done all the same.
        due.set()
        await acting
        self.proxy.exchange = None
        return [entry for part in found for entry in part]

    async def kill(self, role: str) -> None:
        """SIGKILL to all processes of a server."""
        await self.pair.kill(role)
        self.tally.figures["kills"] += 1

    async def while_it_starts(self, survivor: str, started: Server) -> None:
        """Waits for `started`; the other server answers plain requests meanwhile."""
        begin = time.monotonic()
        waiting = asyncio.create_task(self.pair.servers.wait_ready([started], self.setting.session, START_LIMIT_S))
        while True:
            prompt = self.dice.choice(self.setting.workload.checked[:AFTER])
            name = self.name(prompt)
            answer = await self.ended(complete(self.setting.session, self.pair.url(survivor), prompt, name))
            if self.right(name, prompt, answer):
                self.tally.figures["right_on_survivor_alone"] += 1
            else:
                self.tally.bad("failed_on_survivor", f"{name} on {survivor}: {answer and answer.error}")
            done, _ = await asyncio.wait({waiting}, timeout=2.0)
            if done:
                break
        await waiting
        self.tally.seconds.append(round(time.monotonic() - begin, 1))

    async def kill_prefill(self) -> None:
        """The decode server must bring what it has to an end, by its policy. At least one load fails."""
        before = await self.loads_failed()
        for name, prompt, answer in await self.burst(lambda: self.kill("prefill"), hold=True):
            if self.right(name, prompt, answer) or answer is None:
                self.tally.figures["right_at_kill"] += answer is not None
            elif not self.proxy.record(name).prefilled.is_set():
                self.tally.figures["lost_with_killed_server"] += 1
            elif self.pair.policy == "fail" and _is_clean(answer):
                self.tally.figures["clean_errors"] += 1
            else:
                self.tally.bad("failed_on_survivor", f"{name} under {self.pair.policy}: {answer.error}")
        grown = await self.loads_failed() - before
        self.tally.causes += grown
        if not grown:
            self.tally.bad("faults_without_failures", "no load failed when the prefill server was killed")
        if self.pair.policy == "recompute":
            self.tally.figures["recomputed"] += grown.total()
        await self.while_it_starts("decode", self.pair.launch("prefill"))
        await self.later()

    async def kill_decode(self, next_policy: str) -> None:
        """The prefill server must go on; what it keeps for the dead server is freed by the lease."""
        for name, prompt, answer in await self.burst(lambda: self.kill("decode")):
            if self.right(name, prompt, answer) or answer is None:
                self.tally.figures["right_at_kill"] += answer is not None
            elif self.proxy.record(name).prefilled.is_set():
                self.tally.figures["lost_with_killed_server"] += 1
            else:
                self.tally.bad("failed_on_survivor", f"{name}: {answer.error}")
        self.shuffle()
        self.pair.policy = next_policy
        await self.while_it_starts("prefill", self.pair.launch("decode"))
        await self.later()

    async def sleep(self, role: str) -> None:
        """vLLM's sleep: all that the server has is aborted, and what comes now waits until it wakes up."""
        for path in ("sleep?level=1", "wake_up"):
            async with self.setting.session.post(f"{self.pair.url(role)}/{path}") as answer:
                if answer.status != 200:
                    text = (await answer.text())[:200]
                    self.tally.bad("failed_on_survivor", f"{path} on {role}: {answer.status} {text}")
        self.tally.figures["sleeps"] += 1

    async def sleep_each(self) -> None:
        """One server after the other sleeps in the middle of a burst, and wakes up."""
        for role in ("decode", "prefill"):
            for name, prompt, answer in await self.burst(functools.partial(self.sleep, role)):
                if self.right(name, prompt, answer) or answer is None:
                    self.tally.figures["right_at_sleep"] += answer is not None
                elif answer.error is None if role == "decode" else not self.proxy.record(name).prefilled.is_set():
                    self.tally.figures["aborted_by_sleep"] += 1
                else:
                    self.tally.bad("failed_on_survivor", f"{name} at the sleep of {role}: {answer.error}")
            await self.later()
            # The decode server's cache was dropped when it slept.
            self.shuffle()

    async def stop_in_a_burst(self) -> None:
        """Both servers are told to end in the middle of a burst: what they have may fail, but not be wrong."""

        async def stop() -> None:
            left, tracebacks = await stop_in_order(self.pair.servers, list(self.pair.running.values()))
            for text in left:
                self.tally.bad("processes_left", text)
            for text in tracebacks:
                self.tally.bad("tracebacks", text)

        for name, prompt, answer in await self.burst(stop):
            self.tally.figures["right_at_stop"] += self.right(name, prompt, answer)

    async def loads_failed(self) -> Counter[str]:
        """The decode server's failed loads so far, by cause."""
        text = await fetch_metrics(self.setting.session, self.pair.url("decode"))
        found = totals_by(text, "vllm:kvferry_recv_failures_total", "cause")
        return Counter({cause: int(count) for cause, count in found.items()})

    async def usage(self, role: str) -> tuple[float, float]:
        """Open requests, and the share of the KV cache in use."""
        await self.pair.plain(role, ENDS_WITHIN_S)
        return await self.pair.in_use(role)

    async def drained(self, start: dict[str, tuple[float, float]]) -> None:
        """Waits until both servers have no request and no block in use beyond the start's."""
        deadline = time.monotonic() + DRAIN_LIMIT_S
        for role in ROLES:
            while True:
                left, used = await self.usage(role)
                self.tally.figures[f"{role}_cache_usage_start_ppm"] = round(start[role][1] * 1e6)
                self.tally.figures[f"{role}_cache_usage_end_ppm"] = round(used * 1e6)
                if (left, used) <= start[role]:
                    break
                if time.monotonic() > deadline:
                    self.tally.bad("requests_open", f"{left:.0f} on {role}", int(left))
                    self.tally.bad("blocks_held", f"cache usage {used} on {role}", int(used > start[role][1]))
                    break
                await asyncio.sleep(1.0)


def _is_clean(answer: Answer) -> bool:
    """Whether the decode server itself said that the request failed, before any token."""
    text = answer.error or ""
    return not answer.tokens and "server behind the proxy" not in text and (text.startswith(("HTTP 5", "{")))


def _seconds(values: list[float]) -> str:
    return f"{min(values)} to {max(values)}" if values else "none"


async def _run(options: Options, folder: Path) -> dict[str, Any]:
    model, workload = make_model("llama", DEPS / "models"), make_workload(POOL)
    servers = ServerGroup(folder)
    try:
        async with open_session() as session:
            setting = Setting(parse_options([]), model, workload, folder, servers, session)
            pair = Pair(setting)
            single = servers.start(baseline_spec(model, setting.options))
            await servers.wait_ready([single, *map(pair.launch, ROLES)], session, START_LIMIT_S)
            baseline = await run_baseline(setting, single)
            servers.stop([single])
            series = Series(setting, pair, baseline, options.seed)
            await series.proxy.start()
            try:
                await _rounds(series, options)
            finally:
                await series.proxy.stop()
            tally = series.tally
    finally:
        servers.stop()
    return {
        "zeros": tally.zeros,
        **dict(sorted(tally.figures.items())),
        "failed_loads_by_cause": dict(sorted(tally.causes.items())),
        "restart_to_ready_s": _seconds(tally.seconds),
        "notes": tally.notes,
    }


async def _rounds(series: Series, options: Options) -> None:
    start = {role: await series.usage(role) for role in ROLES}
    series.shuffle()
    for number in range(options.rounds):
        await series.kill_prefill()
        await series.kill_decode(POLICIES[(number + 1) % len(POLICIES)])
        options.progress(number + 1, options.rounds)
    await series.sleep_each()
    await series.drained(start)
    series.shuffle()
    await series.stop_in_a_burst()


def run(options: Options) -> dict[str, Any]:
    """The series' figures; what must not happen is under `zeros`."""
    return asyncio.run(_run(options, make_folder("chaos", "vllm-")))


async def stop_in_order(servers: ServerGroup, running: list[Server]) -> tuple[list[str], list[str]]:
    """Ends servers as an operator does, with SIGTERM to the first process of each.

    Returns what processes are left after `GONE_WITHIN_S`, and tracebacks of engines and workers in the servers' last
    logs. (vLLM's API server logs one of its own, `EngineDeadError`, where its engine has ended before it.)
    """
    for server in running:
        server.child.signal_first(signal.SIGTERM)
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := servers.left()) and time.monotonic() < deadline:
        for server in running:
            server.child.wait(0.01)
        await asyncio.sleep(0.1)
    tracebacks = [
        f"{server.name}: {line}"
        for server in running
        for line in server.log.read_text(errors="replace").splitlines()
        if "Traceback (most recent call last)" in line and not line.startswith("(APIServer")
    ]
    return [f"process {pid} after the servers' shutdown" for pid in left], tracebacks
