"""Functions of `inside`, each called in a fresh process that has this one's environment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

LIMIT_S = 120.0
"""How long a call may take. UCX opens in a second; a connection is given up after ten."""
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kvferry.doctor.child import main; main()"


_until = float("inf")


def end_after(seconds: float) -> None:
    """From now on everything that the doctor does in other processes has so long, all together."""
    global _until
    _until = time.monotonic() + seconds


def left() -> float:
    """Seconds that are left."""
    return max(_until - time.monotonic(), 0.0)


class ChildError(Exception):
    """The process did not answer: how it ended, and its last words."""


def call(function: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """What `inside.function(*arguments)` returns in a process of its own. Arguments and result are of JSON's types.

    `environment` replaces this process's. What the function or UCX prints is dropped unless the process dies.
    """
    limit = min(LIMIT_S, left())
    # A file and not a pipe: UCX prints where it likes, and nobody has to read two ends at once.
    with tempfile.TemporaryFile() as answer:
        arguments_of = [json.dumps(sys.path), str(answer.fileno()), function, json.dumps(arguments)]
        try:
            done = subprocess.run(
                [sys.executable, "-c", _START, *arguments_of],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[answer.fileno()],
                env=None if environment is None else dict(environment),
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            raise ChildError(f"no answer within {limit:.1f} s") from None
        answer.seek(0)
        data = answer.read()
    if not data:
        words = done.stdout.decode(errors="replace").strip()[-400:] or "it said nothing"
        code = done.returncode
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        raise ChildError(f"the process {ended}: {words}")
    return json.loads(data)


def main() -> None:
    """The process's own side."""
    from . import inside

    _, descriptor, function, arguments = sys.argv[1:]
    result = json.dumps(getattr(inside, function)(*json.loads(arguments)))
    with open(int(descriptor), "w", encoding="utf-8", closefd=False) as answer:
        answer.write(result)
