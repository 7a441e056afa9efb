"""Ray Serve LLM's own code for connectors with kvferry's backend, and what vLLM and the connector make of it."""
# Ray is imported only where it is.
# ruff: noqa: E402

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest

MISSING = [name for name in ("ray", "pyarrow", "jsonref") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(
        f"needs Ray Serve LLM ({', '.join(MISSING)}): run scripts/setup ray-serve and set PYTHONPATH=.deps/ray",
        allow_module_level=True,
    )

import kvferry
import kvferry.ray
import ray.serve.context
from kvferry.vllm.config import parse_options
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultConnectorBackend
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.utils import registry
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve.deployment import Application
from ray.serve.exceptions import RayServeException
from ray.serve.llm import LLMConfig
from ray.serve.schema import ReplicaRank
from vllm.config import KVTransferConfig

NODE = "10.1.2.3"
PREFILL, DECODE = "Prefill:tiny", "Decode:tiny"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFERRY_HOST", "KVFERRY_BIND", "KVFERRY_PORT", "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kvferry.ray, "get_node_ip_address", lambda: NODE)
    monkeypatch.setattr(ray.serve.context, "_INTERNAL_REPLICA_CONTEXT", None)
    kvferry.ray.register()


def llm_config(transfer: Any, experimental: dict[str, Any] | None = None, **engine: Any) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "tiny"},
        accelerator_config={"kind": "cpu"},
        experimental_configs=experimental or {},
        engine_kwargs={"kv_transfer_config": transfer, **engine},
    )


def transfer_config(role: str = "kv_producer", **more: Any) -> dict[str, Any]:
    return {"kv_connector": "KvferryConnector", "kv_role": role, **more}


def as_replica(rank: int, deployment: str = PREFILL, tag: str | None = None) -> None:
    """Makes this process what Ray makes a replica's."""
    ray.serve.context._set_internal_replica_context(
        replica_id=ReplicaID(tag or f"tag{rank}", DeploymentID(deployment)),
        servable_object=None,
        _deployment_config=DeploymentConfig(),
        rank=ReplicaRank(rank=rank, node_rank=0, local_rank=rank),
        world_size=2,
    )


def start(config: LLMConfig, rank: int, deployment: str = PREFILL) -> dict[str, Any]:
    """What the engine of a replica is given, after the steps that `VLLMEngine` takes before it makes one."""
    as_replica(rank, deployment)
    own: LLMConfig = pickle.loads(pickle.dumps(config))
    own.setup_engine_backend()
    given: dict[str, Any] = own.get_engine_config().get_initialization_kwargs()["kv_transfer_config"]
    return given


def scheduler_options(given: dict[str, Any]) -> dict[str, Any]:
    """What vLLM and the connector make of it. Both raise for what they do not take."""
    return dict(parse_options(KVTransferConfig(**given).kv_connector_extra_config).scheduler)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_two_replicas_of_one_host_have_engines_of_their_own(role: str) -> None:
    config = llm_config(transfer_config(role, engine_id="tiny", kv_connector_extra_config={"lease_ms": 5000}))
    deployment = DECODE if role == "kv_consumer" else PREFILL
    replicas = [start(config, rank, deployment) for rank in (0, 1)]
    assert [KVTransferConfig(**given).engine_id for given in replicas] == ["tiny-tag0", "tiny-tag1"]
    for given in replicas:
        assert scheduler_options(given) == {"host": NODE, "port": 0, "lease_ms": 5000}
        assert given["kv_role"] == role
    # The application's own is as it was.
    assert config.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"] == {"lease_ms": 5000}


def test_without_an_engine_id_it_is_the_replicas() -> None:
    config = llm_config(transfer_config())
    assert [start(config, rank)["engine_id"] for rank in (0, 1)] == ["tag0", "tag1"]


def test_both_replicas_can_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvferry.ray, "get_node_ip_address", lambda: "127.0.0.1")
    replicas = [start(llm_config(transfer_config()), rank) for rank in (0, 1)]
    listeners = []
    try:
        for given in replicas:
            listeners.append(kvferry.Listener({"engine_id": given["engine_id"], **scheduler_options(given)}))
        assert len({listener.address[1] for listener in listeners}) == 2
    finally:
        for listener in listeners:
            listener.close()


def test_a_base_gives_each_replica_the_port_of_its_rank() -> None:
    config = llm_config(transfer_config(), {kvferry.ray.PORT_BASE: 7000})
    assert [scheduler_options(start(config, rank))["port"] for rank in (0, 1, 5)] == [7000, 7001, 7005]
    # The library adds the data-parallel rank.
    ranked = llm_config(transfer_config(), {kvferry.ray.PORT_BASE: 7000}, data_parallel_rank=1)
    assert [scheduler_options(start(ranked, rank))["port"] + 1 for rank in (1, 3)] == [7001, 7003]


