"""Ray Serve LLM's backend for `KvferryConnector`.

Ray gives all replicas of a deployment the same `kv_transfer_config`; the backend makes the engines of each replica
distinct: an engine id and a port of its own, at the node's address as Ray knows it. The application calls `register`
before it deploys, or is built by `build_pd_openai_app` of this module.

Written for Ray 2.60, whose interface for backends is in ray/llm/_internal/serve/engines/vllm/kv_transfer.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend, DefaultPDProtocolMixin
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve import llm
from ray.util import get_node_ip_address

from .bench.errors import UsageError
from .cli.config import extra_config
from .vllm import CONNECTOR_NAME
from .vllm.config import describe

PORT_BASE = "KVFERRY_PORT_BASE"
"""Key of `LLMConfig.experimental_configs`: replica N of the deployment listens at this port plus N."""

_USELESS = {"Prefill:": "kv_consumer", "Decode:": "kv_producer"}
"""How Ray begins the names of the two deployments, and the role with which the engines would hand over nothing."""


class KvferryConnectorBackend(DefaultPDProtocolMixin, BaseConnectorBackend):
    """Prepares a replica's engine, and the requests that it passes on."""

    def setup(self) -> None:
        """Completes `kv_transfer_config` in place.

        Raises `ValueError` for what vLLM or the connector would refuse, and for a role with which the deployment would
        hand over nothing; `RayServeException` outside of a replica.
        """
        replica = serve.get_replica_context()
        config = self.kv_transfer_config
        if not isinstance(config, dict):
            raise UsageError(f"Ray Serve LLM takes kv_transfer_config as a dict, not as {type(config).__name__}")
        role = extra_config(config).role
        for beginning, useless in _USELESS.items():
            if replica.deployment.startswith(beginning) and role == useless:
                raise UsageError(
                    f"deployment {replica.deployment!r} has kv_role {role!r}: "
                    "give prefill_config kv_producer and decode_config kv_consumer"
                )
        # MultiConnector's backend passes on what is written into a map that its child has, and nothing else.
        extra = config.get("kv_connector_extra_config")
        if not isinstance(extra, dict):
            extra = config["kv_connector_extra_config"] = {}
        rows = describe(extra)["settings"]
        # A listener without a scheduler has a port of the same name.
        sources = {setting["key"]: setting["source"] for setting in rows if "scheduler" in setting["parts"]}
        if sources["port"] == "default":
            extra["port"] = self._port(replica.rank.rank)
        if sources["host"] == "default" and sources["bind"] == "default":
            # The one that is found may be one that Ray's other nodes do not reach.
            extra["host"] = get_node_ip_address()
        describe(extra)
        given = config.get("engine_id") or ""
        if not isinstance(given, str):
            raise UsageError(f"engine_id must be a text, not {given!r}")
        config["engine_id"] = f"{given}-{replica.replica_tag}" if given else replica.replica_tag

    def _port(self, rank: int) -> int:
        """The port of the replica's listener, 0 for a free one. The library adds the data-parallel rank."""
        base = self.llm_config.experimental_configs.get(PORT_BASE)
        if base is None:
            return 0
        if not isinstance(base, int) or isinstance(base, bool):
            raise UsageError(f"experimental_configs: {PORT_BASE} must be a port number, not {base!r}")
        return base + rank - int(self.llm_config.engine_kwargs.get("data_parallel_rank") or 0)

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """The request for the prefill engine: one sample of one token, whatever the client asks for."""
        prefill = super().prepare_prefill_request(request=request, peer=peer)
        prefill.n = 1
        if prefill.min_tokens:
            prefill.min_tokens = 1
        return prefill


def register() -> None:
    """Makes the backend known to Ray's replicas, in place of any other for the same connector.

    Call it in the program that deploys, once for each cluster that it connects to. Ray keeps the backend's name in the
    cluster; replicas import this module by it, and need kvferry installed.
    """
    if KVConnectorBackendFactory.is_registered(CONNECTOR_NAME):
        # Perhaps only in this process, from a cluster before.
        KVConnectorBackendFactory.unregister_backend(CONNECTOR_NAME)
    backend = f"{__name__}:{KvferryConnectorBackend.__name__}"
    KVConnectorBackendFactory.register_backend(CONNECTOR_NAME, backend)


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Any:
    """As `ray.serve.llm.build_pd_openai_app`, of deployments that have the backend; for the `import_path` of a Serve
    configuration."""
    register()
    return llm.build_pd_openai_app(pd_serving_args)
