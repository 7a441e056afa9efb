"""Checks the files that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..settings import Setting

CONNECTORS = {"worker", "scheduler", "connector"}
"""Parts whose keys `kv_connector_extra_config` may have."""


def missing_files(rows: list[Setting]) -> list[str]:
    """Returns what is wrong with the files that the values of `rows` name, a text each."""
    wrong = []
    for row in rows:
        value = row["value"]
        if not isinstance(value, str) or not value or CONNECTORS.isdisjoint(row["parts"]):
            continue
        if (check := _CHECKS.get(row["key"])) is not None and (why := check(value)) is not None:
            name = f"{row['key']} (of {row['variable']})" if row["source"] == "environment" else row["key"]
            wrong.append(f"{name}: {why}")
    return wrong


def _no_key(path: str) -> str | None:
    if os.path.isdir(path):
        return f"{path} is a folder; `kvferry key` makes a key file"
    try:
        os.stat(path)
    except FileNotFoundError:
        return f"{path} does not exist; `kvferry key` makes one"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if os.access(path, os.R_OK) else f"{path} cannot be read"


def _no_ucx(path: str) -> str | None:
    # A name without a folder is left to the dynamic linker.
    if "/" not in path or os.path.isfile(path):
        return None
    return f"{path} is no file; name a libucp.so.0, or leave it out to have one found"


def _no_new_file(path: str) -> str | None:
    """Tells why no file can be made at `path`; None if one can."""
    if os.path.isdir(path):
        return f"{path} is a folder; name a file"
    folder, name = os.path.split(path)
    folder = folder or "."
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    why = "may not be written to" if os.path.isdir(folder) else "is no folder"
    return f"{folder} {why}, so {name} cannot be made there"


_CHECKS: dict[str, Callable[[str], str | None]] = {
    "key_file": _no_key,
    "ucx_lib": _no_ucx,
    "trace": _no_new_file,
}
"""The check of each key that names a file."""
