"""Running programs in tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENEROUS = 600
"""Seconds that a command may take on a busy machine; some build the library."""


WITHOUT_FOLDERS = """
import sys, tempfile
def refuse(*_, **__):
    raise FileNotFoundError(2, "No usable temporary directory found")
tempfile._get_default_tempdir = tempfile.mkdtemp = tempfile.mkstemp = refuse
tempfile.TemporaryFile = tempfile.NamedTemporaryFile = refuse
from kvferry.cli import main
sys.exit(main(sys.argv[sys.argv.index("kvferry") + 1 :]))
"""
"""A program that is `python -m kvferry` where no folder can be written to, as in a container with a read-only root. Its
arguments are that command."""


def is_required(what: str) -> bool:
    """Whether KVFERRY_REQUIRE names `what`."""
    return what in re.split("[, ]", os.environ.get("KVFERRY_REQUIRE", ""))


def skip(what: str, why: str) -> NoReturn:
    """A visible skip for want of `what`, which fails where KVFERRY_REQUIRE names it."""
    if is_required(what):
        pytest.fail(f"{what} is required and not there: {why}")
    pytest.skip(f"needs {what}: {why}")


def needs(program: str) -> None:
    """Skips without `program`."""
    if shutil.which(program) is None:
        skip(program, "it is not installed")


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
