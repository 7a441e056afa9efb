"""What the programs begin with: where things are, a folder for the logs of a run, and a word on how far it is."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DEPS = ROOT / ".deps"


def make_folder(program: str, prefix: str = "") -> Path:
    """A new folder for one run of a program."""
    folder = ROOT / "target" / program / datetime.now().strftime(f"{prefix}%Y%m%d-%H%M%S-%f")
    folder.mkdir(parents=True)
    return folder


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
