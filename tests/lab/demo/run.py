"""The demo's run: baseline, then prefill and decode with each connector, then the verdict."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from lab.common import DEPS, make_folder, say
from lab.demo.cache_check import CacheCheck, block_sizes, check_prompt
from lab.demo.options import JUDGED_BY_BYTES, Options, Shape, parse_options
from lab.demo.report import (
    Receive,
    Result,
    Row,
    format_comparison,
    format_rows,
    joined,
    read_receives,
    read_traces,
    unseen_transfers,
)
from lab.demo.shapes import run_matrix
from lab.demo.verdict import (
    check_aborted,
    check_cache_control,
    check_control,
    check_counters,
    check_drained,
    served_tokens_note,
)
from lab.demo.workload import Workload, make_workload
from lab.servers.client import Answer, Prompt, complete, complete_through
from lab.servers.connectors import CONNECTORS, Selectable
from lab.servers.metrics import fetch_metrics, parse_counters
from lab.servers.model import make_model
from lab.servers.proxy import KvParams, Proxy, open_session
from lab.servers.server import Server, ServerFailed, ServerGroup, available_gib
from lab.servers.specs import Outputs, baseline_spec, engine_spec, memory_gib

# Kept free when the baseline runs beside the other servers.
SPARE_GIB = 2.0
BASELINE_PARALLEL = 4
ENDING_LIMIT_S = 30.0
TRACE_LIMIT_S = 30.0
WARM_UP_ATTEMPTS = 5
IDLE_S = 10.0
"""How long the engines are watched without a request."""


@dataclass
class Setting:
    """What all parts of a run share."""

    options: Options
    model: Path
    workload: Workload
    folder: Path
    servers: ServerGroup
    session: aiohttp.ClientSession

    @property
    def ranks(self) -> tuple[int, int]:
        """The prefill engine's and the decode engine's."""
        return self.options.prefill.ranks, self.options.decode.ranks


async def run_baseline(setting: Setting, server: Server) -> dict[str, list[int]]:
    """The greedy tokens of a single server for every prompt, after checking that they depend on the whole prompt."""
    workload = setting.workload
    prompts = [*workload.checked, *workload.control, *(prompt for pair in workload.probes for prompt in pair)]
    say(f"baseline: {len(prompts)} prompts")
    gate = asyncio.Semaphore(BASELINE_PARALLEL)

    async def one(prompt: Prompt) -> tuple[str, list[int]]:
        async with gate:
            answer = await complete(setting.session, server.url, prompt, f"base-{prompt.name}")
        if answer.error is not None or len(answer.tokens) != prompt.max_tokens:
            raise ServerFailed(
                f"the baseline server gave {len(answer.tokens)} of {prompt.max_tokens} tokens for {prompt.name}: "
                f"{answer.error or 'no error said'}; its log is {server.log}"
            )
        return prompt.name, answer.tokens

    tokens = dict(await asyncio.gather(*(one(prompt) for prompt in prompts)))
    for first, second in workload.probes:
        if tokens[first.name] == tokens[second.name]:
            raise ServerFailed(
                f"the model ignores the first of {len(first.tokens)} tokens: its output would hide wrong KV blocks"
            )
    lengths = ", ".join(str(len(first.tokens)) for first, _ in workload.probes)
    say(f"baseline: done; a changed first token changes the output of prompts of {lengths} tokens")
    return tokens


async def warm_up(setting: Setting, servers: tuple[Server, ...]) -> None:
    """A plain request to each engine."""
    prompt = setting.workload.warm_up
    for server in servers:
        answer = await complete(setting.session, server.url, prompt, f"warm-{server.name}")
        if answer.error is not None:
            raise ServerFailed(f"the {server.name} server failed its warm-up request: {answer.error}\n{server.tail()}")


async def first_hand_over(setting: Setting, connector: Selectable, proxy: Proxy, result: Result) -> None:
    """One hand-over before those that count, repeated while it fails, which it must not with `warm_up` unset."""
    for attempt in range(WARM_UP_ATTEMPTS):
        name = f"warm-{attempt}"
        answer = await complete_through(setting.session, proxy, setting.workload.warm_up, name)
        if answer.error is None:
            break
        if not connector.warm_up:
            result.failures.append(f"the first hand-over failed: {answer.error[:200]}")
    else:
        raise ServerFailed(f"{WARM_UP_ATTEMPTS} hand-overs failed before the first one that counts: {answer.error}")
    result.first_handover_ms = proxy.record(name).handover_ms
    failed = f"after {attempt} that failed" if attempt else "at the first attempt"
    result.notes.append(
        f"each engine got a plain request first; a hand-over that is not among those counted succeeded {failed}"
    )


async def send_waves(setting: Setting, proxy: Proxy, decode: Server, result: Result) -> dict[str, Answer]:
    """Sends all waves through the proxy, and checks the decode server's counters after each."""
    answers: dict[str, Answer] = {}
    waves = setting.workload.waves
    start = before = parse_counters(await fetch_metrics(setting.session, decode.url))
    for number, wave in enumerate(waves, 1):
        begin = time.monotonic()
        found = await asyncio.gather(
            *(complete_through(setting.session, proxy, prompt, prompt.name) for prompt in wave)
        )
        for prompt, answer in zip(wave, found, strict=True):
            answers[prompt.name] = answer
        names = " ".join(prompt.name for prompt in wave)
        say(f"  wave {number}/{len(waves)}: {names} ({time.monotonic() - begin:.1f} s)")
        after = parse_counters(await fetch_metrics(setting.session, decode.url))
        result.failures += check_counters(wave, answers, after.since(before))
        before = after
    result.notes.append(served_tokens_note(before.since(start)))
    return answers


