"""Processes of stock NIXL with the plug-in, as tests use them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from commands import is_required, skip
from lab.process import freeze
from nixl_host import GENEROUS, pattern

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
INSTALLED = ROOT / ".deps" / "nixl"
SIZE = 1 << 20
LARGE = 256 << 20
"""Takes long enough to be in flight when the next call comes."""
ENOUGH = 16 << 20
"""To be read from a peer that is stopped: what it does not send does not come, however little it is."""


def versions() -> list[str]:
    """The versions that scripts/setup has installed, oldest first."""
    found = [folder.name for folder in INSTALLED.glob("*") if (folder / ".complete").is_file()]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def listed() -> list[str]:
    """The versions that scripts/setup installs."""
    lines = (ROOT / "scripts" / "lib" / "nixl-versions.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def needs_nixl(found: list[str]) -> None:
    """Skips without a version of NIXL and without the plug-in's compiler. Where NIXL is required, every version is."""
    missing = [version for version in listed() if version not in found]
    if missing and (not found or is_required("nixl")):
        skip("nixl", f"NIXL {', '.join(missing)} is not installed: run scripts/setup nixl")
    if shutil.which("g++") is None:
        skip("nixl", "the plug-in is compiled by g++, which is not there")


def plugins(version: str, package: str = "nixl_cu12") -> Path:
    """NIXL's own plug-ins."""
    return INSTALLED / version / f".{package}.mesonpy.libs" / "plugins"


class Failed(Exception):
    """The other process's exception, as text."""


class Process(AbstractContextManager["Process"]):
    """A process with a NIXL agent; every method of `nixl_host.Host` can be called on it."""

    def __init__(
        self, version: str, folder: Path, *, package: str = "nixl_cu12", env: dict[str, str] | None = None
    ) -> None:
        ours, theirs = multiprocessing.Pipe()
        variables = dict(os.environ)
        variables["PYTHONPATH"] = os.pathsep.join([str(INSTALLED / version), str(HERE / "stubs"), str(HERE)])
        variables["NIXL_PLUGIN_DIR"] = str(folder)
        variables.setdefault("KVFERRY_TRANSPORT", "tcp")
        variables.update(env or {})
        theirs_fd = theirs.fileno()
        self.child = subprocess.Popen(
            [sys.executable, str(HERE / "nixl_host.py"), str(theirs_fd), package],
            env=variables,
            pass_fds=[theirs_fd],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        theirs.close()
        self.pipe = ours
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.log.append(line)

    def ask(self, command: str, *arguments: object) -> None:
        """Sends a command; `answer` is what it returns."""
        self.pipe.send((command, arguments))

    def answer(self) -> Any:
        assert self.pipe.poll(2 * GENEROUS), f"no answer: {''.join(self.log)}"
        try:
            succeeded, value = self.pipe.recv()
        except EOFError:
            self.child.wait(GENEROUS)
            raise AssertionError(f"the process ended with {self.child.returncode}: {''.join(self.log)}") from None
        if not succeeded:
            raise Failed(value)
        return value

    def __getattr__(self, command: str) -> Any:
        def call(*arguments: object) -> Any:
            self.ask(command, *arguments)
            return self.answer()

        return call

    def said(self, text: str, times: int) -> int:
        """How many lines of its log have `text`, waiting for so many."""
        deadline = time.monotonic() + GENEROUS
        while (seen := sum(text in line for line in self.log)) < times and time.monotonic() < deadline:
            time.sleep(0.01)
        return seen

    def freeze(self) -> None:
        """It does nothing from now on, and is not gone."""
        freeze(self.child.pid)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.pipe.close()
        try:
            code = self.child.wait(GENEROUS if kind is None else 5)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._reader.join(GENEROUS)
        if kind is None:
            assert code in (0, -9), f"ended with {code}: {''.join(self.log)}"
        else:
            sys.stderr.write("".join(self.log))


def serve(host: Process, name: str, seed: int, size: int) -> int:
    """Starts an agent with `size` bytes of memory registered; their address."""
    assert host.start(name, ["KVFERRY"]) == ["KVFERRY"]
    address = int(host.buffer("cache", seed, size))
    host.register("cache", [("cache", 0, size)])
    return address


def beside_ucx(plugin: Path, version: str, folder: Path) -> dict[str, str]:
    """An environment in which NIXL has the plug-in of the folder `plugin` and its own backend UCX, both in `folder`."""
    folder.mkdir()
    for path in (plugin / "libplugin_KVFERRY.so", plugins(version) / "libplugin_UCX.so"):
        (folder / path.name).symlink_to(path)
    # What NIXL's plug-in finds by its own place otherwise.
    return {"NIXL_PLUGIN_DIR": str(folder), "LD_LIBRARY_PATH": str(INSTALLED / version / "nixl_cu12.libs")}


def plugin_folder(built: Path, folder: Path) -> Path:
    """A folder with the plug-in alone."""
    folder.mkdir(exist_ok=True)
    shutil.copy(built, folder / built.name)
    return folder


def acquaint(a: Process, b: Process, size: int) -> int:
    """Both serve `size` bytes, and a knows b. The address of b's."""
    serve(a, "a", 1, size)
    address = serve(b, "b", 2, size)
    assert a.add(b.metadata()) == "b"
    return address


def read(a: Process, address: int) -> None:
    a.fill("cache", 1)
    a.make("read", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b")
    assert a.run("read") == "DONE"
    a.release("read")
    np.testing.assert_array_equal(a.contents("cache")[:SIZE], pattern(2, SIZE))


def post_in_flight(a: Process, key: str, message: bytes = b"") -> None:
    """Posts a transfer until one call returns before its end."""
    deadline = time.monotonic() + GENEROUS
    while (state := a.post(key, message)) != "PROC":
        assert state == "DONE"
        assert time.monotonic() < deadline


def refuse_a_release(a: Process, b: Process) -> int:
    """Has the library, which is `late`, refuse to release a read. The address of b's memory."""
    address = acquaint(a, b, LARGE)
    deadline = time.monotonic() + GENEROUS
    while True:
        a.make("x", "READ", [("cache", 0, LARGE)], [(address, LARGE, 0)], "b")
        post_in_flight(a, "x")
        try:
            a.release("x")
        except Failed as failed:
            error = failed
            break
        # The read had ended.
        assert time.monotonic() < deadline
    assert "REPOST_ACTIVE" in str(error)
    return address


def outcome(a: Process, key: str) -> str:
    """How a transfer that was posted ends: the state, or the error as text."""
    try:
        return str(a.wait(key))
    except Failed as error:
        return str(error)


def freeze_in_a_read(a: Process, b: Process) -> None:
    """Begins a read from a peer that is stopped: over TCP it cannot end before the peer goes on."""
    address = acquaint(a, b, ENOUGH)
    # Connected.
    read(a, address)
    b.freeze()
    a.make("x", "READ", [("cache", 0, ENOUGH)], [(address, ENOUGH, 0)], "b")
    assert a.post("x") == "PROC"
