"""`kvferry doctor`: the right finding and the right remedy, in environments that are made to be wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import kvferry
import numpy as np
import pytest
from kvferry import Listener, Worker
from kvferry.cli import main
from kvferry.doctor import KINDS, devices, markdown, system, ucx
from kvferry.doctor.findings import found
from kvferry.doctor.ucx import Seen

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((Path(kvferry.__file__).parent / "doctor" / "schema.json").read_text())
LIMIT_S = 300
STATES_OF_TROUBLE = ("warning", "problem")


def skip(what: str, why: str) -> None:
    """A visible skip, which fails where `KVFERRY_REQUIRE` names `what`."""
    required = re.split("[, ]", os.environ.get("KVFERRY_REQUIRE", ""))
    assert what not in required, f"{what} is required and not there: {why}"
    pytest.skip(f"needs {what}: {why}")


class Told:
    """What a run of the command said."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.stdout, done.stderr
        self.code, self.text = done.returncode, done.stdout + done.stderr
        self.map: dict[str, Any] = json.loads(done.stdout)
        jsonschema.validate(self.map, SCHEMA)
        problems = any(finding["state"] == "problem" for finding in self.map["findings"])
        assert self.code == int(problems), self.troubles

    def __getitem__(self, id: str) -> dict[str, Any]:
        (finding,) = (finding for finding in self.map["findings"] if finding["id"] == id)
        return finding

    def cases(self, *ids: str) -> list[str]:
        return [self[id]["case"] for id in ids]

    @property
    def troubles(self) -> dict[str, str]:
        found = self.map["findings"]
        return {one["id"]: one["case"] for one in found if one["state"] in STATES_OF_TROUBLE}


BASE = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("UCX_", "KVFERRY_UCX_LIB", "KVFERRY_KEY_FILE"))
}
"""Whatever the one who runs the tests has set for UCX."""


def doctor(*words: str, within: Sequence[str] = (), **environment: str | None) -> Told:
    """Runs the command, by default without transfers; `within` is a command that runs it, None unsets a variable."""
    changed = {**BASE, **{name: value for name, value in environment.items() if value is not None}}
    for name in (name for name, value in environment.items() if value is None):
        changed.pop(name, None)
    transfers = () if "--transfers" in words else ("--no-transfers",)
    words = tuple(word for word in words if word != "--transfers")
    command = [*within, sys.executable, "-m", "kvferry", "doctor", "--json", *transfers, *words]
    return Told(subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=changed))


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


@pytest.fixture(scope="module")
def here() -> Told:
    """This machine as it is, with the transfers, and a port that is free."""
    return doctor("--transfers", "--config", json.dumps({"port": free_port()}))


def by_network(finding: dict[str, Any]) -> bool:
    """Whether all 32 MiB went by TCP: by messages until a stream is there."""
    ways = ("32 MiB read by streams", "32 MiB served by messages")
    both = re.compile(r"\S+ [KM]iB read by streams; \S+ [KM]iB served by messages")
    return any(line in ways or both.fullmatch(line) for line in finding["evidence"])


def test_this_machine_as_it_is(here: Told) -> None:
    assert [finding["id"] for finding in here.map["findings"]] == [id for id in KINDS if not id.startswith("peer")]
    assert here.cases("library", "ucx", "ucx-versions", "port") == ["loaded", "chosen", "one", "free"]
    in_use = here.map["ucx"]["in_use"]
    (chosen,) = (one for one in here.map["ucx"]["candidates"] if one["fate"] == "chosen")
    assert (chosen["path"], chosen["version"]) == (in_use["path"], in_use["version"])
    assert Path(in_use["path"]).is_file()
    assert any(in_use["path"] in line for line in here["ucx"]["evidence"])
    assert {"transport": "tcp", "device": "lo"} in here.map["ucx"]["resources"]
    assert here["transfer-tcp"]["case"] == "moved", here["transfer-tcp"]
    assert re.search(r"32 MiB in blocks of 16 KiB at \d+\.\d\d GB/s", here["transfer-tcp"]["evidence"][0])
    assert by_network(here["transfer-tcp"])


def test_the_path_within_the_host_is_that_which_the_kernel_allows(here: Told) -> None:
    if here["same-host"]["case"] != "allowed":
        skip("ptrace", here["same-host"]["evidence"][0])
    assert here["transfer-same-host"]["case"] == "moved", here["transfer-same-host"]
    assert any("process_vm_readv" in line for line in here["transfer-same-host"]["evidence"])


