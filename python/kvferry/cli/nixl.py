"""Says which versions of NIXL this Python has and whether they find kvferry's plug-in, and reads through it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from .. import nixl

LIMIT = 180.0
"""Seconds that the read may take, with the start of its process."""


class UsageError(ValueError):
    """There is no NIXL to look at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments: it has none."""


def _read(package: str) -> str | None:
    """Reads through stock NIXL in a process of its own; None if every byte was right, else what it said."""
    variables = dict(os.environ)
    root = str(Path(nixl.__file__).resolve().parents[1])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), root]))
    command = [sys.executable, "-m", "kvferry._nixl_read", package]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"the read did not end within {LIMIT:.0f} s"
    if done.returncode == 0 and done.stdout.split()[-1:] == ["right"]:
        return None
    return done.stderr.strip() or f"the process ended with {done.returncode}"


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    found = nixl.installed()
    if not found:
        raise UsageError("this Python has no NIXL: pip install 'nixl[cu12]' or 'nixl[cu13]'")
    failed = False
    for one in found:
        print(f"{one.package} {one.version}")
        if not one.is_known:
            print(f"  refused: the plug-in knows {', '.join(nixl.KNOWN)}")
            failed = True
            continue
        if one.plugin is None:
            folder = os.environ.get("NIXL_PLUGIN_DIR") or one.folder
            print(f"  no plug-in in {folder}: the wheel kvferry-nixl puts it into the folder of NIXL's wheel")
            failed = True
            continue
        print(f"  plug-in: {one.plugin}")
        trouble = _read(one.package)
        if trouble is None:
            print("  read through it: every byte right")
        else:
            failed = True
            print("  read through it: FAILED")
            print("\n".join(f"    {line}" for line in trouble.splitlines()))
    return int(failed)
