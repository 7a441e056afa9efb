"""Starts vLLM's OpenAI servers, waits until they answer, and ends every process of them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from lab.common import say
from lab.ports import free_port

# Marks every process of this run in its environment, so that those that leave their process group (Ray's daemons)
# are found again and nothing else is ever touched.
RUN_TAG = "KVFERRY_DEMO_RUN"

_PR_SET_PDEATHSIG = 1
_STOP_LIMIT_S = 20.0
_TAIL_LINES = 25
_TAIL_ERRORS = 12
_ERROR = re.compile(r"\b\w*(Error|ERROR|Exception)\b:?")


def _begin() -> None:
    """Gives the server a process group, and has the kernel end it when this program is killed outright.

    Not a session of its own: Linux shares processors between sessions before it does between threads (autogroup), and
    on few of them a thread then waits long beside another session's. In each of thirteen runs with 100 hand-overs on
    two processors a thread of kvferry's waited 18 to 232 ms for one (`perf sched`), and the longest hand-over took 94
    to 276 ms. In nine runs in one session none waited longer than 20 ms, and the longest took 76 to 106. Two engines of
    two pipeline stages had not finished 40 prompts after 280 s in sessions of their own; in one session the longest
    hand-over took 0.4 s.
    """
    os.setpgrp()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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
    host: str = "127.0.0.1"


class Server:
    """One running server."""

    def __init__(self, spec: ServerSpec, folder: Path, tag: str) -> None:
        self.name = spec.name
        self.host = spec.host
        self.port = free_port() if spec.port is None else spec.port
        self.log = folder / f"{spec.name}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", self.host, "--port", str(self.port), *spec.arguments]
        environment = {**spec.environment, RUN_TAG: tag}
        with self.log.open("wb") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_begin,
            )

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id, which is also that of its process group."""
        return self._process.pid

    def tail(self) -> str:
        """The end of its log, after the first errors in it: vLLM tells the cause long before its last line."""
        lines = self.log.read_text(errors="replace").splitlines()
        end = lines[-_TAIL_LINES:]
        errors = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)][:_TAIL_ERRORS]
        return "\n".join([*errors, "...", *end] if errors else end)

    def check_alive(self) -> None:
        """Raises ServerFailed when the process is gone."""
        status = self._process.poll()
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
        except (aiohttp.ClientError, TimeoutError):
            return False

    def signal_first(self, number: int) -> None:
        """Sends a signal to the server's first process only, as an operator does."""
        self._process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the server and its process group."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def reap(self, limit_s: float) -> bool:
        """Waits for the server's own process; whether it has ended."""
        try:
            self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class ServerGroup:
    """All servers of a run, each in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag = uuid.uuid4().hex
        self._servers: list[Server] = []

    def start(self, spec: ServerSpec) -> Server:
        """Starts a server without waiting for it."""
        server = Server(spec, self.folder, self.tag)
        self.add(server)
        return server

    def add(self, server: Server) -> None:
        """Takes over a process that carries this run's mark."""
        self._servers.append(server)

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

    def processes(self, server: Server | None = None) -> list[int]:
        """Processes of `server`'s group, by default all that carry this run's mark."""
        found = _tagged_processes(self.tag)
        return found if server is None else [pid for pid in found if _group_of(pid) == server.pid]

    def cpu_s(self, servers: Iterable[Server]) -> float:
        """Seconds of processor time that the processes of `servers` have used."""
        # By group and not by the mark: vLLM's workers write their titles over their environment.
        groups = {server.pid for server in servers}
        everyone = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return sum(_cpu_s(pid) for pid in everyone if _group_of(pid) in groups)

    def stop(self, servers: Iterable[Server] | None = None) -> None:
        """Ends `servers`, by default all, with every process that they started."""
        chosen = list(self._servers if servers is None else servers)
        for server in chosen:
            server.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_LIMIT_S
        for server in chosen:
            server.reap(max(0.1, deadline - time.monotonic()))
        for server in chosen:
            server.signal_group(signal.SIGKILL)
            server.reap(_STOP_LIMIT_S)
            self._servers.remove(server)
        if not self._servers:
            for pid in _tagged_processes(self.tag):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _cpu_s(pid: int) -> float:
    try:
        # After the command's name, which may hold anything: the third field and on.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tagged_processes(tag: str) -> list[int]:
    """Processes that were started with this run's tag in their environment, other than this one."""
    wanted = f"{RUN_TAG}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def available_gib() -> float:
    """Memory that can be used without swapping, in GiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0
