"""`kvferry doctor --timeout` is kept for the whole command, whatever hangs."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from doctor_command import doctor
from kvferry.doctor import child, devices, peer, ucx
from kvferry.doctor.system import Device
from kvferry.doctor.ucx import Seen

pytestmark = pytest.mark.slow

BUSY_S = 300
"""More than the timeouts here, also on a busy machine, and less than what hangs."""

HUNG_CUDA = """
import ctypes, time

class Hung:
    def cuInit(self, flags):
        time.sleep(600)

class CDLL(ctypes.CDLL):
    def __new__(cls, name, *arguments, **options):
        return Hung() if name == "libcuda.so.1" else super().__new__(cls)

ctypes.CDLL = CDLL
"""
"""For every Python: a driver of CUDA that does not come back."""


def test_a_driver_that_hangs_does_not_hold_the_command(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HUNG_CUDA)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    told = doctor("--config", '{"port": 0}', "--timeout", "100", PYTHONPATH=path)
    assert told["gpu"]["case"] in ("none", "silent"), told["gpu"]
    silence = re.fullmatch(r"CUDA's driver: no answer within (\d+\.\d) s", told["gpu"]["evidence"][-1])
    # Half of what is left.
    assert silence, told["gpu"]
    assert float(silence[1]) <= 50
    # What comes after it has its time too.
    assert told["port"]["case"] == "free", told["port"]
    assert not any("no answer within" in line for line in told["same-host"]["evidence"])


def test_a_gpu_whose_driver_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> str | None:
        raise child.ChildError("no answer within 5.0 s")

    assert devices.gpu(Seen(), Path("/nowhere"), silent).case == "none"
    monkeypatch.setattr(devices.system, "gpus", lambda root: [Device("0000:02:00.0", (), None, "NVIDIA GPU")])
    found = devices.gpu(Seen(), look=silent)
    assert (found.case, found.state) == ("silent", "problem")
    assert found.evidence[-1] == "CUDA's driver: no answer within 5.0 s"
    assert devices.gpu(Seen(), look=lambda: "cuInit failed with CUDA error 100").case == "no-driver"


def test_a_libucp_that_hangs_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "hung.c", tmp_path / "libucp.so.0"
    source.write_text("#include <unistd.h>\n__attribute__((constructor)) static void hang(void) { sleep(600); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    start = time.monotonic()
    monkeypatch.setattr(child, "_until", start + 2)
    assert ucx._version_of(str(library)) is None
    assert time.monotonic() - start < BUSY_S


def test_a_process_that_no_signal_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = subprocess.Popen.kill
    left_behind: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: left_behind.append(process))
    monkeypatch.setattr(child, "_START", "import time; time.sleep(600)")
    start = time.monotonic()
    monkeypatch.setattr(child, "_until", start + 1)
    try:
        with pytest.raises(child.ChildError, match="no answer within"):
            child.call("library")
        assert time.monotonic() - start < BUSY_S
    finally:
        for process in left_behind:
            kill(process)
            process.wait()


def test_names_are_not_looked_up_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_until", float("inf"))
    assert peer._is_here("127.0.0.1")
    assert not peer._is_here("192.0.2.77")
    monkeypatch.setattr(child, "_until", 0.0)
    assert not peer._is_here("127.0.0.1")
