"""Functions of `inside`, each called in a fresh process that has this one's environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

LIMIT_S = 120.0
"""How long a call may take. UCX opens in a second; a connection is given up after ten."""
KILLED_S = 1.0
"""How long one that was killed may take to be gone."""
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
    """The process did not answer: how it ended, and its last words. `printed` is all that it had printed until a time
    limit passed, `timed_out` whether one did."""

    printed: str = ""
    timed_out: bool = False


def memory_file() -> BinaryIO:
    """An empty file, in no folder where Python can make one: a container may have none that can be written to."""
    # Pythons that were built for an old C library lack it, such as uv's.
    make = getattr(os, "memfd_create", None)
    return tempfile.TemporaryFile() if make is None else open(make("kvferry"), "w+b")


def run(
    command: Sequence[str],
    limit_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stderr: int = subprocess.STDOUT,
) -> tuple[int, str]:
    """Runs a command; its exit status and output. Raises `ChildError` if it has not ended within `limit_s` seconds.

    A process that a hung driver keeps from ending, killed or not, is left behind; `subprocess.run` would wait for it.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        pass_fds=pass_fds,
        env=None if environment is None else dict(environment),
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        if process.stdout is not None:
            process.stdout.close()
        if isinstance(error, subprocess.TimeoutExpired):
            late = ChildError(f"no answer within {limit_s:.1f} s")
            late.printed, late.timed_out = (error.output or b"").decode(errors="replace").strip(), True
            raise late from None
        raise
    return process.returncode, printed.decode(errors="replace").strip()


def call(function: str, *arguments: Any, environment: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> Any:
    """Calls `inside.function(*arguments)` in a process of its own. Arguments and result are of JSON's types.

    `environment` replaces this process's. What the function or UCX prints is dropped unless the process dies. It has
    `limit_s` seconds, or as many as are left.
    """
    # A file and not a pipe: UCX prints where it likes, and nobody has to read two ends at once.
    with memory_file() as answer:
        arguments_of = [json.dumps(sys.path), str(answer.fileno()), function, json.dumps(arguments)]
        code, words = run(
            [sys.executable, "-c", _START, *arguments_of],
            min(limit_s, LIMIT_S, left()),
            environment=environment,
            pass_fds=[answer.fileno()],
        )
        answer.seek(0)
        data = answer.read()
    if not data:
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        raise ChildError(f"the process {ended}: {words[-400:] or 'it said nothing'}")
    return json.loads(data)


def main() -> None:
    """The process's own side."""
    from . import inside

    _, descriptor, function, arguments = sys.argv[1:]
    result = json.dumps(getattr(inside, function)(*json.loads(arguments)))
    with open(int(descriptor), "w", encoding="utf-8", closefd=False) as answer:
        answer.write(result)
