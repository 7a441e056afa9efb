"""`kvferry doctor` on its options and the configuration that it is given."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest
from doctor_command import doctor
from kvferry import Listener
from kvferry.cli import doctor as cli
from kvferry.cli import main
from kvferry.cli.config import any_config
from kvferry.doctor import child
from kvferry.doctor.examine import Asked
from lab.common import free_port


def test_wrong_options() -> None:
    """Each is told where it counts, and hides none of the others."""
    wrong = {"KVFERRY_PORT": "many", "KVFERRY_HOST": "no.such.host.invalid", "KVFERRY_KEY_FILE": "/no/such/key"}
    told = doctor("--config", '{"port": 0}', **wrong)
    assert told.troubles == {"options": "bad", "address": "bad", "key": "unusable"}
    assert any("KVFERRY_PORT must be a whole number" in line for line in told["options"]["evidence"])
    for finding, words in (("address", "no.such.host.invalid"), ("key", "/no/such/key")):
        assert any(words in line for line in told[finding]["evidence"])


def asked(*words: str) -> Asked:
    """What the command is to examine."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.asked_for(parser.parse_args(words))


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        ({"port": None}, {"KVFERRY_LEASE_MS": "x"}),
        ({"ucx": None, "host": None}, {"KVFERRY_LEASE_MS": "x"}),
        ({"kv_lease_duration": 45}, {"KVFERRY_LEASE_MS": "x", "KVFERRY_VERIFY": "maybe"}),
        ({}, {"KVFERRY_WINDOW": "0"}),
    ],
)
def test_a_wrong_variable_is_left_out_and_the_rest_counts(
    config: dict[str, object], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**environment, "KVFERRY_PORT": "0", "KVFERRY_HOST": "127.0.0.7"}.items():
        monkeypatch.setenv(name, value)
    found = asked("--config", json.dumps(config))
    assert (found.scheduler["host"], found.scheduler["port"]) == ("127.0.0.7", 0)
    assert found.wrong_variables.keys() == environment.keys()
    assert all(f"the environment variable {name} must be" in words for name, words in found.wrong_variables.items())


def test_with_wrong_variables_the_rest_of_the_machine_is_examined() -> None:
    # An agent of the doctor's would be refused with the second. An empty key means none, whatever the environment says.
    wrong = {"KVFERRY_LEASE_MS": "x", "KVFERRY_WINDOW": "0"}
    others = {"KVFERRY_PORT": "0", "KVFERRY_HOST": "127.0.0.7", "KVFERRY_KEY_FILE": "/no/such/key"}
    told = doctor("--config", '{"kv_lease_duration": 45, "key_file": ""}', **wrong, **others)
    assert told.troubles == {"options": "bad", "address": "local-only"}
    evidence = "\n".join(told["options"]["evidence"])
    assert all(f"the environment variable {name} must be" in evidence for name in wrong), evidence
    assert told["port"]["evidence"] == ["a free port of 127.0.0.7 was bound and freed"]
    assert told["key"]["case"] == "none"


@pytest.mark.parametrize("environment", [{}, {"KVFERRY_LEASE_MS": "x"}])
@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"log": "info"}, 'the key "log", which only the environment variable KVFERRY_LOG sets'),
        ({"log": "info", "port": "x"}, 'the key "log", which only the environment variable KVFERRY_LOG sets'),
        ({"window": "x"}, 'window must be a whole number from 1 to 1024 (operations), not "x"'),
        ({"kv_lease_duration": "x"}, "kv_lease_duration must be a number of seconds"),
    ],
)
def test_a_wrong_configuration_is_refused_whatever_the_environment_has(
    config: dict[str, object],
    error: str,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--no-transfers", "--config", json.dumps(config)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("kvferry doctor: error: --config: kv_connector_extra_config")
    assert error in told


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--config '{\"prot\": 1}'", 'did you mean "port"'),
        ("--config [1]", "is neither a JSON map nor a readable file"),
        ('--config \'{"kv_role": "kv_producer"}\'', "kv_connector is None"),
        ("--timeout 0.5", "from 1 to 600"),
        ("--peer 10.0.0.1", "HOST:PORT"),
        ("--peer 10.0.0.1:0", "HOST:PORT"),
        ("--shape tp=2 --layers 2 --kv-heads 2 --head-size 8", "give its listener as --peer"),
        ("--layers 2", "needs --shape as well"),
        ("--peer h:1 --shape tp=2", "--layers is missing"),
        ("--peer h:1 --shape blok=2 --layers 2", "did you mean block"),
        ("--compat dtype=x", "needs --shape as well"),
    ],
)
def test_what_cannot_be_asked_for(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *shlex.split(words)])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_the_configuration_is_what_the_config_command_takes(tmp_path: Path) -> None:
    port = free_port()
    extra = {"host": "127.0.0.1", "port": port}
    whole = {"kv_connector": "KvferryConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    for config in (json.dumps(extra), json.dumps(whole), str(path)):
        assert asked("--config", config).scheduler == extra
    told = doctor("--config", str(path))
    assert any(f"port {port} of 127.0.0.1" in line for line in told["port"]["evidence"]), told["port"]


def engine(role: str, **extra: object) -> str:
    return json.dumps({"kv_connector": "KvferryConnector", "kv_role": role, "kv_connector_extra_config": extra})


def test_a_decode_engine_beside_a_prefill_engine_needs_no_port() -> None:
    """Nor an address that anybody is told. Engines that may do both need one: `test_doctor_host.py`."""
    with Listener({"engine_id": "prefill", "host": "127.0.0.1"}) as listener:
        told = doctor("--config", engine("kv_consumer", host="no.such.host.invalid", port=listener.address[1]))
    assert told.cases("address", "port") == ["unneeded", "unneeded"]
    assert (told.troubles, told.code) == ({}, 0)


@pytest.mark.parametrize(
    ("config", "multi_turn", "listens"),
    [
        (engine("kv_producer"), False, True),
        (engine("kv_both"), None, True),
        (engine("kv_consumer"), None, False),
        (engine("kv_consumer"), False, False),
        (engine("kv_consumer"), True, True),
        ("{}", None, True),
    ],
)
def test_who_has_a_listener(
    config: str, multi_turn: bool | None, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode engine has one where prefill engines read conversations back; not every library has that key."""
    rows = [] if multi_turn is None else [{"key": "multi_turn", "parts": ["scheduler"], "value": multi_turn}]
    for row in rows:
        row["source"] = "given"
    monkeypatch.setattr(cli, "describe", lambda extra: {"settings": rows})
    assert asked("--config", config).listens == listens


def test_of_several_connectors_the_role_of_ours_counts() -> None:
    own = json.loads(engine("kv_consumer"))
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other", "kv_role": "kv_both"}, own]},
    }
    assert any_config(several).role == "kv_consumer"
    assert any_config({"port": 1}).role is None


def test_a_python_without_memory_files_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create", raising=False)
    assert child.call("library")["abi"] > 0
