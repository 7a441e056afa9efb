"""Starts vLLM's OpenAI servers, waits until they answer, and ends every process of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from lab.common import free_port, say
from lab.network import LOOPBACK, Host
from lab.process import Child, Stuck, processes, stat
from lab.servers.forked import SERVER, serve

# Marks every process of this run in its environment, so that those that leave their process group (Ray's daemons)
# are found again and nothing else is ever touched.
RUN_TAG = "KVFERRY_DEMO_RUN"

_STOP_LIMIT_S = 20.0
_TAIL_LINES = 25
_TAIL_ERRORS = 12
_ERROR = re.compile(r"\b\w*(Error|ERROR|Exception)\b:?")


class ServerFailed(RuntimeError):
    """A server ended or did not answer in time; the text holds the end of its log."""


@dataclass
class ServerSpec:
    """What to start."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    # Where it answers; None takes a free port.
    port: int | None = None
    host: Host = LOOPBACK


class Server:
    """One running server."""

    def __init__(self, spec: ServerSpec, folder: Path, tag: str, forked: bool) -> None:
        self.name, self.host = spec.name, spec.host.address
        self.port = free_port() if spec.port is None else spec.port
        self.log = folder / f"{spec.name}.log"
        arguments = ["--host", self.host, "--port", str(self.port), *spec.arguments]
        self.log.write_text(" ".join(arguments) + "\n")
        # vLLM ends its own processes when it is told to end.
        if forked:
            more = (arguments, self.log, spec.host)
            self.child = Child.forked(serve, *more, environment=spec.environment, deadly=signal.SIGTERM)
        else:
            command = [sys.executable, "-m", SERVER, *arguments]
            self.child = Child.program(command, self.log, {**spec.environment, RUN_TAG: tag}, deadly=signal.SIGTERM)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.host}:{self.port}"

    def tail(self) -> str:
        """The end of its log, after the first errors in it: vLLM tells the cause long before its last line."""
        lines = self.log.read_text(errors="replace").splitlines()
        end = lines[-_TAIL_LINES:]
        errors = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)][:_TAIL_ERRORS]
        return "\n".join([*errors, "...", *end] if errors else end)

    def check_alive(self) -> None:
        """Raises ServerFailed when the process is gone."""
        status = self.child.poll()
        if status is not None:
            raise ServerFailed(
                f"the {self.name} server ended with status {status}; the end of {self.log}:\n{self.tail()}"
            )

    async def healthy(self, session: aiohttp.ClientSession) -> bool:
        """Whether it answers /health now."""
        self.check_alive()
        try:
            async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                return bool(answer.status == 200)
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError):
            return False


class ServerGroup:
    """All servers of a run. With `forked`, they are forked from a process that has `forked.IMPORTED`."""

    def __init__(self, folder: Path, forked: bool = False) -> None:
        self.folder = folder
        self.tag = uuid.uuid4().hex
        self._forked = forked
        self._servers: list[Server] = []
        self._starts: Counter[str] = Counter()

    def numbered(self, name: str) -> str:
        """A name with the number of its start, for a log of its own."""
        self._starts[name] += 1
        return f"{name}-{self._starts[name]}"

    def start(self, spec: ServerSpec) -> Server:
        """Starts a server without waiting for it."""
        server = Server(spec, self.folder, self.tag, self._forked)
        self._servers.append(server)
        return server

    async def wait_ready(self, servers: Iterable[Server], session: aiohttp.ClientSession, limit_s: float) -> None:
        """Waits until all of `servers` answer, telling on stderr what it waits for."""
        begin = time.monotonic()
        waiting = list(servers)
        told = begin
        while waiting:
            for server in list(waiting):
                if await server.healthy(session):
                    waiting.remove(server)
                    say(f"  {server.name} is up after {time.monotonic() - begin:.0f} s")
            now = time.monotonic()
            names = ", ".join(server.name for server in waiting)
            if waiting and now - begin > limit_s:
                raise ServerFailed(
                    f"no answer from {names} within {limit_s:.0f} s; the end of {waiting[0].log}:\n{waiting[0].tail()}"
                )
            if waiting and now - told > 10:
                told = now
                say(f"  waiting for {names}: {now - begin:.0f} s")
            await asyncio.sleep(0.5 if waiting else 0)

    def left(self) -> list[int]:
        """Processes that carry this run's mark."""
        return _tagged_processes(self.tag)

    def cpu_s(self, servers: Iterable[Server]) -> float:
        """Seconds of processor time that the processes of `servers` have used."""
        # By group and not by the mark: vLLM's workers write their titles over their environment.
        return sum(_cpu_s(pid) for server in servers for pid in server.child.group())

    async def kill(self, server: Server, limit_s: float) -> None:
        """SIGKILL to all processes of a server, and waits until they are gone and their ports free."""
        try:
            await asyncio.to_thread(server.child.kill, limit_s)
        except Stuck as stuck:
            raise ServerFailed(f"{server.name}: {stuck}") from None
        self._servers.remove(server)

    def stop(self, servers: Iterable[Server] | None = None) -> None:
        """Ends `servers`, by default all, with every process that they started."""
        chosen = list(self._servers if servers is None else servers)
        for server in chosen:
            server.child.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_LIMIT_S
        for server in chosen:
            server.child.wait(max(0.1, deadline - time.monotonic()))
        for server in chosen:
            server.child.kill()
            self._servers.remove(server)
        if not self._servers:
            for pid in self.left():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _cpu_s(pid: int) -> float:
    fields = stat(Path(f"/proc/{pid}"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _tagged_processes(tag: str) -> list[int]:
    """Processes that were started with this run's tag in their environment, other than this one."""
    wanted = f"{RUN_TAG}={tag}".encode()
    found = []
    for pid in processes():
        with suppress(OSError):
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def available_gib() -> float:
    """Memory that can be used without swapping, in GiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0
