"""`kvferry nixl`: what it finds and tries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvferry
from hosts import HERE, INSTALLED, ROOT
from kvferry import nixl

PACKAGE = str(Path(kvferry.__file__).resolve().parents[1])


def run(*paths: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE, *paths]), **env}
    command = [sys.executable, "-m", "kvferry", "nixl"]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


def test_the_plug_in_is_found_and_read_through(plugin: Path, edge: str) -> None:
    done = run(str(INSTALLED / edge), str(HERE / "stubs"), env={"NIXL_PLUGIN_DIR": str(plugin)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("read through it: every byte right") == 2
    assert f"nixl_cu12 {edge}" in done.stdout
    assert f"nixl_cu13 {edge}" in done.stdout


def test_a_plug_in_that_is_missing_or_no_nixl_is_said(edge: str, tmp_path: Path) -> None:
    done = run(str(INSTALLED / edge), env={"NIXL_PLUGIN_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert f"no plug-in in {tmp_path}: the wheel kvferry-nixl puts it" in done.stdout
    done = run(env={})
    assert done.returncode == 2
    assert "this Python has no NIXL" in done.stderr


def test_the_lists_of_known_versions_are_one() -> None:
    lines = (ROOT / "scripts" / "lib" / "nixl-versions.txt").read_text().splitlines()
    assert list(nixl.KNOWN) == [line for line in lines if not line.startswith("#")]