def test_every_device_that_is_there_is_told(here: Told) -> None:
    assert (here["rdma"]["case"] == "none") == (not system.rdma_devices())
    # What the connector would do with neither is on TCP and in host memory.
    assert (here["transfer-rdma"]["state"] == "not applicable") == (here["rdma"]["case"] != "used")
    assert (here["transfer-cuda"]["state"] == "not applicable") == (here["gpu"]["case"] != "used")


# --- settings that mislead


def test_tcp_alone_costs_the_path_within_the_host(here: Told) -> None:
    if here["transports"]["case"] != "found":
        skip("cma", "this machine's UCX has no cma")
    told = doctor("--transfers", "--config", '{"port": 0}', UCX_TLS="tcp")
    assert told.cases("transports", "transfer-same-host") == ["restricted", "slow"], told.troubles
    assert "unset UCX_TLS, or add cma" in told["transports"]["remedy"]
    assert any("cma/memory" in line and "no copies" in line for line in told["transports"]["evidence"])
    assert by_network(told["transfer-same-host"])
    by_option = doctor("--config", '{"port": 0, "transport": "tcp"}')
    assert by_option["transports"]["case"] == "restricted"
    assert "unset the option transport" in by_option["transports"]["remedy"]


def test_rdma_alone_where_there_is_none(here: Told) -> None:
    if here["rdma"]["case"] != "none":
        skip("no-rdma", "this machine has RDMA devices")
    told = doctor("--transfers", "--config", '{"port": 0}', UCX_TLS="rc")
    assert told["transports"]["case"] == "none", told.troubles
    remedy = told["transports"]["remedy"]
    assert remedy.startswith("unset UCX_TLS: this machine has ")
    assert "tcp/lo" in remedy
    assert "rc (the environment's UCX_TLS)" in told["transports"]["evidence"][0]
    # Nothing is tried that cannot work, and no trouble is told twice.
    assert told["transfer-same-host"]["case"] == "absent"
    assert set(told.troubles) == {"transports"}


@pytest.mark.parametrize(("name", "value"), [("UCX_TLS", "cma,posix"), ("UCX_NET_DEVICES", "nosuchdevice0")])
def test_no_network(name: str, value: str) -> None:
    told = doctor("--config", '{"port": 0}', **{name: value})
    assert told["transports"]["case"] == "no-network", told.troubles
    assert f"unset {name}" in told["transports"]["remedy"]


def test_a_misspelt_setting_is_told_with_the_right_name() -> None:
    told = doctor("--config", '{"port": 0}', UCX_TLSS="tcp", UCX_NO_SUCH_THING_AT_ALL="1")
    assert (told["ucx-settings"]["case"], told.code) == ("unknown-names", 0)
    assert told["ucx-settings"]["evidence"] == ["UCX_NO_SUCH_THING_AT_ALL", "UCX_TLSS (did you mean UCX_TLS?)"]
    assert "UCX_TLSS (did you mean UCX_TLS?)" in told["ucx-settings"]["remedy"]


# --- UCX: none, a wrong one, two


def own_library() -> Path:
    return kvferry.library_path()


def test_without_any_ucx_the_remedy_names_the_package(tmp_path: Path, here: Told) -> None:
    if any(one["source"] == "the system's" and one["version"] for one in here.map["ucx"]["candidates"]):
        skip("no-system-ucx", "the system has a UCX, so there is always one")
    # Where the library lies it would find the package beside itself, and this Python has one of its own: a package of
    # that name without a library stands before it.
    (tmp_path / "shadow/libucx").mkdir(parents=True)
    (tmp_path / "shadow/libucx/__init__.py").touch()
    library = shutil.copy(own_library(), tmp_path / "libkvferry.so")
    path = os.pathsep.join(filter(None, [str(tmp_path / "shadow"), os.environ.get("PYTHONPATH")]))
    nowhere = {"VIRTUAL_ENV": None, "CONDA_PREFIX": None, "CARGO_MANIFEST_DIR": None}
    told = doctor("--config", '{"port": 0}', KVFERRY_LIBRARY=str(library), PYTHONPATH=path, **nowhere)
    assert told.troubles == {"ucx": "missing"}
    assert "pip install libucx-cu12" in told["ucx"]["remedy"]
    assert told.cases("ucx-versions", "transports", "transfer-tcp") == ["unknown", "unknown", "skipped"]
    assert [one["fate"] for one in told.map["ucx"]["candidates"]] == ["refused", "refused"]


