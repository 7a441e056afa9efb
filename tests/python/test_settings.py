"""`kvferry.settings` and `kvferry config`."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvferry
import pytest
from kvferry import InvalidArgumentError, KvferryError, Scheduler, Worker
from kvferry.cli import main
from kvferry.vllm.files import missing_files

PRODUCER: dict[str, Any] = {"kv_connector": "KvferryConnector", "kv_role": "kv_producer"}


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    """A configuration of MultiConnector."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in kvferry.settings.describe()["settings"]:
        if setting["variable"] not in (None, "KVFERRY_LIBRARY", "KVFERRY_UCX_LIB"):
            monkeypatch.delenv(str(setting["variable"]), raising=False)
    for name in ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
        monkeypatch.delenv(name, raising=False)
    # Of a port that something else has, only the tests about that want to hear.
    monkeypatch.setenv("KVFERRY_PORT", "0")


def setting(key: str, given: dict[str, object] | None = None) -> kvferry.settings.Setting:
    (found,) = [
        s
        for s in kvferry.settings.describe(given)["settings"]
        if s["key"] == key and ("worker" in s["parts"] or "scheduler" in s["parts"])
    ]
    return found


def test_given_beats_environment_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (setting("lease_ms")["value"], setting("lease_ms")["source"]) == (30000, "default")
    monkeypatch.setenv("KVFERRY_LEASE_MS", "5000")
    assert (setting("lease_ms")["value"], setting("lease_ms")["source"]) == (5000, "environment")
    given = setting("lease_ms", {"lease_ms": 7000})
    assert (given["value"], given["source"], given["default"], given["unit"]) == (7000, "given", 30000, "ms")


@pytest.mark.parametrize("start", ["Agent({%s})", "Worker({'engine_id': 'e', %s})"])
@pytest.mark.parametrize(("key", "said"), [("streams", "has no effect"), ("rehearse", "is called warm_up now")])
@pytest.mark.parametrize(("given", "variable"), [(True, ""), (False, "0"), (False, "")])
def test_a_key_that_has_gone_or_has_another_name_is_taken_with_one_warning(
    start: str, key: str, said: str, given: bool, variable: str
) -> None:
    started = start % (f"'{key}': False" if given else "")
    code = f"import kvferry\nwith kvferry.{started}: pass"
    environment = os.environ | {f"KVFERRY_{key.upper()}": variable}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, text=True, check=False)
    assert done.returncode == 0, done.stderr
    warnings = re.findall(rf"kvferry WARN .*{key}, or its environment variable, {said}", done.stderr)
    assert len(warnings) == (1 if given or variable else 0), done.stderr


