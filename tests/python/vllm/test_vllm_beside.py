"""`KvferryConnector` beside other connectors in `MultiConnector`: no other one may hand prompts over."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from kvferry.vllm.beside import HAND_OVER
from mini_config import Settings, write_model
from mini_remote import Remote


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ("KvferryConnector", "MultiConnector has 2 KvferryConnectors; expected one P/D connector"),
        ("NixlConnector", "MultiConnector has KvferryConnector beside NixlConnector; expected one P/D connector"),
    ],
)
def test_a_second_hand_over_connector_stops_the_start(beside: str, expected: str, tmp_path: Path) -> None:
    engine = Remote(Settings("kv_producer", write_model(tmp_path), 1, child=True, beside=beside))
    try:
        with pytest.raises(RuntimeError, match="start failed in the engine") as caught:
            engine.wait_started()
        assert expected in str(caught.value)
    finally:
        engine.kill()


def test_every_hand_over_connector_of_vllm_is_known() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def is_hand_over(connector: Any) -> bool:
        # A package's connector has its scheduler in a file of its own.
        folder = Path(inspect.getfile(connector)).parent
        files = [Path(inspect.getfile(connector))] if folder.name == "v1" else folder.glob("*.py")
        return any("do_remote_prefill" in path.read_text(encoding="utf-8") for path in files)

    found = set()
    for name in KVConnectorFactory._registry:
        if name == "KvferryConnector":
            continue
        try:
            connector = KVConnectorFactory.get_connector_class_by_name(name)
        except (ImportError, AttributeError):
            # What it is made of is not installed.
            continue
        if is_hand_over(connector):
            found.add(name)
    assert found
    assert found <= set(HAND_OVER)
