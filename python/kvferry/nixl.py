"""kvferry's plug-in for stock NIXL: which NIXLs are installed, and whether they find it."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import NamedTuple

KNOWN = ("1.3.0", "1.3.1", "1.3.2", "1.4.0", "1.4.1", "1.5.0", "1.5.1")
"""The versions whose plug-in interface the plug-in knows; it refuses others, as nixl/src/version.cpp does."""
BACKEND = "KVFERRY"
"""The backend's name in NIXL's configuration."""
FILE_NAME = f"libplugin_{BACKEND}.so"
_WHEELS = ("nixl-cu12", "nixl-cu13")


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
