"""libkvferry's log lines as records of Python's `logging`, under the logger `kvferry`."""

from __future__ import annotations

import atexit
import logging

from . import _lib

_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG, 5: 5}
_NUMBERS = {"error": 1, "warn": 2, "info": 3, "debug": 4, "trace": 5}
_routed = False


def _emit(level: int, target: str, text: str) -> None:
    # Targets are Rust module paths such as kvferry::agent::engine: the logger is kvferry.agent.engine.
    logging.getLogger(target.replace("::", ".")).log(_LEVELS.get(level, logging.INFO), "%s", text)


def route(level: str = "info") -> None:
    """Sends log lines of `level` ("error", "warn", "info", "debug" or "trace") and above to `logging`.

    Lines come from any of the library's threads. Undone by `unroute`, and at interpreter exit.
    """
    global _routed
    number = _NUMBERS.get(level)
    if number is None:
        raise ValueError(f"unknown log level {level!r}, expected one of {', '.join(_NUMBERS)}")
    _lib.log_set(_emit, number)
    if not _routed:
        atexit.register(unroute)
        _routed = True


def unroute() -> None:
    """Stops what `route` started: lines go to standard error as `KVFERRY_LOG` says."""
    _lib.log_unset()