@pytest.mark.parametrize(
    ("trace", "variable", "made"),
    [(None, "", ["log"]), ("trace", "", ["trace"]), ("", "", []), (None, "trace", ["trace"])],
)
def test_a_request_log_is_taken_for_a_trace_where_none_is_given(
    trace: str | None, variable: str, made: list[str], tmp_path: Path
) -> None:
    def place(name: str) -> str:
        return str(tmp_path / name) if name else ""

    config = {"engine_id": "e", "request_log": place("log"), **({} if trace is None else {"trace": place(trace)})}
    code = f"import kvferry\nwith kvferry.Worker({config}): pass"
    environment = os.environ | {"KVFERRY_TRACE": place(variable)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = (
        "is taken for trace,"
        if made == ["log"]
        else f"has no effect beside {'KVFERRY_TRACE' if variable else 'trace'};"
    )
    assert re.findall(r"kvferry WARN .*request_log \(\S+\) (.*?[,;])", done.stderr) == [expected]
    assert [file.name for file in tmp_path.iterdir()] == made


@pytest.mark.parametrize("name", ["none/log", "folder"])
def test_a_request_log_that_cannot_be_a_trace_stops_no_start(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    former = {"request_log": str(tmp_path / name)}
    with Worker({"engine_id": "e", **former}):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]
    out = output_of(capsys, "config", json.dumps({**PRODUCER, "kv_connector_extra_config": former}))
    assert "verdict: an engine of kv_role kv_producer starts with these values" in out


def test_the_environment_reaches_what_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"engine_id": "e", "groups": [{"kind": "full", "block_size": 16}], "port": 0}
    monkeypatch.setenv("KVFERRY_LEASE_MS", "10")
    with pytest.raises(InvalidArgumentError, match="variable KVFERRY_LEASE_MS must be a whole number from 1000"):
        Scheduler(config)
    with Scheduler({**config, "lease_ms": 1000}):
        pass
    monkeypatch.setenv("KVFERRY_LEASE_MS", "")
    monkeypatch.setenv("KVFERRY_HOST", "127.0.0.9")
    with kvferry.Listener({"engine_id": "e"}) as listener:
        assert listener.address[0] == "127.0.0.9"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("ports", 1, 'unknown key "ports"; did you mean "port"?'),
        ("lease", 1, 'did you mean "lease_ms"?'),
        ("zzz", 1, "; the keys are host, port,"),
        ("port", "5680", 'port must be a whole number from 0 to 65535, not "5680"'),
        ("port", True, "not true"),
        ("lease_ms", 1.5, "lease_ms must be a whole number from 1000 to 86400000 (ms), not 1.5"),
        ("transport", "rdma", 'one of auto, tcp, shm, not "rdma"'),
        ("host", "", "a text that is not empty"),
        ("advertise_local", "yes", 'true or false, not "yes"'),
        ("ucx", "TLS=tcp", "a map of UCX settings"),
        ("ucx", {"UCX_TLS": "tcp"}, 'without its prefix, as "TLS"'),
        ("engine_id", "e", "which the engine sets itself"),
        ("library", "/x", "only the environment variable KVFERRY_LIBRARY sets"),
        ("kv_role", "kv_producer", 'the key "kv_role", which belongs beside it'),
    ],
)
def test_what_is_wrong_is_named(key: str, value: Any, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        kvferry.settings.describe({key: value})
    assert "kv_connector_extra_config" in str(caught.value)
    assert expected in str(caught.value)
    with pytest.raises(SystemExit) as ended:
        main(["config", json.dumps({**PRODUCER, "kv_connector_extra_config": {key: value}})])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_the_command_shows_every_key_with_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_WINDOW", "128")
    monkeypatch.setenv("KVFERRY_LEASE", "1")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    given = {**PRODUCER, "kv_port": 1, "kv_connector_extra_config": {"port": 0}}
    assert main(["config", "--all", json.dumps(given)]) == 0
    out = capsys.readouterr().out
    operators = out[: out.index("Keys of agents and listeners")]
    lines = {line.split()[0]: line.split()[1:] for line in operators.splitlines() if line and line[0] != " "}
    assert lines["window"][:3] == ["128", "KVFERRY_WINDOW", "64"]
    assert lines["port"][:3] == ["0", "given", "5680"]
    assert lines["host"][:2] == ["127.0.0.1", "VLLM_HOST_IP"]
    assert "note: nothing reads the environment variable KVFERRY_LEASE; did you mean KVFERRY_LEASE_MS?" in out
    assert "note: kv_port has no effect on KvferryConnector" in out
    assert re.search(r"^engine_id +\(required\)", out, re.MULTILINE)
    assert main(["config", "--json", "--all"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert {s["key"] for s in described["settings"]} >= {"host", "engine_id", "spin_us", "log"}
    assert described["unknown_variables"] == [{"name": "KVFERRY_LEASE", "nearest": "KVFERRY_LEASE_MS"}]


def test_only_what_differs_is_shown_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_WINDOW", "128")
    assert main(["config", json.dumps({**PRODUCER, "kv_connector_extra_config": {"lease_ms": 7000}})]) == 0
    out = capsys.readouterr().out
    shown = {line.split()[0] for line in out[: out.index("\n\n")].splitlines()[2:]}
    assert shown - {"KVFERRY_LIBRARY", "ucx_lib"} == {"lease_ms", "window", "port"}
    assert "verdict: an engine of kv_role kv_producer starts with these values on this machine" in out
    assert "verdict: the environment's values can be used" in output_of(capsys, "config")


def test_former_keys_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def notes(**extra: object) -> list[str]:
        out = output_of(capsys, "config", json.dumps({**PRODUCER, "kv_connector_extra_config": extra}))
        return [line.removeprefix("note: ") for line in out.splitlines() if line.startswith("note: ")]

    assert notes(streams=False) == ["streams has no effect; leave it out"]
    assert notes(portion_tokens=0) == ["portion_tokens is called chunk_tokens now; rename it"]
    assert notes(request_log="") == []
    taken = "is taken for trace; set trace, and read its files with `kvferry trace`"
    assert notes(request_log="/none/log") == [f"request_log {taken}"]
    assert notes(request_log="/none/log", trace="") == ["request_log has no effect beside trace; leave it out"]
    monkeypatch.setenv("KVFERRY_STREAMS", "no")
    monkeypatch.setenv("KVFERRY_REQUEST_LOG", "/none/log")
    assert notes() == ["KVFERRY_STREAMS has no effect; leave it out", f"KVFERRY_REQUEST_LOG {taken}"]


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def own_refusal(start: Callable[[], object]) -> str:
    """What an engine itself says."""
    with pytest.raises(KvferryError) as caught:
        start()
    return re.sub(r"^kvf_\w+: ", "", caught.value.message)


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ({"transport": "tcp", "ucx": {"TLS": "tcp"}}, "both a transport (tcp) and the UCX setting TLS were given"),
        ({"ucx": {"TCP_TX_SEG_SIZ": 1}}, "did you mean TCP_TX_SEG_SIZE?"),
        ({"ucx": {"TLS": "nothing_like_it"}}, "TLS=nothing_like_it"),
    ],
)
def test_what_a_worker_refuses_is_refused(
    worker: dict[str, object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = own_refusal(lambda: Worker({"engine_id": "e", **worker}))
    assert expected in refused
    assert expected in refusal_of(capsys, {**PRODUCER, "kv_connector_extra_config": worker})


def refusal_of(capsys: pytest.CaptureFixture[str], config: dict[str, Any]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["config", json.dumps(config)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    assert main(["key", str(key)]) == 0
    config = {**PRODUCER, "kv_connector_extra_config": {"key_file": str(key)}}
    assert main(["config", json.dumps(config)]) == 0
    capsys.readouterr()
    key.chmod(0o644)
    refused = own_refusal(lambda: Worker({"engine_id": "e", "key_file": str(key)}))
    # Worker and scheduler side refuse it alike.
    assert refusal_of(capsys, config).count(refused) == 1


@pytest.mark.parametrize(
    ("role", "policy", "expected"),
    [
        ("kv_producer", "recompute", "does not serve multi_turn (bidirectional_kv_xfer) with kv_role kv_producer"),
        ("kv_both", "fail", "with kv_load_failure_policy recompute only, not fail"),
    ],
)
def test_where_conversations_cannot_go_on_is_refused(
    role: str, policy: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "kv_connector": "KvferryConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
    }
    assert expected in refusal_of(capsys, config)


@pytest.mark.parametrize("key", ["port", "bootstrap_port"])
def test_a_port_in_use_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = {**PRODUCER, "kv_connector_extra_config": {"host": "127.0.0.1", key: port}}
        assert str(port) in refusal_of(capsys, config)
        # A decode engine binds neither.
        assert main(["config", json.dumps({**config, "kv_role": "kv_consumer"})]) == 0


def test_variables_of_the_nixl_connector_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    out = output_of(capsys, "config", json.dumps(PRODUCER))
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 has no effect on KvferryConnector: host (KVFERRY_HOST) names" in out
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5600 has no effect on KvferryConnector: port (KVFERRY_PORT) is" in out


def test_keys_of_the_nixl_connector_are_shown_as_what_they_are_taken_for(capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"kv_lease_duration": 45, "backends": ["UCX"]}
    assert main(["config", json.dumps({**PRODUCER, "kv_connector_extra_config": extra})]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^lease_ms +45000 +given +30000 ", out, re.MULTILINE)
    assert "note: NixlConnector's kv_lease_duration 45 (s) is taken for lease_ms 45000" in out
    assert "note: NixlConnector's backends has no effect here: the one backend is UCX; choose" in out
    extra = {"kv_lease_duration": "45"}
    with pytest.raises(SystemExit):
        main(["config", json.dumps({**PRODUCER, "kv_connector_extra_config": extra})])
    assert "kv_lease_duration must be a number of seconds above 0, not '45'" in capsys.readouterr().err


def test_a_transfer_config_may_be_text_file_or_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [{**PRODUCER, "kv_connector_extra_config": {"lease_ms": 9000}}, {"kv_connector": "Other"}]
        },
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(multi))
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(multi)))
    for argument in (json.dumps(multi), str(path), "-"):
        assert main(["config", "--json", argument]) == 0
        values = {s["key"]: s["value"] for s in json.loads(capsys.readouterr().out)["settings"]}
        assert values["lease_ms"] == 9000


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "is not JSON"),
        ("/no/such/file", "neither a JSON map nor a readable file"),
        ({"kv_role": "kv_producer"}, "kv_connector is None, expected 'KvferryConnector'"),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, "kv_connector is 'NixlConnector'"),
        ({"kv_connector": "KvferryConnector"}, "kv_role is missing"),
        ({**PRODUCER, "kv_role": "producer"}, "kv_role must be one of kv_producer"),
        ({**PRODUCER, "kv_rolle": "x"}, "unknown key 'kv_rolle'; did you mean 'kv_role'?"),
        ({**PRODUCER, "lease_ms": 1000}, "unknown key 'lease_ms'; it belongs into kv_connector_extra_config"),
        ({**PRODUCER, "spin_us": 1}, "unknown key 'spin_us'; it is for agents without a connector; leave it out"),
        ({**PRODUCER, "kv_load_failure_policy": "retry"}, "must be one of fail, recompute, not 'retry'"),
        ({**PRODUCER, "kv_connector_extra_config": [1]}, "kv_connector_extra_config must be a map, not [1]"),
        ({"kv_connector": "MultiConnector", "kv_role": "kv_both"}, "has no KvferryConnector among its connectors"),
        (multi(PRODUCER, PRODUCER), "has 2 KvferryConnectors; expected one P/D connector"),
        (multi(PRODUCER, {"kv_connector": "NixlConnector"}), "has KvferryConnector beside NixlConnector; expected one"),
        (multi(multi(PRODUCER), PRODUCER), "has 2 KvferryConnectors; expected one P/D connector"),
    ],
)
def test_what_vllm_would_refuse_is_refused(config: Any, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", config if isinstance(config, str) else json.dumps(config)])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_key_at_the_wrong_level_is_told_also_beside_a_wrong_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_WINDOW", "x")
    with pytest.raises(SystemExit):
        main(["config", json.dumps({**PRODUCER, "lease_ms": 1000})])
    assert "unknown key 'lease_ms'; it belongs into kv_connector_extra_config" in capsys.readouterr().err
    assert os.environ["KVFERRY_WINDOW"] == "x"