async def send_control(setting: Setting, proxy: Proxy) -> dict[str, Answer]:
    """Sends the two control prompts, each decoded with the other's KV blocks."""
    names = tuple(prompt.name for prompt in setting.workload.control)
    found: dict[str, KvParams] = {}
    complete_pair = asyncio.Event()

    async def exchange(request_id: str, params: KvParams) -> KvParams:
        found[request_id] = params
        if len(found) == len(names):
            complete_pair.set()
        await complete_pair.wait()
        given = found[names[1] if request_id == names[0] else names[0]]
        # By which a decode engine with kvferry knows that it is another prompt's.
        return {key: value for key, value in given.items() if key != "remote_prompt_digest"}

    proxy.exchange = exchange
    try:
        work = [
            asyncio.create_task(complete_through(setting.session, proxy, prompt, prompt.name))
            for prompt in setting.workload.control
        ]
        # When one fails before its exchange, the other must not wait for it for ever.
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        complete_pair.set()
        for name in names:
            found.setdefault(name, {})
        answers = await asyncio.gather(*work)
    finally:
        proxy.exchange = None
    return dict(zip(names, answers, strict=True))


def receive_of(receives: dict[str, Receive], prompt: Prompt) -> Receive:
    """The figures of a prompt's receive."""
    # vLLM's own request id is the given one between a prefix, an index and a random suffix.
    found = (value for key, value in receives.items() if key.startswith(f"cmpl-{prompt.name}-"))
    return next(found, Receive(None, None, None))


async def all_receives(
    setting: Setting, connector: Selectable, answers: dict[str, Answer], log: Path
) -> dict[str, Receive]:
    """The receives that the decode engine's ranks have traced, by vLLM's request id."""
    if not connector.is_kvferry:
        return read_receives(log)
    # Traces are written behind the answers.
    answered = [prompt for prompt in setting.workload.checked if answers[prompt.name].error is None]
    deadline = time.monotonic() + TRACE_LIMIT_S
    while True:
        receives = read_traces(log)
        whole = all(receive_of(receives, prompt).ranks >= setting.options.decode.ranks for prompt in answered)
        if whole or time.monotonic() > deadline:
            return receives
        await asyncio.sleep(0.5)


