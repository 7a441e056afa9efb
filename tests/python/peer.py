"""A second process for tests: runs a function of a test module with one end of a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

GENEROUS = 60.0
"""Seconds that anything may take on a busy machine. No test waits so long when all goes well."""


def receive(pipe: Connection) -> Any:
    """What the other process sent; an error when it sends nothing."""
    if not pipe.poll(GENEROUS):
        raise AssertionError("the other process sent nothing")
    return pipe.recv()


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
