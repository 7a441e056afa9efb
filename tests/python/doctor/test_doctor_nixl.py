"""The doctor's finding about NIXL, with wheels that are described and not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvferry import nixl
from kvferry._nixl_read import STEP
from kvferry.doctor import nixl as doctor_nixl
from kvferry.doctor.nixl import finding

WHEEL = "nixl_cu12"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the plug-ins of an installed NIXL lie, of the newest version that is known."""
    site = tmp_path / "site"
    plugins = site / f".{WHEEL}.mesonpy.libs" / "plugins"
    plugins.mkdir(parents=True)
    describe(site, nixl.KNOWN[-1])
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    return plugins


def describe(site: Path, version: str) -> None:
    """Makes the wheel one of this version."""
    for old in site.glob("*.dist-info"):
        old.rename(site / f"{WHEEL}-{version}.dist-info")
    info = site / f"{WHEEL}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl-cu12\nVersion: {version}\n")


def test_a_python_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_WHEELS", ("nixl-of-nobody",))
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state, told.evidence) == ("absent", "not applicable", [])


def test_a_nixl_without_the_plug_in_is_no_trouble(folder: Path) -> None:
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("uninstalled", "not applicable")
    (line,) = told.evidence
    assert line.startswith(f"{WHEEL} {nixl.KNOWN[-1]}: no plug-in in {folder}")
    assert "the wheel kvferry-nixl has it" in line


def test_a_link_that_leads_nowhere(folder: Path, tmp_path: Path) -> None:
    (folder / nixl.FILE_NAME).symlink_to(tmp_path / "gone.so")
    told = finding(transfers=False, has_rdma=False)
    assert (told.case, told.state) == ("dangling", "problem")
    assert told.evidence == [
        f"{WHEEL} {nixl.KNOWN[-1]}: {folder / nixl.FILE_NAME} leads to {tmp_path / 'gone.so'}",
    ]
    assert "kvferry-nixl" in told.remedy


def test_a_version_that_the_plug_in_refuses(folder: Path) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    describe(folder.parents[1], "9.9.9")
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("refused", "problem")
    assert nixl.KNOWN[-1] in told.remedy
    assert any(line.startswith(f"{WHEEL} 9.9.9: the plug-in accepts 1.3.0") for line in told.evidence)


def test_a_folder_that_hides_the_plug_in(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    assert finding(transfers=False, has_rdma=False).case == "untried"
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("hidden", "warning")
    assert str(folder / nixl.FILE_NAME) in told.remedy
    assert told.evidence == [f"{WHEEL} {nixl.KNOWN[-1]}: no plug-in in NIXL_PLUGIN_DIR={tmp_path}"]


def test_a_nixl_that_does_not_load(folder: Path) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    package = folder.parents[1] / WHEEL
    package.mkdir()
    lines = ("import sys", "print('kvferry NIXL plug-in: no', file=sys.stderr)", "print('chatter')", "raise OSError(7)")
    (package / "_api.py").write_text("\n".join(lines))
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("failed", "problem")
    assert [line.partition(": ")[2] for line in told.evidence[1:]] == ["kvferry NIXL plug-in: no", "OSError: 7"]


@pytest.mark.parametrize(
    ("transports", "others", "case"),
    [
        (("rc_mlx5", "tcp"), [], "works"),
        (("rc_mlx5", "tcp"), None, "works"),
        (("rc_mlx5", "tcp"), ["UCX 1.21.0 at /x"], "two-ucx"),
        (("cma", "tcp"), [], "no-rdma"),
    ],
)
def test_what_a_trial_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, transports: tuple[str, ...], others: list[str] | None, case: str
) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    trial = nixl.Trial("", "UCX 1.23.0 at /n", transports, "256 KiB copied", others)
    monkeypatch.setattr(nixl, "try_read", lambda package, limit_s: trial)
    told = finding(transfers=True, has_rdma=True)
    assert (told.case, told.state) == (case, "ok" if case == "works" else "warning")
    assert [line.partition(": ")[2] for line in told.evidence[1:3]] == ["used UCX 1.23.0 at /n", "256 KiB copied"]
    assert finding(transfers=True, has_rdma=False).case == ("works" if case == "no-rdma" else case)


@pytest.mark.parametrize(
    ("last", "evidence"),
    [("os.kill(os.getpid(), 9)", "the process ended with -9"), ("time.sleep(600)", "no answer within")],
    ids=["dies", "hangs"],
)
def test_a_second_ucx_that_ends_the_process_is_not_told_as_a_failed_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, last: str, evidence: str
) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    ucx = {"path": "/x", "version": "1.2"}
    step = {"bytes": {"copied": 4096}, "lanes": "tcp/lo", "ucx": ucx, "transports": ["tcp"]}
    # In place of the process that reads, what it prints before NIXL's own backend is made.
    program = f"import os, time\nprint({STEP + json.dumps(step)!r}, flush=True)\n{last}"
    monkeypatch.setattr(nixl, "_COMMAND", ("-c", program))
    # One that hangs has all of it: long enough for a busy machine to print the line before.
    monkeypatch.setattr(doctor_nixl, "LIMIT_S", 20.0)
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("two-ucx", "warning"), told.evidence
    assert any(evidence in line for line in told.evidence), told.evidence


def test_a_read_that_takes_too_long_is_not_told_as_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    monkeypatch.setattr(nixl, "_COMMAND", ("-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(doctor_nixl, "LIMIT_S", 1.0)
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("silent", "warning"), told.evidence
