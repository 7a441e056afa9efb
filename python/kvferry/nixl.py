"""kvferry's plug-in for stock NIXL: which NIXLs are installed, and whether they find it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ._nixl_read import STEP
from .bench.sizes import size_text
from .doctor.child import ChildError, run

TESTED = ("1.3.0", "1.3.1", "1.3.2", "1.4.0", "1.4.1", "1.5.0", "1.5.1")
"""The versions that the plug-in was tested with, as in nixl/src/version.cpp. It compares the interface of others."""
BACKEND = "KVFERRY"
"""The backend's name in NIXL's configuration."""
FILE_NAME = f"libplugin_{BACKEND}.so"
_WHEELS = ("nixl-cu12", "nixl-cu13")
_PLUGIN_WHEEL = "kvferry-nixl"


class Installed(NamedTuple):
    """A wheel of NIXL in this Python."""

    package: str
    version: str
    folder: Path
    """Where this NIXL looks for plug-ins, unless `NIXL_PLUGIN_DIR` names another folder."""

    @property
    def is_tested(self) -> bool:
        """True if the plug-in was tested with the version. Of others it may accept some."""
        return self.version in TESTED

    @property
    def place(self) -> Path:
        """Where this NIXL looks for the plug-in in this environment."""
        return Path(os.environ.get("NIXL_PLUGIN_DIR") or self.folder) / FILE_NAME

    @property
    def plugin(self) -> Path | None:
        """The plug-in where this NIXL looks for it; None if it is not there."""
        return self.place if self.place.is_file() else None

    @property
    def elsewhere(self) -> Path | None:
        """The plug-in that the wheel kvferry-nixl has brought into another folder than this NIXL's, such as that of a
        virtual environment which sees the system's NIXL; None without it."""
        try:
            wheel = importlib.metadata.distribution(_PLUGIN_WHEEL)
        except importlib.metadata.PackageNotFoundError:
            return None
        path = _plugins(wheel, self.package) / FILE_NAME
        return path if path.is_file() and path.parent != self.folder else None

    @property
    def ucx(self) -> Path | None:
        """The libucp inside this NIXL's wheel, which the plug-in takes; None without it."""
        return next(iter(sorted((self.folder.parents[1] / f"{self.package}.libs").glob("libucp[-.]*so*"))), None)

    @property
    def is_dangling(self) -> bool:
        """True if a link is there that leads to no file."""
        return self.place.is_symlink() and not self.place.exists()


def installed() -> list[Installed]:
    """The wheels of NIXL that this Python has."""
    found = []
    for wheel in _WHEELS:
        try:
            distribution = importlib.metadata.distribution(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
        package = wheel.replace("-", "_")
        found.append(Installed(package, distribution.version, _plugins(distribution, package)))
    return found


def _plugins(distribution: importlib.metadata.Distribution, package: str) -> Path:
    """The folder of plug-ins for `package` beside the files of a wheel."""
    return Path(str(distribution.locate_file(f".{package}.mesonpy.libs"))) / "plugins"


_COMMAND = ("-m", "kvferry._nixl_read")
_WAYS = {
    "copied": "copied (process_vm_readv)",
    "device_copied": "copied by the device (CUDA IPC)",
    "one_sided": "one-sided (UCX)",
    "served": "served by messages",
}
"""By the name of a counter of bytes: the path, in the words of logs and routes."""


class Trial(NamedTuple):
    """The result of reading through a NIXL with the plug-in, in a process of its own.

    `trouble` is what went wrong, empty if every byte was right. `ucx` is the UCX that the plug-in used, `transports`
    are what it has here, and `moved` is how the bytes went. `others` are the further UCX that the process has once
    NIXL's own backend UCX is in it too; None without that backend. `beside` is what went wrong with that backend in the
    process, after the read. `timed_out` is whether the read did not end in time. `remarks` are the plug-in's lines.
    """

    trouble: str
    ucx: str = ""
    transports: tuple[str, ...] = ()
    moved: str = ""
    others: list[str] | None = None
    beside: str = ""
    timed_out: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """True if the plug-in has refused this NIXL."""
        return any(" is refused: its plug-in interface differs" in line for line in self.remarks)


def _ucx_text(found: dict[str, Any]) -> str:
    return f"UCX {found['version'] or '?'} at {found['path']}"


def telling(trouble: str) -> list[str]:
    """The lines of a failed trial that say most: those of the plug-in, and the exception at the end."""
    lines = [line.strip() for line in trouble.splitlines() if line.strip()]
    return [line for line in lines[:-1] if line.startswith("kvferry")] + lines[-1:]


def _remarks(printed: str) -> tuple[str, ...]:
    start = "kvferry NIXL plug-in: "
    return tuple(line.removeprefix(start) for line in printed.splitlines() if line.startswith(start))


def _folder() -> AbstractContextManager[str]:
    """A folder for the metrics, which tell the path of the bytes; an empty text where nothing is writable."""
    for place in (None, "/dev/shm"):
        with suppress(OSError):
            return tempfile.TemporaryDirectory(prefix="kvferry-nixl-", dir=place)
    return nullcontext("")


def try_read(package: str, limit_s: float) -> Trial:
    """Reads through the NIXL of `package` (such as nixl_cu12) within `limit_s` seconds."""
    variables = dict(os.environ)
    root = str(Path(__file__).resolve().parents[1])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), root]))
    with _folder() as folder:
        command = [sys.executable, *_COMMAND, package, folder]
        timed_out = False
        try:
            code, printed = run(command, limit_s, environment=variables)
            end = f"the process ended with {code}" if code else ""
        except ChildError as error:
            printed, timed_out, end = error.printed, error.timed_out, str(error)
    steps = [json.loads(line.removeprefix(STEP)) for line in printed.splitlines() if line.startswith(STEP)]
    if not steps:
        trouble = f"{printed}\n{end}".strip() if timed_out else printed or end
        return Trial(trouble, timed_out=timed_out, remarks=_remarks(printed))
    first = steps[0]
    ways = ", ".join(f"{size_text(number)} {_WAYS[way]}" for way, number in first["bytes"].items())
    others = None
    if len(steps) > 1 and steps[1]["ucx_backend"]:
        others = [_ucx_text(other) for other in steps[1]["others"]]
    moved = f"{ways}; the connection has {first['lanes']}" if ways else "not told: there is no folder to write in"
    transports = tuple(first["transports"])
    return Trial("", _ucx_text(first["ucx"]), transports, moved, others, end, remarks=_remarks(printed))
