"""Proxies of the field before real servers: `scripts/proxies`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import vllm

from lab.common import DEPS, ROOT, free_port, make_folder, say
from lab.process import Child
from lab.proxies.kinds import ADAPTER_NAME, Kinds
from lab.proxies.programs import AT_ONCE, HOST, PROGRAMS, STATEFUL, Place, Program, parse_options
from lab.servers.client import ask
from lab.servers.metrics import Counters, fetch_metrics, parse_counters
from lab.servers.model import ADAPTER_RANK, make_model, write_adapter
from lab.servers.proxy import Proxy, open_session
from lab.servers.server import Server, ServerFailed, ServerGroup, ServerSpec
from lab.servers.specs import base_arguments, server_environment

SOURCES = DEPS / "vllm-source"
START_LIMIT_S = 600.0
WARM_UPS = 5

FIRST_TOKENS, ANSWER_TOKENS, NEXT_TOKENS = 600, 200, 40
"""Of a conversation: its first prompt, each answer, and what the client adds for the next turn."""
STRIPPED = slice(20, 100)
"""What a client that strips reasoning leaves out of an answer."""
FEW_BLOCKS = 12
"""Of 256 tokens, or a state: room for the longest request, and for three of those that come at once until they grow."""
SINGLE_TOKENS = (40, 300, 900)
"""Prompts of requests that are no conversations."""


@dataclass
class Line:
    """A line of the table."""

    proxy: str
    what: str
    requests: int = 0
    equal: int = 0
    notes: list[str] = field(default_factory=list)


CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Servers:
    """The decode server, and prefill servers: one that is as ever, and one that passes for one with the push connector.
    Each starts when it is needed."""

    def __init__(self, options: argparse.Namespace, folder: Path, session: aiohttp.ClientSession) -> None:
        self._options, self._session = options, session
        self._group = ServerGroup(folder)
        self._model = make_model(options.model, DEPS / "models")
        self._stateful = options.model == STATEFUL
        self._template = folder / "chat.jinja"
        self._template.write_text(CHAT_TEMPLATE)
        self._adapter = write_adapter(folder / "adapter")
        self._running: dict[str, tuple[Server, Place]] = {}

    async def pair(self, as_push: bool) -> tuple[Server, Server, Place]:
        """A prefill and a decode server that answer."""
        names = ("prefill-as-push" if as_push else "prefill", "decode")
        new = [self._start(name, as_push) for name in names if name not in self._running]
        await self._group.wait_ready(new, self._session, START_LIMIT_S)
        (prefill, place), (decode, _) = (self._running[name] for name in names)
        return prefill, decode, dataclasses.replace(place, prefill=prefill.port, decode=decode.port)

    def stop(self) -> None:
        """Ends all."""
        self._group.stop()

    def _start(self, name: str, as_push: bool) -> Server:
        side = "decode" if name == "decode" else "prefill"
        place = Place(0, 0, 0, 0, f"{name}-engine", free_port(), free_port())
        # Conversations do not go on between engines of a model with states.
        extra: dict[str, Any] = {} if self._stateful else {"bidirectional_kv_xfer": True}
        if self._options.connector == "kvferry":
            extra |= {"port": place.listener}
            if side == "prefill":
                extra |= {"bootstrap_port": place.bootstrap, "push_dialect": as_push}
            config: dict[str, Any] = {"kv_connector": "KvferryConnector"}
            role = "kv_consumer" if side == "decode" else "kv_producer" if self._stateful else "kv_both"
        else:
            config = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
            role = "kv_producer" if side == "prefill" else "kv_consumer"
        policy = "recompute" if side == "prefill" else "fail"
        config |= {"engine_id": place.engine_id, "kv_role": role, "kv_load_failure_policy": policy}
        arguments = [*base_arguments(self._model), "--chat-template", str(self._template)]
        arguments += ["--scheduling-policy", "priority", "--enforce-eager"]
        if self._stateful:
            # As in `engines.py`; and so few blocks that requests are preempted.
            arguments += ["--no-enable-prefix-caching", "--num-gpu-blocks-override", str(FEW_BLOCKS)]
        else:
            arguments += ["--enable-lora", "--max-lora-rank", str(ADAPTER_RANK)]
            arguments += ["--lora-modules", f"{ADAPTER_NAME}={self._adapter}"]
        arguments += ["--kv-transfer-config", json.dumps({**config, "kv_connector_extra_config": extra})]
        environment = server_environment()
        if side == self._options.installed:
            paths = environment["PYTHONPATH"].split(os.pathsep)
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if Path(path).parent != SOURCES)
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = HOST
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(place.listener)
        server = self._group.start(ServerSpec(name, arguments, environment))
        self._running[name] = server, place
        return server


class Run:
    """A proxy before the two servers."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: tuple[Server, Server, Place],
        program: Program,
        folder: Path,
        name: str,
    ) -> None:
        self._session, self._program = session, program
        self._prefill, self._decode, place = servers
        self._place = dataclasses.replace(place, proxy=free_port(), metrics=free_port())
        self._dice = random.Random(name)
        self.url = f"http://{HOST}:{self._place.proxy}"
        self._name, self._log = name, folder / f"proxy-{name}.log"
        self._child: Child | None = None

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(10, 500) for _ in range(count)]

    async def start(self) -> None:
        """Starts the proxy and returns when a hand-over through it has succeeded. The stock connector's first may fail:
        its handshake has 5 s, which a cold engine may exceed."""
        environment = dict(os.environ)
        if self._program.path is None:
            command = [str(DEPS / "router" / "bin" / "vllm-router")]
            del environment["PYTHONPATH"]
        else:
            command = [sys.executable, str(SOURCES / vllm.__version__ / self._program.path)]
        command += self._program.arguments(self._place)
        self._child = Child.program(command, self._log, environment)
        for _ in range(120):
            if self._child.poll() is not None:
                raise ServerFailed(f"{self._name} ended:\n{self._log.read_text(errors='replace')[-2000:]}")
            try:
                await asyncio.get_running_loop().create_connection(asyncio.Protocol, HOST, self._place.proxy)
                break
            except OSError:
                await asyncio.sleep(0.5)
        else:
            raise ServerFailed(f"{self._name} does not listen at port {self._place.proxy}; its log is {self._log}")
        for attempt in range(WARM_UPS):
            try:
                await ask(self._session, self.url, self._tokens(64), 4)
                return
            except ServerFailed as error:
                say(f"  the first hand-over failed (attempt {attempt + 1}): {str(error)[:200]}")
        raise ServerFailed(f"{WARM_UPS} hand-overs through {self._name} failed; its log is {self._log}")

    def stop(self) -> None:
        """Ends the proxy."""
        if self._child is not None:
            self._child.stop(20)

    async def _counters(self, server: Server) -> Counters:
        return parse_counters(await fetch_metrics(self._session, server.url))

    async def _check(self, line: Line, prompt: list[int], tokens: int, **more: Any) -> list[int] | None:
        """Asks through the proxy, and the decode server by itself, which has none of it in its prefix cache."""
        line.requests += 1
        try:
            said = await ask(self._session, self.url, prompt, tokens, **more)
        except ServerFailed as error:
            line.notes.append(str(error)[:200])
            return None
        expected = await ask(self._session, self._decode.url, prompt, tokens, cache_salt=f"alone-{line.requests}")
        line.equal += said == expected
        return said

    async def single(self, line: Line) -> None:
        """Requests of their own."""
        before = await self._counters(self._decode)
        for tokens in SINGLE_TOKENS:
            await self._check(line, self._tokens(tokens), 24)
        loaded = (await self._counters(self._decode)).since(before).external
        line.notes.append(f"{loaded:.0f} of {sum(SINGLE_TOKENS)} prompt tokens came from the prefill engine")

    async def turns(self, line: Line, conversations: int, strips: bool) -> None:
        """Conversations of two turns. In the second, what the client adds is new to the prefill engine, and where a
        part is left out also all behind it."""
        computed = loaded = new = 0.0
        for number in range(conversations):
            talk = f"{line.what}-{number}"
            first = self._tokens(FIRST_TOKENS)
            said = await self._check(line, first, ANSWER_TOKENS, conversation_id=talk)
            if said is None:
                continue
            if strips:
                del said[STRIPPED]
            second = [*first, *said, *self._tokens(NEXT_TOKENS)]
            before = await self._counters(self._prefill)
            await self._check(line, second, ANSWER_TOKENS, conversation_id=talk)
            found = (await self._counters(self._prefill)).since(before)
            computed, loaded = computed + found.computed, loaded + found.external
            new += NEXT_TOKENS + (ANSWER_TOKENS - STRIPPED.stop if strips else 0)
        line.notes.append(
            f"in second turns the prefill engine computed {computed:.0f} tokens, of which {new:.0f} were new, "
            f"and loaded {loaded:.0f}"
        )


