"""`kvferry doctor` on UCX: which it finds, and settings that mislead it."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import kvferry
import pytest
from commands import ROOT, skip
from doctor_command import Told, doctor
from kvferry import nixl
from kvferry.doctor import KINDS, system

pytestmark = pytest.mark.slow


def by_network(finding: dict[str, Any]) -> bool:
    """Tells whether all 32 MiB went by TCP."""
    return "32 MiB served by messages" in finding["evidence"]


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


def test_no_network() -> None:
    told = doctor("--config", '{"port": 0}', UCX_TLS="cma,posix")
    assert told["transports"]["case"] == "no-network", told.troubles
    assert "unset UCX_TLS" in told["transports"]["remedy"]
    assert told["network-devices"]["case"] == "unknown"


def test_a_device_that_does_not_exist_is_told_with_those_that_do() -> None:
    told = doctor("--config", '{"port": 0}', UCX_NET_DEVICES="nosuchdevice0")
    assert told["transports"]["case"] == "none", told.troubles
    assert "UCX_NET_DEVICES=nosuchdevice0 names no network device of this host" in told["transports"]["evidence"][0]
    assert "unset UCX_NET_DEVICES: this machine has " in told["transports"]["remedy"]


def test_a_used_up_port_range_is_told() -> None:
    with socket.create_server(("0.0.0.0", 0)) as held:
        port = held.getsockname()[1]
        told = doctor("--config", '{"port": 0}', UCX_TCP_PORT_RANGE=str(port))
    assert told["transports"]["case"] == "failed", told.troubles
    assert f"every port of UCX_TCP_PORT_RANGE, {port}-{port}, is in use" in told["transports"]["evidence"][0]


def test_network_devices_are_told_with_reasons() -> None:
    told = doctor("--config", '{"port": 0}')["network-devices"]
    assert told["case"] in ("all", "some")
    assert any(line.startswith("lo (127.0.0.1") and "used by default" in line for line in told["evidence"])
    told = doctor("--config", '{"port": 0}', UCX_NET_DEVICES="lo")["network-devices"]
    assert any("NET_DEVICES=lo allows it" in line for line in told["evidence"])


def test_a_misspelt_setting_is_told_with_the_right_name() -> None:
    told = doctor("--config", '{"port": 0}', UCX_TLSS="tcp", UCX_NO_SUCH_THING_AT_ALL="1")
    assert (told["ucx-settings"]["case"], told.code) == ("unknown-names", 0)
    assert told["ucx-settings"]["evidence"] == ["UCX_NO_SUCH_THING_AT_ALL", "UCX_TLSS (did you mean UCX_TLS?)"]
    assert "UCX_TLSS (did you mean UCX_TLS?)" in told["ucx-settings"]["remedy"]


def test_without_any_ucx_the_remedy_names_the_package(tmp_path: Path, here: Told) -> None:
    if any(one["source"] == "the system's" and one["version"] for one in here.map["ucx"]["candidates"]):
        skip("no-system-ucx", "the system has a UCX, so there is always one")
    # Where the library lies it would find the package beside itself, and this Python has one of its own: a package of
    # that name without a library stands before it.
    (tmp_path / "shadow/libucx").mkdir(parents=True)
    (tmp_path / "shadow/libucx/__init__.py").touch()
    library = shutil.copy(kvferry.library_path(), tmp_path / "libkvferry.so")
    path = os.pathsep.join(filter(None, [str(tmp_path / "shadow"), os.environ.get("PYTHONPATH")]))
    nowhere = {"VIRTUAL_ENV": None, "CONDA_PREFIX": None, "CARGO_MANIFEST_DIR": None}
    told = doctor("--config", '{"port": 0}', KVFERRY_LIBRARY=str(library), PYTHONPATH=path, **nowhere)
    assert told.troubles == {"ucx": "missing"}
    assert "kvferry-ucx" in told["ucx"]["remedy"]
    assert told.cases("ucx-versions", "transports", "transfer-tcp") == ["unknown", "unknown", "skipped"]
    assert [one["fate"] for one in told.map["ucx"]["candidates"]] == ["refused", "refused"]
    # A NIXL with the plug-in brings one of its own, which is all that the plug-in needs.
    package, site = "nixl_cu12", tmp_path / "site"
    libucp = site / f"{package}.libs" / "libucp-0a1b.so.0.0.0"
    for file in (libucp, site / f".{package}.mesonpy.libs" / "plugins" / nixl.FILE_NAME):
        file.parent.mkdir(parents=True)
        file.touch()
    info = site / f"{package}-{nixl.TESTED[-1]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl-cu12\nVersion: {nixl.TESTED[-1]}\n")
    path = os.pathsep.join([path, str(site)])
    nowhere["NIXL_PLUGIN_DIR"] = None
    told = doctor("--config", '{"port": 0}', KVFERRY_LIBRARY=str(library), PYTHONPATH=path, **nowhere)
    assert (told.troubles, told.cases("ucx", "nixl")) == ({}, ["nixl-only", "untried"])
    assert any(f"the plug-in takes the UCX inside it, {libucp}" in line for line in told["ucx"]["evidence"])


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
