"""NVIDIA Dynamo's own code for connectors, which its workers call for each request, with this one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry.vllm
import pytest
from kvferry.vllm import dynamo
from test_vllm_engines import Pair, prompt

DYNAMO = Path(__file__).resolve().parents[3] / ".deps" / "dynamo"


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as ai-dynamo has it, in a process that is no worker of Dynamo's otherwise."""
    if not DYNAMO.is_dir():
        pytest.skip("needs .deps/dynamo: run scripts/setup vllm")
    monkeypatch.syspath_prepend(str(DYNAMO))
    import dynamo.vllm.kv_connector_protocols as module

    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "dynamo"]:
        del sys.modules[name]


def config(connector: str, **extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector=connector, engine_id="e", kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer)


def test_a_process_that_is_no_worker_of_dynamos_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if DYNAMO.is_dir():
        # It could be imported.
        monkeypatch.syspath_prepend(str(DYNAMO))
    assert "dynamo.vllm" not in sys.modules
    dynamo.register("KvferryConnector")
    assert "dynamo.vllm" not in sys.modules


def test_dynamo_knows_the_connector_by_vllms_plug_in(protocols: Any) -> None:
    alone = config("KvferryConnector")
    beside = config("MultiConnector", connectors=[{"kv_connector": "KvferryConnector"}, {"kv_connector": "Other"}])
    for configured in (alone, beside):
        with pytest.raises(ValueError, match="KvferryConnector"):
            protocols.make_kv_connector_protocol(configured)
    for _ in range(2):
        kvferry.vllm.register()
    for configured in (alone, beside):
        made = protocols.make_kv_connector_protocol(configured)
        assert made.prefill_request_kv_transfer_params()["do_remote_decode"] is True


def test_a_table_of_another_form_is_left_alone(protocols: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ({}, [], None):
        monkeypatch.setattr(protocols, "KV_CONNECTOR_PROTOCOLS", table)
        kvferry.vllm.register()
        assert table in ({}, [], None)


def test_a_request_as_dynamo_sends_it(protocols: Any, tmp_path: Path) -> None:
    """Dynamo gives both engines the same request id, and fails a request whose prefill answers with None."""
    kvferry.vllm.register()
    pair = Pair(tmp_path, "fail", False, False)
    try:
        made = protocols.make_kv_connector_protocol(config("KvferryConnector"))
        tokens = prompt(30, 100)
        pair.prefill.call("add", "ctx-1", tokens, 1, dict(made.prefill_request_kv_transfer_params()))
        pair.prefill.call("run_until", "'reason' in e.answers.get('ctx-1', {})")
        result = SimpleNamespace(kv_transfer_params=pair.prefill.call("answer", "ctx-1")["params"])
        pair.prefill.call("step")
        answer = pair.decoded("ctx-1", tokens, made.decode_request_kv_transfer_params(result))
        assert answer["reason"] == "length"
        decode = pair.quiesce()[1]
        assert (decode["starts"]["ctx-1"][0], decode["wrong_bytes"]["ctx-1"]) == (99, 0)
    finally:
        pair.close()
