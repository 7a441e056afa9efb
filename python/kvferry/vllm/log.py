"""Where this package's log lines go."""

from __future__ import annotations

import logging

from vllm.logger import init_logger

from kvferry import log as kvferry_log

logger = init_logger("vllm.kvferry")
"""Below vLLM's own logger, because that is the one to which vLLM gives a handler and a level."""

_routed = False


def route_library_log() -> None:
    """Sends the library's log lines where vLLM's go, at the level of vLLM's logger. The first call counts."""
    global _routed
    if _routed:
        return
    _routed = True
    target = logging.getLogger("kvferry")
    if not target.handlers:
        for handler in logging.getLogger("vllm").handlers:
            target.addHandler(handler)
        target.setLevel(logger.getEffectiveLevel())
        target.propagate = False
    level = target.getEffectiveLevel()
    if level <= logging.DEBUG:
        kvferry_log.route("debug")
    elif level <= logging.INFO:
        kvferry_log.route("info")
    elif level <= logging.WARNING:
        kvferry_log.route("warn")
    else:
        kvferry_log.route("error")