def test_the_versions_of_library_protocol_and_ucx_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    oldest, newest = kvferry.protocol_versions()
    assert newest == oldest + 1
    ucx = kvferry.ucx_info()
    assert (ended.value.code, capsys.readouterr().out.splitlines()) == (
        0,
        [
            f"kvferry {kvferry.version()}",
            f"protocol {newest}; speaks {oldest} to {newest}",
            f"UCX {ucx['version']}, {ucx['source']}: {ucx['path']}",
        ],
    )


def test_files_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.write_text("x")
    wrong = {
        "key_file": (str(tmp_path / "key"), "key does not exist; `kvferry key` makes one"),
        "ucx_lib": (str(tmp_path / "libucp.so.0"), "libucp.so.0 is no file"),
        "trace": (str(tmp_path / "no" / "run-%p.json"), "no is no folder"),
    }
    for key, (value, expected) in wrong.items():
        with pytest.raises(SystemExit) as ended:
            main(["config", json.dumps({**PRODUCER, "kv_connector_extra_config": {key: value}})])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert f"{key}: {tmp_path}" in error
        assert expected in error
    good = {
        "key_file": str(here),
        "ucx_lib": str(here),
        "trace": str(tmp_path / "run-%p.json"),
        "request_log": "/none/log",
    }
    assert missing_files(kvferry.settings.describe(good)["settings"]) == []
    monkeypatch.setenv("KVFERRY_KEY_FILE", "/no/such/key")
    with pytest.raises(SystemExit):
        main(["config"])
    assert "key_file (of KVFERRY_KEY_FILE): /no/such/key" in capsys.readouterr().err


