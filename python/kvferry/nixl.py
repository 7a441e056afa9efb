"""kvferry's plug-in for stock NIXL: which NIXLs are installed, whether they find it, and how it gets there."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ._errors import invalid, make_error

KNOWN = ("1.3.0", "1.3.1", "1.3.2", "1.4.0", "1.4.1", "1.5.0", "1.5.1")
"""The versions whose plug-in interface the plug-in knows; it refuses others, as nixl/src/version.cpp does."""
BACKEND = "KVFERRY"
"""The backend's name in NIXL's configuration."""
FILE_NAME = f"libplugin_{BACKEND}.so"
_WHEELS = ("nixl-cu12", "nixl-cu13")
_OURS = Path(__file__).resolve().parent / "_nixl" / FILE_NAME


class Installed(NamedTuple):
    """A wheel of NIXL in this Python."""

    package: str
    version: str
    folder: Path
    """Where this NIXL looks for plug-ins, unless `NIXL_PLUGIN_DIR` names another folder."""

    @property
    def is_known(self) -> bool:
        """Whether the plug-in accepts the version."""
        return self.version in KNOWN

    @property
    def plugin(self) -> Path | None:
        """The plug-in where this NIXL looks for it; None if it is not there."""
        folder = Path(os.environ.get("NIXL_PLUGIN_DIR") or self.folder)
        return folder / FILE_NAME if (folder / FILE_NAME).is_file() else None


def installed() -> list[Installed]:
    """The wheels of NIXL that this Python has."""
    found = []
    for wheel in _WHEELS:
        try:
            distribution = importlib.metadata.distribution(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
        package = wheel.replace("-", "_")
        folder = Path(str(distribution.locate_file(f".{package}.mesonpy.libs"))) / "plugins"
        found.append(Installed(package, distribution.version, folder))
    return found


def packaged_plugin() -> Path | None:
    """The plug-in in this package; None if it has none."""
    return _OURS if _OURS.is_file() else None


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    """Puts what `make` makes in the place of `path`, which processes may have mapped: they keep the file they have."""
    with tempfile.TemporaryDirectory(prefix=".kvferry-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        make(made)
        os.replace(made, path)


def take_plugin(path: Path) -> None:
    """Copies a plug-in that `scripts/build-nixl` has made into this package, where it finds the library."""
    if not path.is_file():
        raise invalid(f"there is no plug-in {path}: scripts/build-nixl makes it")
    try:
        _OURS.parent.mkdir(exist_ok=True)
        _replace(_OURS, lambda place: shutil.copy(path, place))
    except OSError as error:
        raise make_error(-19, "io", f"{_OURS} cannot be written: {error.strerror}") from error


def install(nixl: Installed) -> Path:
    """Links this package's plug-in from a NIXL's folder of plug-ins, beside its own, and returns the link's path.

    Raises `UnsupportedError` for a NIXL that the plug-in would refuse.
    """
    if not nixl.is_known:
        text = f"{nixl.package} {nixl.version} is not known to the plug-in; known are {', '.join(KNOWN)}"
        raise make_error(-6, "unsupported", text)
    if packaged_plugin() is None:
        text = "this package has no NIXL plug-in: build it with scripts/build-nixl, and name it: --install PATH"
        raise make_error(-2, "not_found", text)
    link = nixl.folder / FILE_NAME
    try:
        _replace(link, lambda place: os.symlink(_OURS, place))
    except OSError as error:
        raise make_error(-19, "io", f"{link} cannot be written: {error.strerror}") from error
    return link
