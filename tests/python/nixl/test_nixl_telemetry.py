"""What users of stock NIXL see of the plug-in: bytes per peer and path, NIXL's own figures, and which UCX it uses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvferry
import numpy as np
import pytest
from hosts import ENOUGH, HERE, INSTALLED, Failed, Process, beside_ucx, serve
from kvferry import nixl
from kvferry._nixl_read import library_of
from kvferry.doctor import nixl as doctor_nixl
from kvferry.doctor.nixl import finding
from nixl_host import GENEROUS, pattern
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.slow

SIZE = 1 << 20


def samples(path: Path, peer: str) -> dict[str, Any]:
    """The values of one peer by metric, without prefix, and the labels of its connection."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(path.read_text()):
        for one in family.samples:
            if one.labels.get("peer") == peer:
                found[one.name.removeprefix("kvferry_peer_")] = one.value
                if one.name.endswith("connected"):
                    found |= one.labels
    return found


def shown(path: Path, peer: str, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The values of one peer, waiting until they are as they should be."""
    deadline = time.monotonic() + GENEROUS
    while not is_there(found := samples(path, peer)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(("transport", "way"), [("shm", "copied"), ("tcp", "served")])
def test_a_file_shows_the_path_and_the_bytes_of_each_peer(
    plugin: Path, edge: str, tmp_path: Path, transport: str, way: str
) -> None:
    env = {"KVFERRY_TRANSPORT": transport, "KVFERRY_METRICS_FILE": str(tmp_path / "%a.prom")}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        serve(a, "a", 1, SIZE)
        address = serve(b, "b", 2, SIZE)
        a.add(b.metadata())
        a.make("read", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b")
        a.make("write", "WRITE", [("cache", 0, 4096)], [(address, 4096, 0)], "b")
        for key in ("read", "write", "read"):
            assert a.run(key) == "DONE"
        found = shown(tmp_path / "a.prom", "b", lambda found: found.get("transfers_done_total") == 3)
        assert (found["bytes_read_total"], found["bytes_written_total"]) == (2 * SIZE, 4096)
        assert found[f"{way}_bytes_total"] == 2 * SIZE + 4096
        assert (found["connected"], found["transfers_failed_total"], found["agent"]) == (1, 0, "a")
        assert "tcp/" in found["lanes"]
        assert ("process_vm_readv" in found["host_path"]) == (transport == "shm")
        # The owner of the memory has started nothing.
        assert shown(tmp_path / "b.prom", "a", lambda found: "connected" in found)["bytes_read_total"] == 0


def test_what_failed_with_a_peer_that_died_is_shown(plugin: Path, edge: str, tmp_path: Path) -> None:
    env = {"KVFERRY_METRICS_FILE": str(tmp_path / "%a.prom")}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        serve(a, "a", 1, ENOUGH)
        address = serve(b, "b", 2, ENOUGH)
        a.add(b.metadata())
        a.make("first", "READ", [("cache", 0, 4096)], [(address, 4096, 0)], "b")
        assert a.run("first") == "DONE"
        b.freeze()
        a.make("x", "READ", [("cache", 0, ENOUGH)], [(address, ENOUGH, 0)], "b")
        assert a.post("x") == "PROC"
        b.kill()
        with pytest.raises(Failed, match="REMOTE_DISCONNECT"):
            a.wait("x")
        found = shown(tmp_path / "a.prom", "b", lambda found: found.get("transfers_failed_total") == 1)
        assert (found["connected"], found["lanes"], found["transfers_done_total"]) == (0, "", 1)


def test_nixls_own_telemetry_counts_transfers_of_the_plug_in(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a, Process(edge, plugin) as b:
        serve(a, "a", 1, SIZE)
        address = serve(b, "b", 2, SIZE)
        a.add(b.metadata())
        blocks = [("cache", 2 * number * 4096, 4096) for number in range(9)]
        a.make("x", "READ", blocks, [(address + offset, length, 0) for _, offset, length in blocks], "b")
        assert a.run("x") == "DONE"
        assert a.telemetry("x") == (9 * 4096, 9)


@pytest.mark.parametrize("order", [["UCX", "KVFERRY"], ["KVFERRY", "UCX"]])
def test_both_backends_live_in_one_process_with_one_ucx(
    plugin: Path, edge: str, tmp_path: Path, order: list[str]
) -> None:
    """Each agent has both, and each moves bytes."""
    env = beside_ucx(plugin, edge, tmp_path / "plugins")
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        addresses = []
        for host, name, seed in ((a, "a", 1), (b, "b", 2)):
            assert sorted(host.start(name, order, {})) == ["KVFERRY", "UCX"]
            addresses.append(host.buffer("cache", seed, 4096))
            host.register("cache", [("cache", 0, 4096)])
            maps = Path(f"/proc/{host.child.pid}/maps").read_text().splitlines()
            assert len({line.split()[-1] for line in maps if "/libucp" in line}) == 1
        a.add(b.metadata())
        for backend in ("KVFERRY", "UCX"):
            a.make("x", "READ", [("cache", 0, 4096)], [(addresses[1], 4096, 0)], "b", b"", [backend])
            assert a.run("x") == "DONE"
            a.release("x")
            np.testing.assert_array_equal(a.contents("cache"), pattern(2, 4096))
            a.fill("cache", 1)


def test_the_command_and_the_doctor_say_which_ucx_there_is(
    plugin: Path, edge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("UCX_", "KVFERRY_UCX_LIB"))]:
        monkeypatch.delenv(name)
    for name, value in beside_ucx(plugin, edge, tmp_path / "plugins").items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(INSTALLED / edge))
    paths = [str(INSTALLED / edge), str(HERE / "stubs"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(nixl, "_WHEELS", ("nixl-cu12",))
    # The machine may be busy.
    monkeypatch.setattr(doctor_nixl, "LIMIT_S", GENEROUS)
    trial = nixl.try_read("nixl_cu12", 2 * GENEROUS)
    assert (trial.trouble, trial.others) == ("", [])
    assert f"{edge}/nixl_cu12.libs/libucp-" in trial.ucx
    assert trial.moved.startswith("256 KiB ")
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("works", "ok")
    assert f"nixl_cu12 {edge}: used {trial.ucx}" in told.evidence
    # One that is named is used, and NIXL's own backend brings NIXL's.
    monkeypatch.setenv("KVFERRY_UCX_LIB", str(kvferry.ucx_info()["path"]))
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("two-ucx", "warning"), told.evidence
    assert "KVFERRY_UCX_LIB" in told.remedy
    assert any("backend UCX brings UCX 1." in line for line in told.evidence)


def test_the_library_is_told_by_what_is_mapped() -> None:
    line = "7f0000000000-7f0000001000 r-xp 00000000 fe:00 12345                      "
    other = line + "/usr/lib/libkvferry-tools/libc.so.6\n"
    for path in (
        "/x/lib/libkvferry.so",
        "/x/lib/libkvferry.so.0.1.0",
        "/x/site-packages/kvferry/_native/lib_native.so",
    ):
        assert library_of(f"{other}{line}{path}\n{other}") == path
    with pytest.raises(RuntimeError, match="no library of kvferry"):
        library_of(other)
