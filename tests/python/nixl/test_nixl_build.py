"""`scripts/build-nixl`: when the plug-in is compiled again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hosts import ROOT, needs_nixl, versions

pytestmark = pytest.mark.slow

COMPILER = """#!/bin/sh
# Another version of a compiler is that compiler and says so. What it compiles is not run: once, and fast, is enough.
set -e
case "$*" in
  --version) cat "{folder}/version" ;;
  *" -c "*)
    if ! [ -d "{folder}/kept" ]; then
      "{real}" "$@" -O0 -g0
      mkdir "{folder}/kept"
      cp ./*.o "{folder}/kept"
    fi
    cp "{folder}"/kept/*.o .
    echo compiled >>"{folder}/log"
    ;;
  *) exec "{real}" "$@" ;;
esac
"""


def test_a_compiler_of_another_version_compiles_again(tmp_path: Path) -> None:
    needs_nixl(versions())
    program = tmp_path / "g++"
    program.write_text(COMPILER.format(folder=tmp_path, real=shutil.which("g++")))
    program.chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CARGO_TARGET_DIR": str(tmp_path / "target"),
    }

    def build(version: str, *words: str) -> tuple[Path, bytes, int]:
        """What was built, its bytes, and how often anything was compiled so far."""
        (tmp_path / "version").write_text(f"g++ {version}\n")
        command = [str(ROOT / "scripts" / "build-nixl"), *words]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        built = Path(done.stdout.strip())
        return built, built.read_bytes(), len((tmp_path / "log").read_text().splitlines())

    wheel, content, compiled = build("13.3.0")
    assert (wheel.suffix, compiled) == (".whl", 1)
    assert build("13.3.0") == (wheel, content, 1)
    _, library, compiled = build("14.2.0", "--library")
    assert compiled == 2
    # Of the new library, which differs by nothing but its age.
    before = wheel.stat().st_mtime_ns
    assert build("14.2.0")[2] == 2
    assert wheel.stat().st_mtime_ns > before
    assert build("14.2.0", "--library")[1:] == (library, 2)