def test_what_the_operator_gives_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"port": 6000, "host": "kv.example"}
    config = llm_config(transfer_config(kv_connector_extra_config=given), {kvferry.ray.PORT_BASE: 7000})
    assert scheduler_options(start(config, 1)) == given
    bound = llm_config(transfer_config(kv_connector_extra_config={"bind": "10.9.9.9"}))
    assert "host" not in scheduler_options(start(bound, 0))
    monkeypatch.setenv("KVFERRY_PORT", "6001")
    monkeypatch.setenv("KVFERRY_HOST", "kv.example")
    assert scheduler_options(start(llm_config(transfer_config()), 0)) == {}


def test_within_multi_connector() -> None:
    child = transfer_config(kv_connector_extra_config={})
    config = llm_config(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": [child]},
        }
    )
    given = start(config, 0)["kv_connector_extra_config"]["connectors"][0]
    assert scheduler_options(given) == {"host": NODE, "port": 0}


def test_what_would_be_refused_later_is_refused_here() -> None:
    for transfer, expected in [
        (transfer_config("kv_sender"), "kv_role must be one of kv_producer, kv_consumer, kv_both, not 'kv_sender'"),
        ({"kv_connector": "KvferryConnector"}, "kv_role is missing"),
        (transfer_config(kv_rank=1), "unknown key 'kv_rank'"),
        (transfer_config(kv_connector_extra_config={"prot": 1}), '"prot"; did you mean "port"'),
        (transfer_config(kv_connector_extra_config={"port": "x"}), "port"),
        (transfer_config(kv_connector_extra_config=[1]), "kv_connector_extra_config must be a map"),
    ]:
        with pytest.raises(ValueError, match=expected):
            start(llm_config(transfer), 0)
    for base, expected in [("x", "must be a port number, not 'x'"), (65_535, "65536")]:
        with pytest.raises(ValueError, match=expected):
            start(llm_config(transfer_config(), {kvferry.ray.PORT_BASE: base}), 1)


def test_a_config_of_another_form_is_refused() -> None:
    as_replica(0)
    config = llm_config(KVTransferConfig(**transfer_config()))
    with pytest.raises(ValueError, match="as a dict, not as KVTransferConfig"):
        kvferry.ray.KvferryConnectorBackend(config).setup()


@pytest.mark.parametrize(("deployment", "role"), [(PREFILL, "kv_consumer"), (DECODE, "kv_producer")])
def test_a_role_that_hands_nothing_over_is_refused(deployment: str, role: str) -> None:
    with pytest.raises(ValueError, match=f"{deployment}.*{role}.*prefill_config kv_producer"):
        start(llm_config(transfer_config(role)), 0, deployment)
    # A deployment of another name may be for anything.
    start(llm_config(transfer_config(role)), 0, "LLMServer:tiny")


def test_outside_of_a_replica_it_fails() -> None:
    with pytest.raises(RayServeException):
        llm_config(transfer_config()).setup_engine_backend()


@pytest.mark.parametrize("least", [0, 1, 40])
def test_the_prefill_is_of_one_token(least: int) -> None:
    as_replica(0)
    config = llm_config(transfer_config())
    config.setup_engine_backend()
    backend = config.kv_connector_backend
    messages = [{"role": "user", "content": "Hello"}]
    for request in (
        CompletionRequest(model="tiny", prompt="Hello", n=3, max_tokens=50, min_tokens=least),
        ChatCompletionRequest(model="tiny", messages=messages, n=3, max_completion_tokens=50, min_tokens=least),
    ):
        prefill = backend.prepare_prefill_request(request=request, peer=None)
        assert (prefill.n, prefill.max_tokens, prefill.min_tokens) == (1, 1, min(least, 1))
        assert prefill.kv_transfer_params["do_remote_decode"] is True
        assert (request.n, request.min_tokens) == (3, least)


def test_an_application_is_built_with_the_backend() -> None:
    KVConnectorBackendFactory.unregister_backend("KvferryConnector")

    def config(role: str) -> dict[str, Any]:
        loading = {"model_id": "tiny"}
        return {"model_loading_config": loading, "engine_kwargs": {"kv_transfer_config": transfer_config(role)}}

    app = kvferry.ray.build_pd_openai_app(
        {"prefill_config": config("kv_producer"), "decode_config": config("kv_consumer")}
    )
    assert isinstance(app, Application)
    assert KVConnectorBackendFactory.get_backend_class("KvferryConnector") is kvferry.ray.KvferryConnectorBackend


def test_registering_again_is_good_for_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas look a connector up in the cluster, where this process puts it when it connects."""
    monkeypatch.setattr(registry, "_internal_kv_initialized", lambda: False)
    known = registry.get_registry("kv_connector_backend")
    # As connecting does.
    known._pending.clear()
    kvferry.ray.register()
    loader = pickle.loads(known._pending["KvferryConnector"])
    assert loader() is kvferry.ray.KvferryConnectorBackend
    KVConnectorBackendFactory.unregister_backend("KvferryConnector")
    assert KVConnectorBackendFactory.get_backend_class("KvferryConnector") is DefaultConnectorBackend
