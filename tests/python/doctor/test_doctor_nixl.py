"""The doctor's finding about NIXL, with wheels that are described and not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import kvferry
import pytest
from kvferry import nixl
from kvferry._nixl_read import STEP
from kvferry.doctor import nixl as doctor_nixl
from kvferry.doctor.nixl import finding

pytestmark = pytest.mark.slow

WHEEL = "nixl_cu12"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the plug-ins of an installed NIXL lie, of the newest version that is known."""
    site = tmp_path / "site"
    plugins = site / f".{WHEEL}.mesonpy.libs" / "plugins"
    plugins.mkdir(parents=True)
    describe(site, nixl.TESTED[-1])
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
    assert line.startswith(f"{WHEEL} {nixl.TESTED[-1]}: no plug-in in {folder}")
    assert "the wheel kvferry-nixl has it" in line


def test_a_link_that_leads_nowhere(folder: Path, tmp_path: Path) -> None:
    (folder / nixl.FILE_NAME).symlink_to(tmp_path / "gone.so")
    told = finding(transfers=False, has_rdma=False)
    assert (told.case, told.state) == ("dangling", "problem")
    assert told.evidence == [
        f"{WHEEL} {nixl.TESTED[-1]}: {folder / nixl.FILE_NAME} leads to {tmp_path / 'gone.so'}",
    ]
    assert "kvferry-nixl" in told.remedy


def test_a_version_that_the_plug_in_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    describe(folder.parents[1], "9.9.9")
    line = "NIXL 9.9.9 (/x) is refused: its plug-in interface differs from that of the tested versions (1.3.0): slot 8"
    program = f"import sys\nprint('kvferry NIXL plug-in: {line}', file=sys.stderr)\nraise OSError(7)"
    monkeypatch.setattr(nixl, "_COMMAND", ("-c", program))
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("refused", "problem")
    assert nixl.TESTED[-1] in told.remedy
    assert any(one.startswith(f"{WHEEL} 9.9.9: the plug-in was tested with 1.3.0") for one in told.evidence)
    assert any(line in one for one in told.evidence)


def test_a_version_that_was_not_tested_is_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    describe(folder.parents[1], "9.9.9")
    assert finding(transfers=False, has_rdma=False).case == "untried"
    trial = nixl.Trial("", "UCX 1.23.0 at /n", ("tcp",), "256 KiB copied", [], remarks=("NIXL 9.9.9 is accepted",))
    monkeypatch.setattr(nixl, "try_read", lambda package, limit_s: trial)
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("works", "ok")
    assert f"{WHEEL} 9.9.9: the plug-in says: NIXL 9.9.9 is accepted" in told.evidence


def test_a_folder_that_hides_the_plug_in(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / nixl.FILE_NAME).write_bytes(b"a plug-in")
    assert finding(transfers=False, has_rdma=False).case == "untried"
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    told = finding(transfers=True, has_rdma=False)
    assert (told.case, told.state) == ("hidden", "warning")
    assert str(folder / nixl.FILE_NAME) in told.remedy
    assert told.evidence == [f"{WHEEL} {nixl.TESTED[-1]}: no plug-in in NIXL_PLUGIN_DIR={tmp_path}"]


def run_python(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs it with this kvferry and what that needs."""
    packages = [str(Path(kvferry.__file__).resolve().parents[1]), sysconfig.get_path("purelib")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    command = [str(word) for word in (python, *words)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture
def nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """A virtual environment made with --system-site-packages: the system has NIXL, it has the wheel kvferry-nixl. Its
    Python, where that NIXL looks for plug-ins, and the plug-in."""
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    # The system: this Python, with packages of its own.
    base, stdlib = tmp_path / "base", Path(sysconfig.get_path("stdlib"))
    libraries = base / stdlib.relative_to(sys.base_prefix)
    libraries.mkdir(parents=True)
    for path in stdlib.iterdir():
        if path.name != "site-packages":
            (libraries / path.name).symlink_to(path)
    program = base / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    program.parent.mkdir()
    program.symlink_to(os.path.realpath(sys.executable))
    made = run_python(program, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "environment")
    assert made.returncode == 0, made.stderr
    python = tmp_path / "environment" / "bin" / "python"
    script = (
        "import site, sys; print(*(site.getsitepackages([prefix])[-1] for prefix in (sys.base_prefix, sys.prefix)))"
    )
    system, own = (Path(word) for word in run_python(python, "-c", script).stdout.split())
    assert system.is_relative_to(base)
    assert own.is_relative_to(tmp_path / "environment")
    inside = Path(f".{WHEEL}.mesonpy.libs") / "plugins"
    for site in (system, own):
        (site / inside).mkdir(parents=True)
    describe(system, nixl.TESTED[-1])
    info = own / f"kvferry_nixl-{kvferry.version()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvferry-nixl\nVersion: {kvferry.version()}\n")
    (own / inside / nixl.FILE_NAME).write_bytes(b"a plug-in")
    return python, system / inside, own / inside / nixl.FILE_NAME


def test_a_plug_in_in_another_environment_than_nixl(
    nested: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, looked_in, plugin = nested

    def told() -> dict[str, str | list[str]]:
        script = (
            "import json; from kvferry.doctor.nixl import finding\n"
            "print(json.dumps(finding(transfers=False, has_rdma=False).as_map()))"
        )
        done = run_python(python, "-c", script)
        assert done.returncode == 0, done.stderr
        found: dict[str, str | list[str]] = json.loads(done.stdout)
        return found

    found = told()
    assert (found["case"], found["state"]) == ("elsewhere", "warning")
    assert found["evidence"] == [
        f"{WHEEL} {nixl.TESTED[-1]}: no plug-in in {looked_in}; that of the wheel kvferry-nixl is {plugin}"
    ]
    assert str(plugin) in found["remedy"]
    assert str(looked_in) in found["remedy"]
    done = run_python(python, "-m", "kvferry", "nixl")
    assert done.returncode == 1
    assert f"no plug-in in {looked_in}" in done.stdout
    assert f"that of the wheel kvferry-nixl is {plugin}" in done.stdout
    # What is said helps.
    (looked_in / nixl.FILE_NAME).symlink_to(plugin)
    assert told()["case"] == "untried"
    # A folder that is named is where NIXL looks.
    (looked_in / nixl.FILE_NAME).unlink()
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    found = told()
    assert found["case"] == "elsewhere"
    assert f"into {tmp_path}" in found["remedy"]
    (tmp_path / nixl.FILE_NAME).symlink_to(plugin)
    assert told()["case"] == "untried"


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
