"""Running programs in tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENEROUS = 600
"""Seconds that a command may take on a busy machine; some build the library."""


def needs(program: str) -> None:
    """Skips without `program`, unless KVFERRY_REQUIRE names it."""
    if shutil.which(program) is None:
        text = f"{program} is not installed"
        if program in os.environ.get("KVFERRY_REQUIRE", "").split(","):
            pytest.fail(text)
        pytest.skip(text)


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=GENEROUS,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout
