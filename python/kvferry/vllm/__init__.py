"""kvferry as a KV connector of vLLM.

vLLM finds it by the entry point `vllm.general_plugins`, so this is all that a user writes:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_role": "kv_producer"}'

Without the entry point (a source tree on `PYTHONPATH`), add `"kv_connector_module_path": "kvferry.vllm"`.

Importing this package imports neither vLLM nor torch: vLLM loads plug-ins in every one of its processes, most of which
never make a connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import dynamo, preflight
from .beside import CONNECTOR_NAME

if TYPE_CHECKING:
    from .connector import KvferryConnector

__all__ = ["CONNECTOR_NAME", "KvferryConnector", "register"]


def register() -> None:
    """Makes `KvferryConnector` known to vLLM by name, and to NVIDIA Dynamo in its workers, and has vLLM judge its
    configuration before a model is loaded. May be called any number of times.

    vLLM calls it in each of its processes, in some more than once, and its registry refuses a name that it has: so the
    registry is asked first. A name that somebody else registered is left alone.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, __name__, CONNECTOR_NAME)
    dynamo.register(CONNECTOR_NAME)
    preflight.watch()


def __getattr__(name: str) -> Any:
    if name == CONNECTOR_NAME:
        from .connector import KvferryConnector

        return KvferryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
