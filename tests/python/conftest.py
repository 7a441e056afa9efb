"""Finds the package and the library: those that are installed, else those of this source tree."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import needs, run

ROOT = Path(__file__).resolve().parents[2]


def _use_tree() -> None:
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [target / profile / "libkvferry.so" for profile in ("debug", "release")]
    built += [target / profile / "deps" / "libkvferry.so" for profile in ("debug", "release")]
    present = [path for path in built if path.is_file()]
    if not present and "KVFERRY_LIBRARY" not in os.environ:
        raise RuntimeError("no libkvferry.so was built: run `cargo build` first, or install the wheel")
    # In the environment, so that the processes that tests start find the same.
    if present:
        newest = max(present, key=lambda path: path.stat().st_mtime)
        os.environ.setdefault("KVFERRY_LIBRARY", str(newest))
    package = str(ROOT / "python")
    sys.path.insert(0, package)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))


if importlib.util.find_spec("kvferry") is None:
    _use_tree()


# A shell has its background jobs ignore it, which processes inherit: tests that interrupt would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


SHARED = re.compile(r"tests/python/(doctor|gpu|nixl)/|trio-(one-group|hybrid)")
"""In the ids of tests that share fixtures of a session which take long to make."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of pytest-xdist: gives a process the tests of a file, or all that share such fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            shared = SHARED.search(nodeid)
            return shared[0] if shared else nodeid.partition("::")[0]

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a blank in its name that scripts/install has installed into."""
    needs("cargo")
    prefix = tmp_path_factory.mktemp("install") / "a prefix"
    run("scripts/install", "--prefix", prefix, "--profile", "dev")
    return prefix
