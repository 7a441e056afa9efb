"""What the programs begin with: where things are, a folder for the logs of a run, free ports, a line of progress."""

from __future__ import annotations

import random
import socket
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DEPS = ROOT / ".deps"
_PORTS = range(20_000, 32_000)


def make_folder(program: str, prefix: str = "") -> Path:
    """A new folder for one run of a program."""
    folder = ROOT / "target" / program / datetime.now().strftime(f"{prefix}%Y%m%d-%H%M%S-%f")
    folder.mkdir(parents=True)
    return folder


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now.

    It lies below the range from which the kernel takes ports for connections (32768 and up by default): a server that
    starts slowly would else find its port taken by any connection made meanwhile.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free TCP port from {_PORTS.start} to {_PORTS.stop - 1} on 127.0.0.1")