def make_rows(
    setting: Setting,
    proxy: Proxy,
    answers: dict[str, Answer],
    baseline: dict[str, list[int]],
    receives: dict[str, Receive],
) -> list[Row]:
    """One row per checked prompt."""
    rows = []
    for prompt in setting.workload.checked:
        answer = answers[prompt.name]
        receive = receive_of(receives, prompt)
        rows.append(
            Row(
                name=prompt.name,
                prompt_tokens=len(prompt.tokens),
                blocks=receive.blocks,
                bytes=receive.bytes,
                transfer_ms=receive.transfer_ms,
                handover_ms=proxy.record(prompt.name).handover_ms,
                first_token_ms=proxy.record(prompt.name).first_token_ms,
                equal=answer.error is None and answer.tokens == baseline[prompt.name],
                error=" ".join((answer.error or "").split())[:160],
            )
        )
    return rows


async def with_cache(setting: Setting, row: Row, dump: Path) -> Row:
    """The row with the comparison of the cache; a request that failed has none to compare."""
    if row.error:
        return replace(row, cache=CacheCheck(problem="the request failed"))
    return replace(row, cache=await check_prompt(dump, row.name, row.name, *setting.ranks))


async def run_connector(
    setting: Setting,
    connector: Selectable,
    prefill: Server,
    decode: Server,
    baseline: dict[str, list[int]],
    outputs: Outputs,
) -> Result:
    """Everything that is sent with one connector, and its verdict."""
    options, session = setting.options, setting.session
    result = Result(connector.name, tokens_count=options.model not in JUDGED_BY_BYTES)
    proxy = Proxy(prefill.url, decode.url, connector.at_once)
    await proxy.start()
    try:
        # Side by side all get the same: the counted hand-overs come after the first one, which is shown by itself.
        if connector.warm_up or options.compare:
            await warm_up(setting, (prefill, decode))
            await first_hand_over(setting, connector, proxy, result)
        else:
            result.notes.append("no warm-up: the first prompt met both engines cold")
        say(f"{connector.name}: {len(setting.workload.checked)} prompts and 2 that are aborted")
        answers = await send_waves(setting, proxy, decode, result)
        result.failures += check_aborted(setting.workload, answers)
        receives = await all_receives(setting, connector, answers, outputs.receives)
        result.rows = make_rows(setting, proxy, answers, baseline, receives)
        if connector.is_kvferry:
            result.failures += unseen_transfers(result.rows)
        if options.check_bytes:
            result.rows = [await with_cache(setting, row, outputs.dump) for row in result.rows]
            result.notes.append(
                f"tokens per block: {block_sizes(outputs.dump, 'sent')} in the prefill engine, "
                f"{block_sizes(outputs.dump, 'received')} in the decode engine"
            )
        if options.negative_control:
            control = await send_control(setting, proxy)
            if result.tokens_count:
                check_control(setting.workload, control, baseline, result)
            if options.check_bytes:
                await check_cache_control(setting.workload, outputs.dump, setting.ranks, result)
        await check_drained(session, (prefill, decode), result)
    except aiohttp.ClientError as problem:
        raise await explain(problem, (prefill, decode)) from problem
    finally:
        await proxy.stop()
    for server in (prefill, decode):
        server.check_alive()
    return result


async def explain(problem: aiohttp.ClientError, servers: tuple[Server, ...]) -> ServerFailed:
    """Why a server could not be reached: the end of the log of the one that died, else of all.

    A server whose engine dies closes its port first and ends some time later.
    """
    deadline = time.monotonic() + ENDING_LIMIT_S
    while time.monotonic() < deadline:
        try:
            for server in servers:
                server.check_alive()
        except ServerFailed as failure:
            return failure
        await asyncio.sleep(0.5)
    tails = "\n".join(f"the end of {server.log}:\n{server.tail()}" for server in servers)
    return ServerFailed(f"a server does not answer: {problem}\n{tails}")


