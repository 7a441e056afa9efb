"""What `kvferry doctor` finds where an RDMA device is there and something stands in its way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    "RDMA_HOST" not in os.environ,
    reason="it takes files out of the system's way: scripts/rdma-test has a system for that",
)


def doctor(
    *before: str, transfers: bool = False, python: str = sys.executable, **environment: str
) -> dict[str, dict[str, Any]]:
    """The findings by id. `before` is put before the command."""
    command = [*before, python, "-m", "kvferry", "doctor", "--json", "--timeout", "400", "--config", '{"port": 0}']
    if not transfers:
        command.append("--no-transfers")
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500)
    assert done.stdout, done.stderr
    return {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}


@contextmanager
def hidden(path: str, *how: str) -> Iterator[None]:
    """Mounts something over a file or folder."""
    subprocess.run(["mount", *how, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.long
def test_what_pip_installs_uses_the_device_and_moves_blocks(tmp_path: Path) -> None:
    wheels = ROOT / ".deps/rdma/wheels"
    if not wheels.is_dir():
        pytest.skip("scripts/rdma-test brings the wheels of what kvferry needs")
    python = str(tmp_path / "clean/bin/python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "clean"], check=True, timeout=300)
    pip = [str(ROOT / ".deps/venv/bin/python"), "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    built = [str(wheel) for wheel in (ROOT / "target/wheels").glob("*.whl")]
    subprocess.run([*pip, "--find-links", str(wheels), *built], check=True, timeout=600)
    found = doctor(transfers=True, python=python)
    assert any(str(tmp_path) in line for line in found["ucx"]["evidence"]), found["ucx"]
    assert found["rdma"]["case"] == "used", found["rdma"]
    assert any("rc_verbs/rxe0:1" in line for line in found["rdma"]["evidence"])
    assert found["transfer-rdma"]["case"] == "moved", found["transfer-rdma"]
    assert any("one-sided" in line for line in found["transfer-rdma"]["evidence"])


def test_a_ucx_without_verbs_is_told_by_name() -> None:
    (library,) = ROOT.glob(".deps/venv/lib/python3*/site-packages/libucx/lib/libucp.so.0")
    found = doctor(KVFERRY_UCX_LIB=str(library))["rdma"]
    assert (found["case"], found["state"]) == ("no-verbs", "problem")
    assert any(str(library) in line for line in found["evidence"]), found
    assert "kvferry-ucx" in found["remedy"]


@pytest.mark.long
def test_without_a_provider_libibverbs_sees_no_device() -> None:
    with hidden("/etc/libibverbs.d", "-t", "tmpfs", "none"):
        found = doctor()["rdma"]
    assert found["case"] == "no-provider", found
    assert "ibverbs-providers" in found["remedy"]


@pytest.mark.long
def test_without_libibverbs_the_module_does_not_load() -> None:
    library = Path("/usr/lib/x86_64-linux-gnu/libibverbs.so.1").resolve()
    with hidden(str(library), "--bind", "/dev/null"):
        found = doctor()["rdma"]
    assert found["case"] == "no-libibverbs", found
    assert any("libibverbs.so.1" in line for line in found["evidence"]), found


@pytest.mark.long
def test_a_limit_of_locked_memory_is_told() -> None:
    limited = ("prlimit", "--memlock=65536", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
    found = doctor(*limited)
    assert found["locked-memory"]["case"] == "limited", found["locked-memory"]
    assert "memlock" in found["locked-memory"]["remedy"]


@pytest.mark.long
def test_rc_alone_cannot_set_up_connections() -> None:
    assert doctor(UCX_TLS="rc_verbs,self")["transports"]["case"] == "no-wireup"
    assert doctor(UCX_TLS="rc,self")["transports"]["case"] == "restricted"
