"""Finds what in its configuration would stop an engine's start, before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._errors import InvalidArgumentError
from ..doctor.child import ChildError, call
from . import bootstrap_port
from .config import Options, describe, multi_turn_refusal, parse_options
from .files import missing_files

_REFUSALS = ("invalid_argument", "not_found", "unsupported", "ucx_missing", "exhausted", "address_in_use")
"""Kinds of errors that an engine's own start would end with too."""


@dataclass(frozen=True)
class Engine:
    """An engine that is to start: its `kv_connector_extra_config` and what else decides what it opens. `role` and
    `policy` are vLLM's `kv_role` and `kv_load_failure_policy`; the listener tells peers meanwhile that `engine_id` is
    starting; `index` is added to the listener's port; `is_head` is whether the scheduler is on this host,
    `has_bootstrap` whether this rank would run the server of `bootstrap_port`.
    """

    extra: Mapping[str, Any]
    role: str
    policy: str = "fail"
    engine_id: str = "check"
    index: int = 0
    is_head: bool = True
    has_bootstrap: bool = True

    @property
    def sends(self) -> bool:
        """Whether it prefills for others."""
        return self.role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether it loads what others have prefilled."""
        return self.role != "kv_producer"


def problems(engine: Engine) -> list[str]:
    """Returns what an engine would refuse at its start on this machine, a text each.

    In a process of its own, a worker and the scheduler side start with these options and bind the listener's port, so
    that their own code decides. Takes about a second.

    Raises `InvalidArgumentError` for an unknown key or a wrong value, `ChildError` if that process gave no answer or
    failed for a reason that may pass.
    """
    rows = describe(engine.extra)["settings"]
    options = parse_options(engine.extra)
    if wrong := missing_files(rows):
        return wrong
    if options.multi_turn and (why := multi_turn_refusal(engine.sends, engine.loads, engine.policy)) is not None:
        wrong.append(why)
    wrong += _cannot_start(engine, options)
    if engine.is_head and engine.sends and engine.has_bootstrap and options.bootstrap_port is not None:
        try:
            bootstrap_port.listen(options.bootstrap_port, bootstrap_port.bound(options)).close()
        except InvalidArgumentError as error:
            wrong.append(error.message)
    return wrong


def _cannot_start(engine: Engine, options: Options) -> list[str]:
    scheduler = None
    if engine.is_head:
        listens = engine.sends or options.multi_turn
        scheduler = {
            **options.scheduler,
            "engine_id": engine.engine_id,
            "data_parallel_index": engine.index,
            "push": listens,
        }
    # Files that a running engine has are left alone.
    environment = {**os.environ, "KVFERRY_METRICS_FILE": "", "KVFERRY_LOG": "error"}
    errors = call("start", dict(options.worker), scheduler, environment=environment)
    refused = dict.fromkeys(str(error["message"]) for error in errors if error["error"] in _REFUSALS)
    if errors and not refused:
        raise ChildError(str(errors[0]["message"]))
    return list(refused)
