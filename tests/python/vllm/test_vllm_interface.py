"""vLLM's connector interface, as recorded from the versions that are supported, against `KvferryConnector`."""

from __future__ import annotations

import inspect
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import kvferry.vllm
import pytest
import vllm
from kvferry.vllm import KvferryConnector
from kvferry.vllm.pause import PauseListener
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA, supports_hma

pytestmark = pytest.mark.release

RECORDED: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "data" / "connector_interface.json").read_text()
)["versions"]


def shape(owner: type, name: str) -> dict[str, Any]:
    """A method in the form in which the interface is recorded."""
    raw = inspect.getattr_static(owner, name)
    if isinstance(raw, property):
        return {"kind": "property", "params": [], "defaults": 0, "kwargs": False}
    kind = "classmethod" if isinstance(raw, classmethod) else "method"
    parameters = list(inspect.signature(raw.__func__ if kind == "classmethod" else raw).parameters.values())[1:]
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_KEYWORD) for p in parameters), (owner, name)
    return {
        "kind": kind,
        "params": [p.name for p in named],
        "defaults": sum(p.default is not p.empty for p in named),
        "kwargs": len(named) < len(parameters),
    }


def without_abstract(recorded: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recorded.items() if key != "abstract"}


@pytest.mark.parametrize("version", RECORDED)
def test_overrides_take_what_vllm_passes(version: str) -> None:
    overridden = 0
    for name, recorded in RECORDED[version].items():
        if name in vars(KvferryConnector):
            overridden += 1
            assert shape(KvferryConnector, name) == without_abstract(recorded), name
    assert overridden > 20


@pytest.mark.parametrize("version", RECORDED)
def test_nothing_that_vllm_needs_is_missing(version: str) -> None:
    needed = {name for name, recorded in RECORDED[version].items() if recorded["abstract"]}
    assert needed
    assert needed <= set(vars(KvferryConnector))


def test_public_methods_exist_in_a_supported_vllm() -> None:
    # `pause` calls what it tells of.
    known = set(vars(PauseListener)).union(*RECORDED.values())
    assert {name for name in vars(KvferryConnector) if not name.startswith("_")} <= known


def test_the_record_is_that_of_the_installed_vllm() -> None:
    release = vllm.__version__.split("+")[0]
    assert release in RECORDED, f"record the interface of {release}"
    for name, recorded in RECORDED[release].items():
        owner = KVConnectorBase_V1 if hasattr(KVConnectorBase_V1, name) else SupportsHMA
        assert shape(owner, name) == without_abstract(recorded), name


def test_found_by_module_path() -> None:
    config = KVTransferConfig(
        kv_connector="KvferryConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_producer"
    )
    assert KVConnectorFactory.get_connector_class(config) is KvferryConnector
    assert KVConnectorFactory.supports_hma_config(config)
    assert supports_hma(KvferryConnector)


def test_registering_twice_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop("KvferryConnector", None)
    entry = EntryPoint("kvferry", "kvferry.vllm:register", "vllm.general_plugins")
    entry.load()()
    entry.load()()
    config = KVTransferConfig(kv_connector="KvferryConnector", kv_role="kv_consumer")
    assert KVConnectorFactory.get_connector_class(config) is KvferryConnector


def test_a_name_that_is_taken_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {"KvferryConnector": lambda: KVConnectorBase_V1})
    kvferry.vllm.register()
    assert KVConnectorFactory.get_connector_class_by_name("KvferryConnector") is KVConnectorBase_V1


def test_unknown_attribute_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvferry.vllm.Nothing