def test_a_named_ucx_that_is_none() -> None:
    told = doctor("--config", '{"port": 0}', KVFERRY_UCX_LIB="/nowhere/libucp.so.0")
    assert told.troubles == {"ucx": "misnamed"}
    assert "correct or unset KVFERRY_UCX_LIB" in told["ucx"]["remedy"]
    first, *others = told.map["ucx"]["candidates"]
    assert (first["fate"], first["path"]) == ("refused", "/nowhere/libucp.so.0")
    assert others
    assert all(one["fate"] == "not_tried" for one in others)


@pytest.fixture(scope="module")
def older_ucx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libucp of another version under names of its own, as packages that bring their own libraries have them: else
    the dynamic linker would give it the other one's libucs."""
    libraries = ROOT / ".deps/ucx-oldest/libucx/lib"
    if not libraries.is_dir():
        skip("ucx-oldest", "scripts/setup has not installed .deps/ucx-oldest")
    folder = tmp_path_factory.mktemp("ucx")
    names = {f"lib{name}.so.0\0".encode(): f"li9{name}.so.0\0".encode() for name in ("ucp", "uct", "ucs", "ucm")}
    for old, new in names.items():
        data = (libraries / old.decode().rstrip("\0")).read_bytes()
        for name, replacement in names.items():
            data = data.replace(name, replacement)
        (folder / new.decode().rstrip("\0")).write_bytes(data)
    return (folder / "li9ucp.so.0").rename(folder / "libucp-older.so.0")


def loading(tmp_path: Path, *libraries: Path | str) -> str:
    """A PYTHONPATH with which every Python loads these first, as importing another package would."""
    code = (
        f"import ctypes, os\nfor path in {[str(path) for path in libraries]!r}:\n    ctypes.CDLL(path, os.RTLD_NOW)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(code)
    return os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))


def test_two_versions_of_ucx_in_the_process(tmp_path: Path, older_ucx: Path, here: Told) -> None:
    newer = here.map["ucx"]["in_use"]
    for environment in (
        {"PYTHONPATH": loading(tmp_path, older_ucx), "KVFERRY_UCX_LIB": newer["path"]},
        {"PYTHONPATH": loading(tmp_path, older_ucx, newer["path"])},
    ):
        told = doctor("--config", '{"port": 0}', **environment)
        assert told.troubles == {"ucx-versions": "several"}
        assert told["ucx-versions"]["evidence"] == [
            f"in use: UCX {newer['version']} at {newer['path']}",
            f"also loaded: UCX 1.18.1 at {older_ucx}",
        ]
        assert "KVFERRY_UCX_LIB" in told["ucx-versions"]["remedy"]


def test_a_ucx_that_is_loaded_already_is_the_one(tmp_path: Path, older_ucx: Path) -> None:
    told = doctor("--config", '{"port": 0}', PYTHONPATH=loading(tmp_path, older_ucx), KVFERRY_UCX_LIB=None)
    assert told.cases("ucx", "ucx-versions") == ["chosen", "one"]
    assert told.map["ucx"]["in_use"] == {
        "path": str(older_ucx),
        "version": "1.18.1",
        "source": "already loaded in the process",
    }
    # Its modules are not beside it, so that it has no cma.
    assert told["transports"]["case"] == "no-copies"


def test_without_libkvferry_the_rest_is_told_all_the_same() -> None:
    told = doctor("--transfers", "--peer", "127.0.0.1:1", KVFERRY_LIBRARY="/no/such/libkvferry.so")
    assert told.troubles == {"library": "missing"}
    assert "KVFERRY_LIBRARY" in told["library"]["remedy"]
    assert "/no/such/libkvferry.so" in told["library"]["evidence"][0]
    cases = told.cases("options", "ucx", "peer", "transfer-tcp", "key")
    assert cases == ["unknown", "unknown", "unknown", "absent", "none"]
    assert told["same-host"]["evidence"]


# --- the host


def unshared(*flags: str) -> list[str]:
    command = ["unshare", "-r", *flags]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        skip("unshare", str(error))
    else:
        if done.returncode:
            skip("unshare", done.stderr.strip())
    return command


