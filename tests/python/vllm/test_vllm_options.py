"""Options of `kv_connector_extra_config`, and `kvferry config`'s view of `--kv-transfer-config`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from kvferry import InvalidArgumentError
from kvferry.cli import config as command
from kvferry.vllm.config import describe, parse_options
from kvferry.vllm.stock import SAME, SECONDS, WITHOUT_MEANING, translate


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


@pytest.mark.release
def test_keys_of_the_nixl_connector_are_taken_or_explained() -> None:
    import re
    from pathlib import Path

    import vllm

    folder = Path(vllm.__file__).parent / "distributed/kv_transfer/kv_connector/v1/nixl"
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    keys = set(re.findall(r'get_from_extra_config\(\s*"(\w+)"', source))
    assert keys == {*SECONDS, *SAME, *WITHOUT_MEANING}
    for key in keys:
        if key == "bidirectional_kv_xfer":
            assert parse_options({key: True}).scheduler == {"multi_turn": True}
            assert (parse_options({key: True}).multi_turn, parse_options({key: False}).multi_turn) == (True, False)
            continue
        options = parse_options({key: 45, "port": 1})
        ours = {
            "kv_lease_duration": {"lease_ms": 45_000},
            "decoder_kv_blocks_ttl": {"history_lease_ms": 45_000},
            "kv_recompute_threshold": {"history_least_tokens": 45},
        }.get(key, {})
        assert options.scheduler == {"port": 1, **ours}
        assert options.worker == ({"peer_ttl_ms": 45_000} if key == "engine_ttl" else {})
        _, taken, left_out = translate({key: 45})
        assert [key in note for note in taken + left_out] == [True]
        assert bool(taken) == (key in SECONDS or key in SAME)
    # Of two the one of this connector counts.
    own, taken, left_out = translate({"kv_lease_duration": 45, "lease_ms": 7000, "port": 1})
    assert (own, taken) == ({"lease_ms": 7000, "port": 1}, [])
    assert left_out == ["NixlConnector's kv_lease_duration has no effect: lease_ms is given too"]
    for value in (True, "30", 0, -1, float("nan"), [30]):
        with pytest.raises(InvalidArgumentError, match=r"kv_lease_duration must be a number of seconds .* lease_ms"):
            parse_options({"kv_lease_duration": value})
    # The bounds are those of the key that it stands for.
    with pytest.raises(InvalidArgumentError, match="lease_ms must be a whole number from 1000"):
        parse_options({"kv_lease_duration": 0.5})
    with pytest.raises(InvalidArgumentError, match='unknown key "kv_lease"'):
        parse_options({"kv_lease": 30})


@pytest.mark.release
def test_the_fields_of_kv_transfer_config_are_vllms() -> None:
    from vllm.config import KVTransferConfig

    fields: Any = dataclasses.fields(KVTransferConfig)
    assert sorted(field.name for field in fields) == sorted(command.FIELDS)
