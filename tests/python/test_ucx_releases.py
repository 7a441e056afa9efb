"""Engines of two UCX releases, and kvferry's own settings with the oldest UCX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, skip

OWNER = """
import sys, kvferry, numpy as np
memory = np.arange(1 << 16, dtype=np.uint16)
agent = kvferry.Agent({"name": "owner"})
agent.register(memory)
print(agent.metadata().hex(), flush=True)
sys.stdin.read()
"""
READER = """
import sys, kvferry
agent = kvferry.Agent({"name": "reader"})
try:
    agent.connect(bytes.fromhex(sys.argv[1]))
    print("connected")
except kvferry.KvferryError as error:
    print(error.message)
"""


@pytest.fixture(scope="module")
def oldest() -> Path:
    path = ROOT / ".deps/ucx-oldest/libucx/lib/libucp.so.0"
    if not path.is_file():
        skip("ucx-oldest", "scripts/setup has not installed .deps/ucx-oldest")
    return path


def environment(ucx: Path | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "KVFERRY_UCX_LIB"))}
    return kept if ucx is None else {**kept, "KVFERRY_UCX_LIB": str(ucx)}


def test_two_releases_are_named_when_they_do_not_fit(oldest: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(oldest)
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        command = [sys.executable, "-c", READER, owner.stdout.readline().strip()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(None))
        owner.stdin.close()
    # Which of the two keys and addresses they do not share is UCX's matter.
    if done.stdout.strip() != "connected":
        assert "UCX is 1.18.1 there and" in done.stdout, done
        assert "have one release of it on all hosts" in done.stdout


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm"])
def test_the_oldest_ucx_warns_of_no_setting(transport: str, oldest: Path) -> None:
    code = f"import kvferry; kvferry.Agent({{'transport': {transport!r}}}).shutdown(1)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment(oldest)
    )
    assert done.returncode == 0, done.stderr
    assert "invalid configuration" not in done.stdout + done.stderr