def test_a_network_namespace_without_a_route(here: Told) -> None:
    within = [*unshared("-n"), "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    told = doctor("--transfers", "--config", '{"port": 0}', within=within)
    assert told["address"]["case"] == "local-only", told.troubles
    assert told["address"]["evidence"] == ["127.0.0.1"]
    assert "KVFERRY_HOST" in told["address"]["remedy"]
    assert told["transfer-tcp"]["case"] == "moved"
    # Not even a loopback interface that is up: UCX has no TCP.
    cut = doctor("--config", '{"port": 0}', within=unshared("-n"))
    assert cut["transports"]["case"] == "no-network", cut.troubles
    assert "ip link set lo up" in cut["transports"]["remedy"]


def test_a_tiny_dev_shm() -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    told = doctor("--config", '{"port": 0}', within=[*unshared("-m"), "sh", "-c", mount, "sh"])
    assert told["shm"]["case"] == "small", told["shm"]
    assert told["shm"]["evidence"] == ["1 MiB, 1 MiB of it free"]
    assert "--shm-size" in told["shm"]["remedy"]
    mount = 'mount -t tmpfs -o ro,size=1m tmpfs /dev/shm && exec "$@"'
    told = doctor("--config", '{"port": 0}', within=[*unshared("-m"), "sh", "-c", mount, "sh"])
    assert told["shm"]["case"] == "unusable", told["shm"]


def test_few_open_files() -> None:
    told = doctor("--config", '{"port": 0}', within=["sh", "-c", 'ulimit -Sn 256 && exec "$@"', "sh"])
    assert told["open-files"]["case"] == "low"
    assert told["open-files"]["evidence"][0].startswith("soft limit 256,")


def test_a_port_in_use_and_one_that_is_free() -> None:
    with Listener({"engine_id": "other", "host": "127.0.0.1"}) as listener:
        _, port = listener.address
        config = json.dumps({"host": "127.0.0.1", "port": port})
        told = doctor("--config", config)
        assert told["port"]["case"] == "in-use", told.troubles
        assert "KVFERRY_PORT" in told["port"]["remedy"]
        assert any(f"127.0.0.1: process {os.getpid()} " in line for line in told["port"]["evidence"])
    told = doctor(KVFERRY_HOST="127.0.0.1", KVFERRY_PORT=str(free_port()))
    assert told["port"]["case"] == "free", told.troubles


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


# --- a running engine

LAYERS, HEADS, HEAD_SIZE, TOKENS, BLOCKS = 3, 4, 8, 4, 20
CONTENT = 2 * 2 * HEAD_SIZE
"""K and V of bfloat16 per token and head."""
SHAPE = f"--layers {LAYERS} --kv-heads {HEADS} --head-size {HEAD_SIZE}"


def geometry(rank: int, ranks: int) -> dict[str, object]:
    heads = HEADS // ranks
    head = TOKENS * CONTENT
    area = {
        "part": "kv",
        "group": 0,
        "region": 0,
        "num_blocks": BLOCKS,
        "block_stride": heads * head,
        "heads": heads,
        "first_head": rank * heads,
        "total_heads": HEADS,
        "head_stride": head,
        "tokens": TOKENS,
        "token_stride": CONTENT,
        "content": CONTENT,
    }
    areas = [
        {**area, "layer": f"model.layers.{layer}.self_attn.attn", "offset": layer * BLOCKS * heads * head}
        for layer in range(LAYERS)
    ]
    return {"groups": [{"kind": "full", "block_size": TOKENS}], "areas": areas}


@contextmanager
def running(ranks: int = 2, ready: bool = True, **more: object) -> Iterator[str]:
    """An engine's workers and its listener: where it listens."""
    with ExitStack() as stack:
        shape = {"engine_id": "prefill", "tp_size": ranks}
        listener = stack.enter_context(Listener({**shape, "host": "127.0.0.1", **more}))
        for rank in range(ranks if ready else ranks - 1):
            memory = np.zeros(LAYERS * BLOCKS * HEADS // ranks * TOKENS * CONTENT, np.uint8)
            compat = [["model", "tiny"], ["cache_dtype", "auto"]]
            worker = stack.enter_context(Worker({**shape, "tp_rank": rank, "compat": compat, **more}))
            worker.register(memory.ctypes.data, memory.nbytes)
            worker.set_geometry(geometry(rank, ranks))
            listener.offer(worker.metadata())
            stack.callback(memory.fill, 0)
        host, port = listener.address
        yield f"{host}:{port}"


def ask(where: str, words: str = "", **environment: str) -> Told:
    return doctor("--peer", where, *words.split(), KVFERRY_PORT="0", **environment)


def test_a_peer_of_equal_and_of_fitting_shape(here: Told) -> None:
    with running() as where:
        equal = ask(where, f"--shape tp=2,block={TOKENS} {SHAPE} --compat model=tiny")
        other = ask(where, f"--shape pp=2,block=64,layout=token-major,parts=regions {SHAPE}")
    for told in (equal, other):
        assert told.cases("peer", "peer-shape") == ["answered", "fits"], told["peer-shape"]
        peer = told.map["peer"]
        assert (peer["engine"], peer["shape"], len(peer["ranks"])) == ("prefill", {"tp": 2, "pp": 1, "dcp": 1}, 2)
        assert peer["ranks"][1]["heads"] == [[2, 3]]
    if here["transfer-same-host"]["case"] == "moved":
        assert equal["peer-path"]["case"] == "fast"
        assert all("process_vm_readv" in line for line in equal["peer-path"]["evidence"])
    lines = "\n".join(other["peer-shape"]["evidence"])
    assert "tokens per block: 64 here, 4 there: fits (may differ)" in lines
    assert "bytes per token and head: k+v 32 here, k+v 32 there: fits\n" in lines + "\n"


def test_a_peer_of_a_differing_shape_is_told_field_by_field() -> None:
    with running() as where:
        told = ask(where, f"--shape tp=1 --layers 4 --kv-heads 2 --head-size {HEAD_SIZE} --compat model=large")
    assert told["peer-shape"]["case"] == "differs"
    wrong = {field["name"]: field for field in told.map["peer"]["fields"] if field["fits"] is False}
    assert set(wrong) == {
        "layers",
        "KV heads of the model",
        "model",
        "check of every pair of ranks",
    }
    assert (wrong["layers"]["here"], wrong["layers"]["there"]) == ("4 (0-3)", "3 (0-2)")
    assert (wrong["model"]["here"], wrong["model"]["there"]) == ("large", "tiny")
    assert all(field["remedy"] for field in wrong.values())
    assert "KV heads of the model" in told["peer-shape"]["remedy"]


def test_a_peer_without_a_shape_is_described() -> None:
    with running(1) as where:
        told = ask(where, "--no-connect")
    assert told.cases("peer", "peer-shape", "peer-path") == ["answered", "described", "skipped"]
    assert "model: tiny" in told["peer-shape"]["evidence"]
    assert any(line.startswith("pp 0 tp 0: layers 0-2, heads 0-3, 20 blocks") for line in told["peer"]["evidence"])


def test_a_peer_by_messages_on_this_host_is_slow() -> None:
    with running(1) as where:
        told = ask(where, UCX_TLS="tcp")
    assert told["peer-path"]["case"] == "slow", told["peer-path"]
    assert "served by messages" in told["peer-path"]["evidence"][0]


def test_nobody_listens() -> None:
    told = ask(f"127.0.0.1:{free_port()}")
    assert told.cases("peer", "peer-shape", "peer-path") == ["unreachable", "unknown", "unknown"]
    assert "5680" in told["peer"]["remedy"]
    assert told.map["peer"] is None


def test_a_peer_that_is_starting_and_something_else_that_listens() -> None:
    with running(ready=False) as where:
        told = ask(where)
    assert told["peer"]["case"] == "silent", told["peer"]
    assert any("1 of its 2 ranks have not reported yet" in line for line in told["peer"]["evidence"])
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = f"127.0.0.1:{mute.getsockname()[1]}"
        told = ask(where)
    assert told["peer"]["case"] == "unreachable", told["peer"]
    assert any(where in line and "says nothing" in line for line in told["peer"]["evidence"])


class Refusing(BaseHTTPRequestHandler):
    """An HTTP server, as vLLM's own port has one."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_port_of_another_program_is_told_as_that() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = ask(f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert told["peer"]["case"] == "foreign", told["peer"]
    assert any("is no kvferry listener but" in line for line in told["peer"]["evidence"])


def test_the_time_is_kept_where_packets_are_dropped() -> None:
    # The kernel drops what asks to connect to a port whose queue is full.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as held:
        for _ in range(4):
            filling = held.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(full.getsockname())
        start = time.monotonic()
        told = ask(f"127.0.0.1:{full.getsockname()[1]}", "--timeout 15")
        took = time.monotonic() - start
    assert told["peer"]["case"] == "unreachable", told["peer"]
    assert any("does not answer" in line for line in told["peer"]["evidence"])
    # The kernel would try for two minutes; the start of Python on a busy machine is not counted by the command.
    assert took < 60


def test_the_default_port_is_that_of_an_engine() -> None:
    with ExitStack() as held:
        # Whoever else has it will do.
        with suppress(OSError):
            held.enter_context(socket.create_server(("0.0.0.0", 5680)))
        told = doctor()
    assert told["port"]["case"] == "in-use", told["port"]
    assert any("port 5680" in line for line in told["port"]["evidence"])


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


def key_at(path: Path) -> str:
    main(["key", str(path)])
    return str(path)


def test_a_peer_with_a_key(tmp_path: Path) -> None:
    right, wrong = key_at(tmp_path / "right"), key_at(tmp_path / "wrong")
    with running(1, key_file=right) as where:
        same = ask(where, KVFERRY_KEY_FILE=right)
        others = [ask(where, KVFERRY_KEY_FILE=wrong), ask(where)]
    assert same.cases("key", "peer", "peer-path") == ["usable", "answered", "fast"], same.troubles
    for told in others:
        assert told["peer"]["case"] == "key", told["peer"]
        assert "kvferry key" in told["peer"]["remedy"]
    with running(1, key_file="") as where:
        told = ask(where, KVFERRY_KEY_FILE=right)
    assert told["peer"]["case"] == "key", told["peer"]
    for told in (same, *others):
        for path in (right, wrong):
            assert Path(path).read_text().strip() not in told.text


# --- facts of machines that are not at hand


def file(root: Path, path: str, text: str = "") -> Path:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text + "\n")
    return place


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two GPUs and two RDMA devices, the first of each behind one switch, the others on other sockets."""
    root = tmp_path / "root"
    pci = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    for address, parent, node in (("0000:02:00.0", pci, 0), ("0000:81:00.0", "sys/devices/pci0000:80", 1)):
        folder = f"{parent}/{address}"
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(node))):
            file(root, f"{folder}/{name}", text)
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root / folder)
    for name, folder, node, state in (
        ("mlx5_0", f"{pci}/0000:03:00.0", 0, "4: ACTIVE"),
        ("mlx5_1", "sys/devices/pci0000:c0/0000:c1:00.0", 2, "1: DOWN"),
    ):
        file(root, f"{folder}/numa_node", str(node))
        for what, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
            file(root, f"sys/class/infiniband/{name}/ports/1/{what}", text)
        (root / f"sys/class/infiniband/{name}/device").symlink_to(root / folder)
    return root


