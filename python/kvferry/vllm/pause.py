"""Notices that vLLM pauses, falls asleep or shuts down, which it does not announce to connectors.

Each of them waits until the engine has no requests left, and a request whose blocks a connector keeps counts as one. So
conversations that are kept for their next turns would delay them for as long as their leases last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from .log import logger

_MARK = "_kvferry_notices"


class PauseListener(Protocol):
    """A connector that acts on a pause."""

    def engine_paused(self, paused: bool) -> None:
        """Notes that the engine ends its work now, or resumes it."""


def watch() -> None:
    """Makes this process's schedulers notify their connectors (`PauseListener`), also those within `MultiConnector`."""
    try:
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
    except ImportError as error:
        logger.warning_once("a pause, a sleep or a shutdown waits for the conversations that are kept: %s", error)
        return

    def paused(scheduler: Any) -> None:
        _notify(scheduler, scheduler.pause_state != PauseState.UNPAUSED)

    def shuts_down(core: Any) -> None:
        if core.shutdown_state != EngineShutdownState.RUNNING:
            _notify(core.scheduler, True)

    # Sleeps pause, too. The second is called before every step.
    _call_behind(Scheduler, "set_pause_state", paused)
    _call_behind(EngineCoreProc, "_handle_shutdown", shuts_down)


def _call_behind(owner: type, name: str, notice: Callable[[Any], None]) -> None:
    """Makes a method call `notice` with its object before it returns."""
    method = getattr(owner, name, None)
    if method is None:
        logger.warning_once(
            "vLLM has no %s.%s: a pause, a sleep or a shutdown waits for the conversations that are kept", owner, name
        )
        return
    if hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def noticed(self: Any, *arguments: Any, **named: Any) -> Any:
        answer = method(self, *arguments, **named)
        notice(self)
        return answer

    setattr(noticed, _MARK, True)
    setattr(owner, name, noticed)


def _notify(scheduler: Any, paused: bool) -> None:
    connector = getattr(scheduler, "connector", None)
    for each in (connector, *getattr(connector, "sub_connectors", ())):
        if (engine_paused := getattr(each, "engine_paused", None)) is not None:
            engine_paused(paused)
