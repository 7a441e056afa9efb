"""Options of `kv_connector_extra_config`, and `kvferry config`'s view of `--kv-transfer-config`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from kvferry import InvalidArgumentError
from kvferry.cli import config as command
from kvferry.vllm.config import describe, parse_options


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFERRY_HOST", "KVFERRY_PORT", "KVFERRY_REQUEST_LOG", "KVFERRY_KEY_FILE", "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_given_leaves_the_librarys_defaults() -> None:
    options = parse_options({})
    assert (options.worker, options.scheduler) == ({}, {})


def test_options_reach_the_side_that_uses_them() -> None:
    options = parse_options(
        {
            "host": "10.0.0.7",
            "port": 0,
            "lease_ms": 5000,
            "transport": "tcp",
            "ucx": {"NET_DEVICES": "eth0", "RNDV_THRESH": 8192, "PROTO_ENABLE": True},
            "request_log": "/tmp/requests.jsonl",
            "key_file": "/k",
            "window": None,
        }
    )
    assert options.scheduler == {"host": "10.0.0.7", "port": 0, "lease_ms": 5000, "key_file": "/k"}
    assert options.worker == {
        "transport": "tcp",
        "ucx": {"NET_DEVICES": "eth0", "RNDV_THRESH": "8192", "PROTO_ENABLE": "y"},
        "request_log": "/tmp/requests.jsonl",
        "key_file": "/k",
    }


def test_vllms_own_address_is_the_last_choice_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.2")
    assert parse_options({}).scheduler["host"] == "10.0.0.2"
    assert parse_options({"host": "b"}).scheduler["host"] == "b"
    monkeypatch.setenv("KVFERRY_HOST", "a")
    # The library itself looks there.
    assert "host" not in parse_options({}).scheduler
    assert {s["key"]: s["value"] for s in describe({})["settings"]}["host"] == "a"


def test_a_wrong_option_is_named() -> None:
    for extra, expected in [
        ({"transprot": "tcp"}, 'kv_connector_extra_config has an unknown key "transprot"; did you mean "transport"?'),
        ({"port": "5680"}, 'kv_connector_extra_config: port must be a whole number from 0 to 65535, not "5680"'),
        ({"engine_id": "e"}, "which the engine sets itself"),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            parse_options(extra)
        assert expected in str(caught.value)


def test_the_fields_of_kv_transfer_config_are_vllms() -> None:
    from vllm.config import KVTransferConfig

    fields: Any = dataclasses.fields(KVTransferConfig)
    assert sorted(field.name for field in fields) == sorted(command.FIELDS)
