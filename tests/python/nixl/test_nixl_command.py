"""`kvferry nixl`: what it finds and tries."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import kvferry
import pytest
from commands import WITHOUT_FOLDERS
from hosts import HERE, INSTALLED, listed, needs_nixl, versions
from kvferry import nixl
from kvferry.cli import nixl as command

PACKAGE = str(Path(kvferry.__file__).resolve().parents[1])


def run(*paths: str, env: dict[str, str], within: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE, *paths]), **env}
    command = [*within, sys.executable, "-m", "kvferry", "nixl"]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


def test_the_plug_in_is_found_and_read_through(plugin: Path, edge: str) -> None:
    done = run(str(INSTALLED / edge), str(HERE / "stubs"), env={"NIXL_PLUGIN_DIR": str(plugin)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("read through it: every byte right") == 2
    assert f"nixl_cu12 {edge}" in done.stdout
    assert f"nixl_cu13 {edge}" in done.stdout


def test_a_read_needs_no_folder(plugin: Path, edge: str) -> None:
    within = [sys.executable, "-c", WITHOUT_FOLDERS]
    done = run(str(INSTALLED / edge), str(HERE / "stubs"), env={"NIXL_PLUGIN_DIR": str(plugin)}, within=within)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("read through it: every byte right") == 2
    assert done.stdout.count("path of the bytes: not told: there is no folder to write in") == 2


def test_a_plug_in_that_is_missing_or_no_nixl_is_said(edge: str, tmp_path: Path) -> None:
    needs_nixl(versions())
    done = run(str(INSTALLED / edge), env={"NIXL_PLUGIN_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert f"no plug-in in {tmp_path}: NIXL_PLUGIN_DIR names this folder; install the wheel kvferry-nixl" in done.stdout
    done = run(env={})
    assert done.returncode == 2
    assert "this Python has no NIXL" in done.stderr


def test_a_folder_that_hides_the_plug_in_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = tmp_path / "wheel" / "plugins"
    wheels.mkdir(parents=True)
    (wheels / nixl.FILE_NAME).write_bytes(b"a plug-in")
    monkeypatch.setattr(nixl, "installed", lambda: [nixl.Installed("nixl_cu12", nixl.TESTED[-1], wheels)])
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    assert command.run(argparse.Namespace()) == 1
    way_out = f"unset NIXL_PLUGIN_DIR, or put a link there to {wheels / nixl.FILE_NAME}"
    assert way_out in capsys.readouterr().out


def test_a_failed_read_is_said_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / nixl.FILE_NAME).write_bytes(b"a plug-in")
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    monkeypatch.setattr(nixl, "installed", lambda: [nixl.Installed("nixl_cu12", nixl.TESTED[-1], tmp_path)])
    printed = "kvferry NIXL plug-in: the reason\nTraceback (most recent call last):\n  File x\nerror: NOT_FOUND"
    monkeypatch.setattr(nixl, "try_read", lambda *_: nixl.Trial(printed))
    assert command.run(argparse.Namespace()) == 1
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert said[-3:] == ["read through it: FAILED", "kvferry NIXL plug-in: the reason", "error: NOT_FOUND"]


def test_the_lists_of_known_versions_are_one() -> None:
    assert list(nixl.TESTED) == listed()


def test_without_nixl_tests_are_skipped_or_fail_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KVFERRY_REQUIRE", raising=False)
    needs_nixl(listed())
    needs_nixl(listed()[:1])
    with pytest.raises(pytest.skip.Exception, match="scripts/setup nixl"):
        needs_nixl([])
    monkeypatch.setenv("KVFERRY_REQUIRE", "nixl")
    needs_nixl(listed())
    for found, missing in (([], listed()[0]), (listed()[:-1], listed()[-1])):
        with pytest.raises(pytest.fail.Exception, match=f"NIXL {missing}.* is not installed"):
            needs_nixl(found)
    compiler.unlink()
    with pytest.raises(pytest.fail.Exception, match=r"compiled by g\+\+"):
        needs_nixl(listed())
    monkeypatch.delenv("KVFERRY_REQUIRE")
    with pytest.raises(pytest.skip.Exception, match=r"compiled by g\+\+"):
        needs_nixl(listed())