def test_distances_between_gpus_and_rdma_devices(machine: Path) -> None:
    near, far = system.gpus(machine)
    cards = system.rdma_devices(machine)
    assert [[port.is_up for port in card.ports] for card in cards] == [[True], [False]]
    assert "mlx5_0 (0000:03:00.0, NUMA node 0): port 1: 4: ACTIVE, 400 Gb/sec" in cards[0].text
    distances = [[system.distance(gpu, card.device) for card in cards] for gpu in (near, far)]
    assert distances == [["one PCIe switch", "different NUMA nodes"], ["different NUMA nodes"] * 2]
    nearest = system.nearest(near, cards)
    assert nearest is not None
    assert nearest[0].device.name == "mlx5_0"


def seen(*resources: tuple[str, str], **more: Any) -> Seen:
    info = {"path": "/x", "version": "1.22.0", "source": "the system's"}
    return Seen(info=info, resources=list(resources), available=list(resources), **more)


TCP, RC = ("tcp", "eth0"), ("rc_mlx5", "mlx5_0:1")


def test_why_rdma_is_not_used(machine: Path) -> None:
    assert devices.rdma(seen(TCP, RC), machine).case == "used"
    hidden = devices.rdma(seen(TCP), machine)
    assert (hidden.case, hidden.state) == ("hidden", "problem")
    assert "--device /dev/infiniband" in hidden.remedy
    verbs = file(machine, "dev/infiniband/uverbs0")
    if os.geteuid():
        verbs.chmod(0)
        assert devices.rdma(seen(TCP), machine).case == "forbidden"
        verbs.chmod(0o600)
    unused = devices.rdma(seen(TCP), machine)
    assert unused.case == "unused"
    assert "ibverbs-providers" in unused.remedy
    off = Seen(seen(TCP).candidates, seen().info, resources=[TCP], available=[TCP, RC], settings={"UCX_TLS": "tcp"})
    told = devices.rdma(off, machine)
    assert (told.case, told.remedy) == ("off", "unset UCX_TLS")
    (transports,) = (finding for finding in ucx.findings(off, True) if finding.id == "transports")
    assert transports.case == "restricted"
    assert any("no RDMA" in line for line in transports.evidence)
    assert devices.rdma(Seen(), machine).case == "unknown"
    file(machine, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert devices.rdma(seen(TCP), machine).case == "down"


def test_how_far_a_gpu_may_be_and_who_may_lock_memory(machine: Path) -> None:
    assert devices.gpu_rdma(machine).case in ("no-peer-memory", "far")
    (machine / "sys/module/nvidia_peermem").mkdir(parents=True)
    far = devices.gpu_rdma(machine)
    assert far.case == "far"
    assert far.evidence[:2] == [
        "GPU 0000:02:00.0, NUMA node 0: mlx5_0, one PCIe switch",
        "GPU 0000:81:00.0, NUMA node 1: mlx5_0, different NUMA nodes",
    ]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = "unlimited" if soft == resource.RLIM_INFINITY else "limited"
    file(machine, "proc/self/status", "CapEff:\t0000000000000000")
    assert devices.locked_memory(machine).case == limited
    file(machine, "proc/self/status", "CapEff:\t0000000000004000")
    assert devices.locked_memory(machine).case == "unlimited"


def test_what_lets_rdma_read_gpu_memory(tmp_path: Path) -> None:
    assert system.peer_memory(tmp_path, "6.8.0") is None
    file(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64")
    assert system.peer_memory(tmp_path, "6.8.0-45-generic") == "DMA-BUF"
    assert system.peer_memory(tmp_path, "5.4.0") is None
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert system.peer_memory(tmp_path, "5.4.0") == "nvidia_peermem"


def test_limits_of_containers_and_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("container", raising=False)
    assert (system.yama(tmp_path), system.seccomp(tmp_path), system.container(tmp_path)) == (None, "0", [])
    file(tmp_path, "proc/sys/kernel/yama/ptrace_scope", "1")
    file(tmp_path, "proc/self/status", "Name:\tpython\nSeccomp:\t2\nSeccomp_filters:\t1")
    file(tmp_path, "proc/1/cgroup", "0::/kubepods/besteffort/pod1")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert (system.yama(tmp_path), system.seccomp(tmp_path)) == ("1", "2")
    assert system.container(tmp_path) == ["KUBERNETES_SERVICE_HOST is set", "/proc/1/cgroup names kubepods"]


# --- text and documentation


def test_the_table_tells_states_and_remedies() -> None:
    from kvferry.cli.doctor import table

    shown = table(
        [
            found("ucx", "missing", ["1. the system's: refused"]),
            found("transports", "restricted", ["tcp/lo\x1b[2J"], settings="UCX_TLS", lost="cma"),
            found("gpu", "none"),
        ]
    )
    assert re.search(r"^problem +ucx +There is no usable UCX\.$", shown, re.MULTILINE)
    assert "- 1. the system's: refused" in shown
    assert "do: unset UCX_TLS, or add cma" in shown
    assert "\x1b" not in shown
    assert shown.endswith("\n0 ok, 1 warning, 1 problem, 1 not applicable")


def test_every_trouble_has_a_remedy_and_every_case_a_meaning() -> None:
    for id, kind in KINDS.items():
        assert kind.looks_at, id
        for name, case in kind.cases.items():
            assert case.meaning.endswith("."), (id, name)
            assert bool(case.remedy) == (case.state in STATES_OF_TROUBLE), (id, name)


def test_the_documentation_is_the_table_of_the_code() -> None:
    path = ROOT / "docs/doctor.md"
    start, end = "<!-- findings -->\n\n", "\n<!-- end -->"
    text = path.read_text()
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    fresh = before + start + markdown() + end + after
    if os.environ.get("KVFERRY_BLESS"):
        path.write_text(fresh)
    assert text == fresh, "run KVFERRY_BLESS=1 pytest tests/python/test_doctor.py -k documentation"