async def of_every_kind(
    proxy: str, session: aiohttp.ClientSession, url: str, prefill: Server, decode: Server, stateful: bool
) -> Line:
    """Requests of every kind through a proxy. `stateful`: to servers with few blocks and without an adapter."""
    kinds = Kinds(session, url, prefill, decode, proxy, stateful)
    await kinds.run()
    return Line(proxy, "of every kind", kinds.asked, kinds.equal, kinds.notes)


async def at_once(session: aiohttp.ClientSession, prefill: Server, decode: Server, stateful: bool) -> Line:
    """The same through a proxy of ours, which asks both servers at the same time."""
    proxy = Proxy(prefill.url, decode.url, at_once=True)
    await proxy.start()
    try:
        # Its first request goes the other way.
        await ask(session, proxy.url, list(range(10, 74)), 4)
        return await of_every_kind(AT_ONCE, session, proxy.url, prefill, decode, stateful)
    finally:
        await proxy.stop()


async def run(options: argparse.Namespace, folder: Path) -> list[Line]:
    """All lines of the table."""
    lines: list[Line] = []
    stateful = options.model == STATEFUL
    async with open_session() as session:
        servers = Servers(options, folder, session)
        try:
            # A stable sort: each prefill server has its programs in turn.
            programs = [name for name in options.only if name != AT_ONCE]
            for name in sorted(programs, key=lambda name: PROGRAMS[name].as_push):
                program = PROGRAMS[name]
                say(f"proxy {name}: {program.path or 'vllm-router'}")
                pair = await servers.pair(program.as_push)
                proxy = Run(session, pair, program, folder, name)
                try:
                    await proxy.start()
                    lines.append(Line(name, "requests"))
                    await proxy.single(lines[-1])
                    if name == "toy":
                        lines.append(await of_every_kind(name, session, proxy.url, *pair[:2], stateful))
                    if program.has_turns:
                        lines.append(Line(name, "turns, as they were"))
                        await proxy.turns(lines[-1], options.conversations, strips=False)
                        lines.append(Line(name, "turns, stripped"))
                        await proxy.turns(lines[-1], options.conversations, strips=True)
                finally:
                    proxy.stop()
            if AT_ONCE in options.only:
                lines.append(await at_once(session, *(await servers.pair(False))[:2], stateful))
        finally:
            servers.stop()
    return lines


def main() -> int:
    """Runs the proxies and prints the table; the exit status."""
    options = parse_options()
    folder = make_folder("proxies")
    os.environ.setdefault("KVFERRY_LOG", "warn")
    lines = asyncio.run(run(options, folder))
    beside = f", {options.installed} server of the installed vLLM" if options.installed else ""
    told = f"vLLM {vllm.__version__}{beside}, connector {options.connector}, model {options.model}"
    print(f"{told}; logs in {folder.relative_to(ROOT)}")
    for line in lines:
        print(f"{line.proxy:<15} {line.what:<20} {line.equal} of {line.requests} answers equal")
        for note in line.notes:
            print(f"{'':<15} {note}")
    return 0 if all(line.equal == line.requests for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
