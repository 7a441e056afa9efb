"""Notices that vLLM pauses, falls asleep or shuts down, of which it tells connectors nothing.

Each of them waits until the engine has nothing left to do, and a request whose blocks a connector keeps counts as
something to do. So conversations that are kept for their next turns would hold them up for as long as their leases
last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from .log import logger

_MARK = "_kvferry_notices"


class Told(Protocol):
    """A connector that wants to know."""

    def engine_paused(self, paused: bool) -> None:
        """The engine ends its work now, or begins again."""


def watch() -> None:
    """From now on, schedulers of this process tell their connectors (`Told`), also those within `MultiConnector`."""
    try:
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
    except ImportError as error:
        logger.warning_once("a pause, a sleep or a shutdown waits for the conversations that are kept: %s", error)
        return

    def paused(scheduler: Any) -> None:
        _tell(scheduler, scheduler.pause_state != PauseState.UNPAUSED)

    def shuts_down(core: Any) -> None:
        if core.shutdown_state != EngineShutdownState.RUNNING:
            _tell(core.scheduler, True)

    # Sleeps pause, too. The second is called before every step.
    _call_behind(Scheduler, "set_pause_state", paused)
    _call_behind(EngineCoreProc, "_handle_shutdown", shuts_down)


def _call_behind(owner: type, name: str, notice: Callable[[Any], None]) -> None:
    """Has a method call `notice` with its object before it returns."""
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


def _tell(scheduler: Any, paused: bool) -> None:
    connector = getattr(scheduler, "connector", None)
    for each in (connector, *getattr(connector, "sub_connectors", ())):
        if (told := getattr(each, "engine_paused", None)) is not None:
            told(paused)
