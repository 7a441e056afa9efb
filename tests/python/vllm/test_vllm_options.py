"""Options of `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Any

import pytest
from kvferry.vllm.config import DEFAULT_PORT, OPTIONS, OptionError, parse_options


def test_nothing_given_leaves_the_librarys_defaults() -> None:
    options = parse_options({}, {})
    assert options.worker == {}
    assert options.scheduler == {"port": DEFAULT_PORT}


def test_options_reach_the_side_that_uses_them() -> None:
    options = parse_options(
        {
            "host": "10.0.0.7",
            "port": 0,
            "lease_ms": 5000,
            "transport": "tcp",
            "ucx": {"NET_DEVICES": "eth0", "RNDV_THRESH": 8192, "PROTO_ENABLE": True},
            "request_log": "/tmp/requests.jsonl",
        },
        {},
    )
    assert options.scheduler == {"host": "10.0.0.7", "port": 0, "lease_ms": 5000}
    assert options.worker == {
        "transport": "tcp",
        "ucx": {"NET_DEVICES": "eth0", "RNDV_THRESH": "8192", "PROTO_ENABLE": "y"},
        "request_log": "/tmp/requests.jsonl",
    }


def test_environment_counts_where_the_key_is_absent() -> None:
    env = {"KVFERRY_HOST": "10.0.0.1", "KVFERRY_PORT": "7000", "KVFERRY_REQUEST_LOG": "log"}
    options = parse_options({"port": 7001}, env)
    assert options.scheduler == {"host": "10.0.0.1", "port": 7001}
    assert options.worker == {"request_log": "log"}


def test_a_key_is_for_both_sides() -> None:
    for options in (parse_options({"key_file": "/k"}, {}), parse_options({}, {"KVFERRY_KEY_FILE": "/k"})):
        assert options.worker["key_file"] == options.scheduler["key_file"] == "/k"


def test_vllms_own_address_is_the_last_choice_for_the_host() -> None:
    assert parse_options({}, {"VLLM_HOST_IP": "10.0.0.2"}).scheduler["host"] == "10.0.0.2"
    assert parse_options({}, {"VLLM_HOST_IP": "10.0.0.2", "KVFERRY_HOST": "a"}).scheduler["host"] == "a"
    assert parse_options({"host": "b"}, {"VLLM_HOST_IP": "10.0.0.2"}).scheduler["host"] == "b"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("ports", "'port'"), ("lease", "'lease_ms'"), ("hosts", "'host'"), ("transprot", "'transport'")],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(OptionError, match=f"unknown key '{key}'; did you mean {nearest}"):
        parse_options({key: 1}, {})


def test_unknown_key_like_no_other_lists_the_keys() -> None:
    with pytest.raises(OptionError, match="unknown key 'zzz'; the keys are advertise_local, "):
        parse_options({"zzz": 1}, {})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("port", "5680", "whole number from 0 to 65535, not '5680'"),
        ("port", 65536, "whole number from 0 to 65535, not 65536"),
        ("port", True, "whole number from 0 to 65535, not True"),
        ("lease_ms", 10, "whole number from 1000 to 86400000, not 10"),
        ("lease_ms", 1.5, "whole number"),
        ("transport", "rdma", "one of auto, tcp, shm, not 'rdma'"),
        ("host", "", "a text that is not empty"),
        ("host", 7, "a text that is not empty, not 7"),
        ("advertise_local", "yes", "true or false, not 'yes'"),
        ("ucx", "TLS=tcp", "a map of UCX settings"),
        ("ucx", {"UCX_TLS": "tcp"}, "without its prefix, as 'TLS'"),
        ("ucx", {"TLS": ["tcp"]}, "name of a UCX setting and its value"),
        ("window", 0, "whole number from 1 to 65536, not 0"),
    ],
)
def test_wrong_value_names_key_value_and_what_was_expected(key: str, value: Any, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options({key: value}, {})
    assert f"kv_connector_extra_config['{key}']" in str(caught.value)
    assert expected in str(caught.value)


def test_wrong_environment_variable_is_named() -> None:
    with pytest.raises(OptionError, match="environment variable KVFERRY_PORT must be a whole number"):
        parse_options({}, {"KVFERRY_PORT": "many"})


def test_every_option_says_what_it_is() -> None:
    assert all(option.help.endswith(".") for option in OPTIONS.values())
