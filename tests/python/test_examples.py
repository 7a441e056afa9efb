"""The examples run as their comments say, and do what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import kvferry
from commands import GENEROUS, ROOT, needs, run

UNKNOWN = "decode: an unknown request fails by itself: "


def pipeline(prefill: list[str], decode: list[str], **environment: str) -> tuple[str, str]:
    """`prefill | decode`: what the decode engine printed, and what the prefill engine said."""
    # UCX would else write its messages among what is printed.
    env = {**os.environ, "KVFERRY_UCX_LIB": str(kvferry.ucx_info()["path"]), "UCX_LOG_FILE": "stderr", **environment}
    first = subprocess.Popen(prefill, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        second = subprocess.run(
            decode, cwd=ROOT, env=env, stdin=first.stdout, capture_output=True, text=True, timeout=GENEROUS
        )
        assert second.returncode == 0, second.stderr
        _, said = first.communicate(timeout=GENEROUS)
        assert first.returncode == 0, said
    finally:
        if first.poll() is None:
            first.kill()
        first.communicate()
    return second.stdout, said


def check(printed: str, said: str) -> None:
    first, second = printed.splitlines()
    assert re.fullmatch(r"decode: 40960 bytes of '?one'? are here, every byte right", first)
    # The cause names what the decode engine waited for.
    assert second.startswith(UNKNOWN)
    assert "verdict" in second
    lines = [line.replace("'", "") for line in said.splitlines() if line.startswith("prefill: ")]
    assert lines == ["prefill: the blocks of one are free again", "prefill: the blocks of two are free again"]


def test_two_agents_in_python() -> None:
    assert run(sys.executable, "examples/two_agents.py").endswith("every byte right\n")


def test_the_engines_in_python() -> None:
    command = [sys.executable, "examples/engine.py"]
    check(*pipeline([*command, "prefill"], [*command, "decode"]))


def compiled(prefix: Path, folder: Path, example: str) -> str:
    """A C example, compiled as its top says."""
    needs("pkg-config")
    needs("cc")
    # The prefix has a blank in its name, which pkg-config quotes as a shell reads it.
    flags = run("pkg-config", "--cflags", "--libs", "kvferry", PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig"))
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic")
    program = folder / example
    run("cc", *strict, f"examples/{example}.c", "-o", program, *shlex.split(flags))
    return str(program)


def test_two_agents_in_c(prefix: Path, tmp_path: Path) -> None:
    out = run(
        compiled(prefix, tmp_path, "two_agents"),
        LD_LIBRARY_PATH=str(prefix / "lib"),
        KVFERRY_UCX_LIB=str(kvferry.ucx_info()["path"]),
    )
    assert out.startswith(f"kvferry {kvferry.version()}: ")
    assert out.endswith("every byte right\n")


def test_the_engines_in_c(prefix: Path, tmp_path: Path) -> None:
    program = compiled(prefix, tmp_path, "engine")
    check(*pipeline([program, "prefill"], [program, "decode"], LD_LIBRARY_PATH=str(prefix / "lib")))


def test_a_missing_ucx_is_told_in_words(prefix: Path, tmp_path: Path) -> None:
    program = compiled(prefix, tmp_path, "two_agents")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(prefix / "lib"), "KVFERRY_UCX_LIB": "/no/such/libucp.so.0"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=GENEROUS)
    assert done.returncode == 1
    assert "ucx_missing" in done.stderr
    assert "/no/such/libucp.so.0" in done.stderr
