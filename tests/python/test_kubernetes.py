"""The manifests of examples/kubernetes fit the schemas of Kubernetes, one another and kvferry's settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kvferry
import pytest
from commands import ROOT

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="scripts/setup installs kubernetes-validate")
yaml = pytest.importorskip("yaml", reason="scripts/setup installs PyYAML")

FOLDER = ROOT / "examples/kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def found(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for path in FILES for one in documents(path) if one["kind"] == kind}


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = found("Deployment")[name]["spec"]["template"]["spec"]
    return spec


def environment(name: str) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in pod(name)["containers"][0]["env"]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("release", ["1.30", "1.37"])
def test_the_manifests_fit_the_schemas(path: Path, release: str) -> None:
    for one in documents(path):
        kubernetes_validate.validate(one, release, strict=True)


def test_a_manifest_that_is_wrong_is_found() -> None:
    wrong = documents(FOLDER / "prefill.yaml")[0]
    wrong["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


def test_the_kustomization_has_every_file() -> None:
    (kustomization,) = documents(FOLDER / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == [path.name for path in FILES]
    assert all((FOLDER / name).is_file() for one in kustomization["configMapGenerator"] for name in one["files"])
    images = {one["name"] for one in kustomization["images"]}
    assert all(pod(name)["containers"][0]["image"].split(":")[0] in images for name in found("Deployment"))


def test_selectors_choose_the_pods_and_ports_that_are_there() -> None:
    deployments, ports = found("Deployment"), {}
    for name, one in deployments.items():
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ports[labels["role"]] = {port["name"]: port["containerPort"] for port in pod(name)["containers"][0]["ports"]}
        assert pod(name)["enableServiceLinks"] is False, "KVFERRY_PORT would be set for a service named kvferry"
    for service in found("Service").values():
        role = service["spec"]["selector"]["role"]
        for port in service["spec"]["ports"]:
            assert ports[role][port["targetPort"]] == port["port"]
    for role in ("prefill", "decode"):
        first, last = map(int, environment(role)["UCX_TCP_PORT_RANGE"].split("-"))
        rules = found("NetworkPolicy")[f"kvferry-{role}"]["spec"]["ingress"]
        assert {"protocol": "TCP", "port": first, "endPort": last} in [port for rule in rules for port in rule["ports"]]
    (listener,) = [one for one in found("NetworkPolicy")["kvferry-prefill"]["spec"]["ingress"] if len(one["ports"]) > 1]
    assert listener["ports"][0]["port"] == ports["prefill"]["kvferry"] == int(environment("prefill")["KVFERRY_PORT"])


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_engines_have_settings_that_kvferry_takes(name: str) -> None:
    (given,) = [arg for arg in pod(name)["containers"][0]["args"] if arg.startswith("--kv-transfer-config=")]
    config = json.loads(given.partition("=")[2])
    assert config == {
        "kv_connector": "KvferryConnector",
        "kv_role": f"kv_{'producer' if name == 'prefill' else 'consumer'}",
    }
    known = {one["variable"] for one in kvferry.settings.describe()["settings"]}
    assert {variable for variable in environment(name) if variable.startswith("KVFERRY_")} <= known
    (key,) = [one for one in pod(name)["volumes"] if one["name"] == "key"]
    assert key["secret"]["defaultMode"] == 0o400, "kvferry refuses a key that others may read"
    assert "securityContext" not in pod(name), "fsGroup would let a group read the key"


def test_the_grace_period_covers_the_shutdown() -> None:
    for name in ("prefill", "decode"):
        text = " ".join(pod(name)["containers"][0]["args"])
        match = re.search(r"--shutdown-timeout=(\d+)", text)
        assert match is not None
        assert int(match[1]) < pod(name)["terminationGracePeriodSeconds"]
