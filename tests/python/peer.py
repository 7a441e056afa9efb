"""A second process for tests: runs a function of a test module with one end of a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GENEROUS = 60.0
"""Seconds that anything may take on a busy machine. No test waits so long when all goes well."""


def receive(pipe: Connection) -> Any:
    """What the other process sent; an error when it sends nothing."""
    if not pipe.poll(GENEROUS):
        raise AssertionError("the other process sent nothing")
    return pipe.recv()


def _is_stopped(task: Path) -> bool:
    try:
        stat = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # The thread has ended.
        return True
    # The state follows the name, which is in parentheses.
    return stat.rpartition(")")[2].split()[0] == "T"


def freeze(pid: int) -> None:
    """The process does nothing from now on, and is not gone. Returns when all of its threads have stopped: on a busy
    machine the first of them may take a while to see the signal, and until then the others go on."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + GENEROUS
    while not all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        time.sleep(0.001)


@contextmanager
def process(target: Callable[..., None], *arguments: object, ends: int = 0) -> Iterator[Connection]:
    """Runs `target(pipe, *arguments)` in a fresh process; ends it by its pid in any case, and checks how it ended:
    with the status `ends`, of a process that its test kills the signal's negative number."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *arguments))
    child.start()
    theirs.close()
    try:
        yield ours
        ours.close()
        child.join(GENEROUS)
        assert child.exitcode == ends
    finally:
        if child.is_alive():
            child.kill()
        child.join()
