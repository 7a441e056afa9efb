"""Says which versions of NIXL this Python has and whether they find kvferry's plug-in, and reads through it."""

from __future__ import annotations

import argparse
import os

from .. import nixl
from ..bench.errors import UsageError

LIMIT = 180.0
"""Seconds that the read may take, with the start of its process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments: it has none."""


def _try(package: str) -> bool:
    """Reads through a NIXL, and says what came of it. Returns whether every byte was right."""
    trial = nixl.try_read(package, LIMIT)
    if trial.trouble:
        print("  read through it: FAILED")
        print("\n".join(f"    {line}" for line in nixl.telling(trial.trouble)))
        return False
    for remark in trial.remarks:
        print(f"  the plug-in says: {remark}")
    print(f"  the plug-in's UCX: {trial.ucx}")
    print("  read through it: every byte right")
    print(f"  path of the bytes: {trial.moved}")
    if trial.beside:
        print(f"  with NIXL's own backend UCX in the same process: {trial.beside}")
    elif trial.others:
        print("  with NIXL's own backend UCX in the same process: a second UCX, which can hang it")
        print("\n".join(f"    {other}" for other in trial.others))
        print("    name no other UCX (KVFERRY_UCX_LIB), so that both use NIXL's, or use one backend in a process")
    elif trial.others is not None:
        print("  with NIXL's own backend UCX in the same process: the same UCX")
    return True


def _remedy(one: nixl.Installed) -> str:
    """The remedy where a NIXL does not find the plug-in."""
    beside = one.folder / nixl.FILE_NAME
    wheels = beside if beside.is_file() else one.elsewhere
    if not os.environ.get("NIXL_PLUGIN_DIR"):
        if wheels:
            return f"put a link there; that of the wheel kvferry-nixl is {wheels}"
        return "the wheel kvferry-nixl puts it into the folder of NIXL's wheel"
    named = "NIXL_PLUGIN_DIR names this folder"
    if wheels:
        unset = "unset NIXL_PLUGIN_DIR, or " if wheels == beside else ""
        return f"{named}; {unset}put a link there to {wheels}"
    return f"{named}; install the wheel kvferry-nixl, and unset NIXL_PLUGIN_DIR or put a link there"


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    found = nixl.installed()
    if not found:
        raise UsageError("this Python has no NIXL: pip install 'nixl[cu12]' or 'nixl[cu13]'")
    failed = False
    for one in found:
        print(f"{one.package} {one.version}")
        if not one.is_tested:
            print(f"  not a version that the plug-in was tested with: {', '.join(nixl.TESTED)}")
        if one.plugin is None:
            if one.is_dangling:
                print(f"  a link that leads to no file: remove {one.place}")
            print(f"  no plug-in in {one.place.parent}: {_remedy(one)}")
            failed = True
            continue
        print(f"  plug-in: {one.plugin}")
        failed = not _try(one.package) or failed
    return int(failed)
