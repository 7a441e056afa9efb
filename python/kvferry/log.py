"""libkvferry's log lines as records of Python's `logging`, under the logger `kvferry`."""

from __future__ import annotations

import atexit
import logging
from typing import Any

from . import _lib

_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG, 5: 5}
_NUMBERS = {"error": 1, "warn": 2, "info": 3, "debug": 4, "trace": 5}
_callback: Any = None
_routed = False


def route(level: str = "info") -> None:
    """Sends log lines of `level` ("error", "warn", "info", "debug" or "trace") and above to `logging`.

    Lines come from any of the library's threads, which wait for the handlers. In a handler, calls of this package that
    reach the library raise `InvalidArgumentError`. Undone by `unroute`, and at interpreter exit.
    """
    global _callback, _routed
    number = _NUMBERS.get(level)
    if number is None:
        raise ValueError(f"unknown log level {level!r}, expected one of {', '.join(_NUMBERS)}")
    ffi = _lib.load().ffi

    def emit(level: int, target: Any, message: Any, _user: Any) -> None:
        _lib.this_thread.is_in_log_callback = True
        try:
            # Targets are Rust module paths such as kvferry::agent::engine: the logger is kvferry.agent.engine.
            name, text = (ffi.string(part).decode("utf-8", "replace") for part in (target, message))
            logging.getLogger(name.replace("::", ".")).log(_LEVELS.get(level, logging.INFO), "%s", text)
        finally:
            _lib.this_thread.is_in_log_callback = False

    callback = ffi.callback("void(uint32_t, const char *, const char *, void *)", emit)
    _lib.call("kvf_log_set", callback, ffi.NULL, number)
    # Only now may the callback that was set before be collected: the library has stopped calling it.
    _callback = callback
    if not _routed:
        atexit.register(unroute)
        _routed = True


def unroute() -> None:
    """Stops what `route` started: lines go to standard error as `KVFERRY_LOG` says."""
    global _callback
    _lib.call("kvf_log_unset")
    # Only now: when the call returns, no callback is running or will be called.
    _callback = None
