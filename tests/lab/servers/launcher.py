"""Starts vLLM servers as forks of a process that has imported vLLM already (matrix_forker.py)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lab.matrix.network import Host
from lab.servers.server import RUN_TAG, Server, ServerFailed, ServerGroup, ServerSpec

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1


class _Adopted:
    """As much of `subprocess.Popen` as a server needs, for a process that was not started by it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkedServer(Server):
    """A server that a launcher has started."""

    _process: _Adopted  # type: ignore[assignment]

    def __init__(self, spec: ServerSpec, folder: Path, launcher: Launcher, host: Host) -> None:
        assert spec.port is not None
        self.name, self.host, self.port = spec.name, spec.host, spec.port
        self.log = folder / f"{spec.name}.log"
        arguments = ["--host", self.host, "--port", str(self.port), *spec.arguments]
        self.log.write_text(" ".join(arguments) + "\n")
        self._process = _Adopted(launcher.fork(arguments, spec.environment, self.log, host))

    def reap_group(self) -> bool:
        """After its end: takes the server's own processes, which have become this process's. Whether none is left: one
        that has lost its memory, and so its environment, may still have its ports."""
        try:
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        return False


class Launcher(Server):
    """One process that servers are forked from. It ends with its group."""

    def __init__(self, group: ServerGroup, environment: dict[str, str], log: Path) -> None:
        """Starts it, without waiting until it is ready."""
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)

        def begin() -> None:
            os.setpgrp()
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self.name, self.log = log.stem, log
        self._group, self._tag = group, group.tag
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lab.servers.forked"],
                env={**environment, RUN_TAG: group.tag},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                preexec_fn=begin,
            )
        self._ready = False
        group.add(self)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        if not line:
            raise ServerFailed(f"the process that servers are forked from has ended; its log is {self.log}")
        return line

    def wait(self) -> None:
        """Until it can fork. Takes as long as vLLM's import."""
        # What is imported may say something first.
        while not self._ready:
            self._ready = self._line() == "ready"

    def fork(self, arguments: list[str], environment: dict[str, str], log: Path, host: Host) -> int:
        """A new server's process id."""
        self.wait()
        assert self._process.stdin is not None
        order = {
            "arguments": arguments,
            "environment": {**environment, RUN_TAG: self._tag},
            "log": str(log),
            "netns": host.netns,
            "hosts": host.hosts_file,
        }
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._line())

    def start(self, spec: ServerSpec, host: Host) -> ForkedServer:
        """A server on a host, without waiting for it."""
        server = ForkedServer(spec, self._group.folder, self, host)
        self._group.add(server)
        return server
