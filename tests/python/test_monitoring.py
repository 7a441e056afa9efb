"""The dashboard and the alert rules of examples/monitoring: real metric names, and rules that promtool tests."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, run, skip
from kvferry import stats

FOLDER = ROOT / "examples/monitoring"
NAME = re.compile(r"\bvllm:kvferry_\w+")


def exported() -> set[str]:
    """Every name under which vLLM exports a metric of kvferry."""
    names = set()
    for metric in stats.metrics():
        if metric.scope == "worker":
            ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[metric.kind]
            names |= {f"vllm:kvferry_{metric.name}{end}" for end in ends}
    return names


def panels() -> list[dict[str, Any]]:
    board = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("file", ["dashboard.json", "alerts.yaml", "alerts_test.yaml"])
def test_every_metric_that_is_named_exists(file: str) -> None:
    named = set(NAME.findall((FOLDER / file).read_text(encoding="utf-8")))
    assert len(named) > 5
    assert named <= exported(), f"unknown: {named - exported()}"


def test_the_page_names_no_other_metric() -> None:
    for page in ("monitoring.md", "leases.md", "troubleshooting.md", "guide.md", "vllm.md", "security.md"):
        named = set(NAME.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))) - {"vllm:kvferry_"}
        assert named <= exported(), f"{page}: {named - exported()}"


def test_causes_that_are_named_exist() -> None:
    causes = {cause for metric in stats.metrics() for cause in metric.causes}
    for file in ("dashboard.json", "alerts.yaml"):
        text = (FOLDER / file).read_text(encoding="utf-8")
        named = {one for value in re.findall(r'cause[!=]~?"([^"]+)"', text) for one in value.split("|")}
        assert named <= causes, f"{file}: {named - causes}"


def test_the_dashboard_is_whole() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids)) > 10
    for panel in panels():
        assert panel["title"]
        assert panel["targets"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")


def test_the_page_has_every_alert() -> None:
    alerts = re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yaml").read_text(encoding="utf-8"))
    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    assert alerts
    assert re.findall(r"^\| `(Kvferry\w+)`", page, re.MULTILINE) == alerts


def promtool() -> str:
    """The program: that of `scripts/setup promtool`, else an installed one. Skips without one."""
    ours: Path = ROOT / ".deps/promtool/promtool"
    program = str(ours) if ours.is_file() else shutil.which("promtool")
    if program is None:
        skip("promtool", "it is not installed: run scripts/setup promtool")
    return program


def test_promtool_tests_the_rules() -> None:
    assert "SUCCESS" in run(promtool(), "check", "rules", FOLDER / "alerts.yaml")
    assert "SUCCESS" in run(promtool(), "test", "rules", FOLDER / "alerts_test.yaml")


def test_promtool_takes_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    """As recording rules, with Grafana's variables replaced."""
    rules = []
    for panel in panels():
        for target in panel["targets"]:
            expr = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            rules.append({"record": f"panel_{panel['id']}_{target['refId']}", "expr": expr})
    file = tmp_path / "dashboard.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    assert f"{len(rules)} rules found" in run(promtool(), "check", "rules", file)
