"""What scripts that run at the same time share: locks, and the wheel in target/wheels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GENEROUS, ROOT

LOCKS = 'set -euo pipefail; . scripts/lib/common.sh; KVF_DEPS="$1"; export -f with_lock say; '
"""The locks of a checkout of its own, whose folder is the first argument."""


def bash(script: str, *arguments: str | Path, **pipes: int) -> subprocess.Popen[str]:
    words = [str(argument) for argument in arguments]
    return subprocess.Popen(["bash", "-c", script, "-", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, **pipes)


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    holder = bash(LOCKS + "with_lock x bash -c 'echo held; read -r'", tmp_path, stdin=subprocess.PIPE)
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    waiter = bash(LOCKS + "with_lock x echo got", tmp_path, stderr=subprocess.PIPE)
    assert waiter.stderr is not None
    assert "waiting for another script that holds the lock x" in waiter.stderr.readline()
    # Another lock is free.
    other = bash(LOCKS + "with_lock y echo got", tmp_path)
    assert other.communicate(timeout=GENEROUS)[0] == "got\n"
    assert waiter.poll() is None
    holder.communicate("\n", timeout=GENEROUS)
    assert waiter.communicate(timeout=GENEROUS)[0] == "got\n"


def test_what_runs_with_a_lock_takes_it_again(tmp_path: Path) -> None:
    inner = 'KVF_DEPS="$1"; with_lock x echo "inside of $1"'
    script = LOCKS + f"with_lock x bash -c '{inner}' - $1; with_lock x bash -c '{inner}' - $2; with_lock x false"
    done = bash(script, tmp_path / "a", tmp_path / "b")
    assert done.communicate(timeout=60)[0] == f"inside of {tmp_path / 'a'}\ninside of {tmp_path / 'b'}\n"
    assert done.returncode == 1


MATURIN = """#!/bin/sh
# In place of maturin: tells which wheels there are, and makes one unless it is to fail.
ls target/wheels >"$KVF_SEEN"
flock -n .deps/.lock-wheel true && echo "not locked" >>"$KVF_SEEN"
while [ "$1" != --out ]; do shift; done
mkdir -p "$2"
echo new >"$2/kvferry-2.0-py3-none-any.whl"
exit "$KVF_RESULT"
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_wheel_is_there_while_it_is_built_anew(tmp_path: Path, fails: bool) -> None:
    checkout = tmp_path / "checkout"
    (checkout / ".deps/venv/bin").mkdir(parents=True)
    folders = ("scripts", "python", "include", "proto", "src", "ucx-sys")
    for name in (*folders, "Cargo.toml", "Cargo.lock", "LICENSE", "build.rs"):
        (checkout / name).symlink_to(ROOT / name)
    # No link: it would not know of its virtual environment.
    programs = {"python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', "maturin": MATURIN}
    for name, text in programs.items():
        (checkout / ".deps/venv/bin" / name).write_text(text)
        (checkout / ".deps/venv/bin" / name).chmod(0o755)
    wheels = checkout / "target/wheels"
    wheels.mkdir(parents=True)
    (wheels / "kvferry-1.0-py3-none-any.whl").write_text("old")
    (wheels / "kvferry_ucx-1.0-py3-none-any.whl").write_text("ucx")
    seen = tmp_path / "seen"
    variables = {**os.environ, "KVF_SEEN": str(seen), "KVF_RESULT": str(int(fails))}
    command = [checkout / "scripts/build-wheel", "--local"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=GENEROUS)
    assert done.returncode == int(fails), done.stderr
    before = ["kvferry-1.0-py3-none-any.whl", "kvferry_ucx-1.0-py3-none-any.whl"]
    assert seen.read_text().splitlines() == before, "the old one is there, and the lock is held"
    now = sorted(path.name for path in wheels.iterdir())
    if fails:
        assert now == before
    else:
        assert done.stdout == "target/wheels/kvferry-2.0-py3-none-any.whl\n"
        assert now == ["kvferry-2.0-py3-none-any.whl", "kvferry_ucx-1.0-py3-none-any.whl"]