def without_library(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVFERRY_LIBRARY": "/no/such/libkvferry.so"}
    return subprocess.run(
        [sys.executable, "-m", "kvferry", *words], capture_output=True, text=True, env=environment, timeout=60
    )


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["--version"], "kvferry: failed: cannot load /no/such/libkvferry.so"),
        (["config"], "kvferry config: failed: cannot load /no/such/libkvferry.so"),
        (["config", json.dumps(PRODUCER)], "kvferry config: failed: cannot load /no/such/libkvferry.so"),
    ],
)
def test_a_library_that_cannot_be_loaded_is_told(words: list[str], start: str) -> None:
    done = without_library(*words)
    assert (done.stdout, done.returncode) == ("", 1), done.stderr
    assert done.stderr.startswith(start)
    assert "set KVFERRY_LIBRARY to the path of libkvferry.so" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["config"], ["doctor", "--config"]])
def test_what_vllm_would_refuse_is_refused_without_a_library_too(command: list[str]) -> None:
    done = without_library(*command, json.dumps({**PRODUCER, "lease_ms": 1000}))
    assert done.returncode == 2, done.stderr
    assert "unknown key 'lease_ms'; the keys are kv_connector," in done.stderr


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("key_file", "is a folder; `kvferry key` makes a key file"),
        ("trace", "is a folder; name a file"),
    ],
)
def test_a_folder_is_no_file(key: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", json.dumps({**PRODUCER, "kv_connector_extra_config": {key: str(tmp_path)}})])
    assert ended.value.code == 2
    assert f"{key}: {tmp_path} {why}" in capsys.readouterr().err


NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """What this process may do with files is looked up for a user that owns none: `os.access` asks for the real user,
    and who runs the tests may be root, who may do everything."""
    user, effective, saved = os.getresuid()
    if effective == 0:
        os.setresuid(NOBODY, effective, saved)
    try:
        yield
    finally:
        os.setresuid(user, effective, saved)


def test_files_are_looked_at_as_they_are_opened(tmp_path: Path) -> None:
    def wrong(key: str, value: str | Path) -> list[str]:
        rows = kvferry.settings.describe({key: str(value)})["settings"]
        with as_nobody():
            return missing_files(rows)

    # A trace is always a new file.
    assert wrong("trace", "/dev/null") == ["trace: /dev may not be written to, so null cannot be made there"]
    # A link is a name that is taken.
    link = tmp_path / "link"
    link.symlink_to("/no/such/folder/log")
    assert missing_files(kvferry.settings.describe({"trace": str(link)})["settings"]) == []


SHAPES = "--prefill tp=1,block=16 --decode tp=1,block=16 --layers 64 --kv-heads 8 --head-size 128 --tokens 100000"


@pytest.mark.parametrize(
    "words",
    [
        "config",
        "config --json",
        "doctor --no-transfers",
        f"plan {SHAPES} --json",
        "--help",
        "doctor --help",
        "--version",
    ],
)
def test_a_pipe_that_nobody_reads_is_no_traceback(words: str) -> None:
    # What is printed waits in a buffer, as it does for whoever types the command.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "kvferry", *words.split()]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.close(writer)
    assert (done.stderr, done.returncode) == ("", 141)


@pytest.mark.parametrize("words", ["config", "--help", "--version"])
def test_a_closed_standard_output_is_no_traceback(words: str) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "kvferry", *words.split()]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