def show(result: Result) -> None:
    """Prints a run's table and verdict."""
    print(f"\nconnector: {result.connector}")
    print(format_rows(result.rows))
    summary = result.as_json()["summary"]
    print(f"hand-over p50 {summary['handover_p50_ms']} ms, max {summary['handover_max_ms']} ms")
    for note in result.notes:
        print(f"- {note}")
    for failure in result.failures:
        print(f"FAILED: {failure}")
    unequal = sum(not row.equal for row in result.rows)
    if unequal and result.tokens_count:
        print(f"FAILED: {unequal} of {len(result.rows)} prompts differ from the baseline")
    elif unequal:
        print(f"- {unequal} of {len(result.rows)} prompts have other tokens than the baseline, which is not judged")
    wrong = sum(row.cache is not None and not row.cache.equal for row in result.rows)
    if wrong:
        print(f"FAILED: the cache of {wrong} of {len(result.rows)} prompts is not the prefill engine's")
    print("passed" if result.passed else "not passed", flush=True)


async def idle_cpus(servers: ServerGroup, engines: tuple[Server, ...]) -> float:
    """Processors that all processes of `engines` use while nothing is asked of them."""
    begin, used = time.monotonic(), servers.cpu_s(engines)
    await asyncio.sleep(IDLE_S)
    return (servers.cpu_s(engines) - used) / (time.monotonic() - begin)


def write_json(options: Options, value: Any) -> None:
    """Writes the file of --json, if there is to be one."""
    if options.json is not None:
        options.json.write_text(json.dumps(value, indent=1) + "\n")


async def run(options: Options, folder: Path) -> int:
    """The whole run; the exit status."""
    model = make_model(options.model, DEPS / "models")
    workload = make_workload(options.requests)
    say(f"model: {model.name}; logs: {folder}")
    servers = ServerGroup(folder)
    try:
        async with open_session() as session:
            setting = Setting(options, model, workload, folder, servers, session)
            return await _run_all(setting)
    except ServerFailed as problem:
        say(f"error: {problem}")
        write_json(options, {"error": str(problem)})
        return 1
    finally:
        servers.stop()


async def _run_all(setting: Setting) -> int:
    options = setting.options
    need = memory_gib(Shape()) + memory_gib(options.prefill) + memory_gib(options.decode) + SPARE_GIB
    together = available_gib() >= need
    single = setting.servers.start(baseline_spec(setting.model, options))
    baseline: dict[str, list[int]] | None = None
    results: list[Result] = []
    for turn, name in enumerate(options.connectors):
        connector = CONNECTORS[name]
        outputs = Outputs(setting.folder / f"receives-{turn}-{name}.jsonl", setting.folder / f"cache-{name}")
        if baseline is None and not together:
            say("starting the baseline server alone: there is not enough memory for it and two engines")
            await setting.servers.wait_ready([single], setting.session, options.start_limit)
            baseline = await run_baseline(setting, single)
            setting.servers.stop([single])
        prefill, decode = (
            setting.servers.start(engine_spec(role, setting.model, options, connector, outputs))
            for role in ("kv_producer", "kv_consumer")
        )
        say(f"starting servers for {name}: prefill {options.prefill}, decode {options.decode}")
        ready = [prefill, decode] if baseline is not None else [single, prefill, decode]
        await setting.servers.wait_ready(ready, setting.session, options.start_limit)
        if baseline is None:
            baseline = await run_baseline(setting, single)
            setting.servers.stop([single])
        result = await run_connector(setting, connector, prefill, decode, baseline, outputs)
        if options.compare:
            result.idle_cpus = await idle_cpus(setting.servers, (prefill, decode))
        setting.servers.stop([prefill, decode])
        # Up to 14 MiB per prompt and rank.
        shutil.rmtree(outputs.dump, ignore_errors=True)
        for server in (prefill, decode):
            os.rename(server.log, server.log.with_name(f"{server.name}-{turn}-{name}.log"))
        show(result)
        results.append(result)
    results = joined(results)
    if options.compare:
        print("\n" + format_comparison(results))
    found = [result.as_json() for result in results]
    write_json(options, found if options.compare else found[0])
    return 0 if all(result.passed for result in results) else 1


def main(arguments: list[str]) -> int:
    """Runs the demo; the exit status."""
    options = parse_options(arguments)
    folder = make_folder("demo")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.matrix:
            return run_matrix(options, folder)
        return asyncio.run(run(options, folder))
    except KeyboardInterrupt:
        say("interrupted; all servers are ended")
        return 130
