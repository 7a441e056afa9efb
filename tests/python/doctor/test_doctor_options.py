"""`kvferry doctor` on its options and the configuration that it is given."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from doctor_command import doctor, free_port
from kvferry.cli import main


@pytest.mark.parametrize(
    ("environment", "finding", "words"),
    [
        ({"KVFERRY_PORT": "many"}, ("options", "bad"), "KVFERRY_PORT must be a whole number"),
        ({"KVFERRY_HOST": "no.such.host.invalid"}, ("address", "bad"), "no.such.host.invalid"),
        ({"KVFERRY_KEY_FILE": "/no/such/key"}, ("key", "unusable"), "/no/such/key"),
    ],
)
def test_wrong_options(environment: dict[str, str], finding: tuple[str, str], words: str) -> None:
    told = doctor("--config", '{"port": 0}', **environment)
    assert told.troubles == dict([finding])
    assert any(words in line for line in told[finding[0]]["evidence"])


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


def test_an_empty_key_means_none_whatever_the_environment_says() -> None:
    config = json.dumps({"port": 0, "key_file": ""})
    assert doctor("--config", config, KVFERRY_KEY_FILE="/no/such/key")["key"]["case"] == "none"


def test_the_configuration_is_what_the_config_command_takes(tmp_path: Path) -> None:
    port = free_port()
    extra = {"host": "127.0.0.1", "port": port}
    whole = {"kv_connector": "KvferryConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    for config in (json.dumps(extra), json.dumps(whole), str(path)):
        told = doctor("--config", config)
        assert any(f"port {port} of 127.0.0.1" in line for line in told["port"]["evidence"]), told["port"]
