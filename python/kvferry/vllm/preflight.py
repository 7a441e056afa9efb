"""Checks the connector's configuration before vLLM loads a model, which may take minutes.

vLLM makes connectors after that, and calls nothing of theirs before. So this wraps the constructor of its executors,
which load the model.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from .._errors import InvalidArgumentError, make_error
from .beside import CONNECTOR_NAME, check_children, children

_MODULE = "vllm.v1.executor.abstract"
_MARK = "_kvferry_preflight"


def watch() -> None:
    """Makes executors of this process check the configuration first. Does nothing where vLLM's executors are not
    imported. May be called any number of times."""
    executor: Any = getattr(sys.modules.get(_MODULE), "Executor", None)
    # None has an __init__ too.
    if executor is None or hasattr(executor.__init__, _MARK):
        return
    method = executor.__init__

    @functools.wraps(method)
    def checked(self: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        check(vllm_config)
        method(self, vllm_config, *arguments, **named)

    setattr(checked, _MARK, True)
    executor.__init__ = checked


def check(vllm_config: Any) -> None:
    """Raises `InvalidArgumentError` if `vllm_config` names `KvferryConnector`, which would refuse to start."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    whole = {
        "kv_connector": transfer.kv_connector,
        "kv_role": transfer.kv_role,
        "kv_load_failure_policy": transfer.kv_load_failure_policy,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }
    every = children(transfer.kv_connector, transfer.kv_connector_extra_config) or [whole]
    own = next((config for config in every if config.get("kv_connector") == CONNECTOR_NAME), None)
    if own is None:
        return
    check_children(every)
    # Only here: vLLM loads the plug-in in each of its processes, most of which never come so far.
    from .bootstrap_port import rank_of
    from .start_check import Engine, problems

    parallel = vllm_config.parallel_config
    engine = Engine(
        extra=own.get("kv_connector_extra_config") or {},
        role=str(own.get("kv_role")),
        policy=str(own.get("kv_load_failure_policy") or "fail"),
        engine_id=transfer.engine_id or "check",
        index=parallel.data_parallel_index,
        is_head=not parallel.node_rank_within_dp,
        has_bootstrap=rank_of(parallel) == 0,
    )
    try:
        wrong = problems(engine)
    except InvalidArgumentError:
        raise
    except Exception as error:
        # A check must not break a start. The engine reports what is wrong when it comes to it.
        logging.getLogger("vllm.kvferry").warning("The configuration could not be judged before the start: %s", error)
        return
    if wrong:
        raise make_error(-1, "invalid_argument", "; ".join(wrong))
