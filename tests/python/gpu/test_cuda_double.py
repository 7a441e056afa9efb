"""The device tests on the double of the CUDA driver: results here are the double's, not a GPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
DOUBLE = ROOT / "tests" / "cuda_double"
LIMIT_S = 600


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the double's libraries."""
    folder = tmp_path_factory.mktemp("cuda_double")
    subprocess.run([DOUBLE / "build", folder], check=True, timeout=LIMIT_S)
    return folder


def run(double: Path, *command: object, **variables: str) -> str:
    """What a program prints on the double; it must succeed."""
    # The kvferry of whoever runs the tests, installed or named in their environment.
    folders = (str(ROOT / "tests" / "gpu"), os.environ.get("PYTHONPATH"))
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(double),
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVFERRY_REQUIRE": "cuda",
        # Beside other tests' memory on the same double.
        "KVFERRY_CUDA_DOUBLE_MACHINE": f"test_{os.getpid()}",
        **variables,
    }
    arguments = [sys.executable, *map(str, command)]
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def check(double: Path, *options: str, **variables: str) -> str:
    """Runs gpu-check's tests."""
    return run(double, ROOT / "tests" / "gpu" / "check.py", "--no-benchmark", *options, **variables)


def way(printed: str, test: str) -> str:
    """The path that a test's bytes have gone."""
    line = next(line for line in printed.splitlines() if line.startswith(f"passed  {test} ("))
    return line.rpartition(" bytes ")[2]


def test_the_double_is_as_strict_as_it_says(double: Path) -> None:
    assert "25 passed, 0 failed" in run(double, DOUBLE / "selftest.py", double)


def test_gpu_check_passes(double: Path) -> None:
    printed = check(double, "--transports", "auto", KVFERRY_CUDA_DOUBLE_DEVICES="2")
    for test, expected in (
        ("auto: device here, device there", "copied by the device"),
        ("auto: pieces here and there", "copied by the device"),
        ("auto: device 0 here, device 1 there", "copied by the device"),
        ("auto: two devices here, device 0 there", "copied by the device"),
        ("auto: two devices here, device 1 there", "copied by the device"),
        ("auto: sealed pieces here and there", "by messages"),
        ("auto: device here, host there", "by messages"),
        ("auto: host here, device there", "by messages"),
        ("tcp: beside a stream that waits", "by messages"),
    ):
        assert way(printed, test) == expected, printed


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        # UCX opens the handle after that.
        ("cuIpcOpenMemHandle_v2:1:999", "one-sided"),
        ("cuIpcOpenMemHandle_v2:1+:999", "by messages"),
        ("cuModuleLoadData:1+:218", "copied by the device"),
        # What is left of the device's memory once the test has its own two.
        ("cuMemAlloc_v2:3+:2", "copied by the device"),
    ],
)
def test_another_path_is_taken_where_the_driver_refuses(double: Path, failing: str, expected: str) -> None:
    printed = check(double, "--short", KVFERRY_CUDA_DOUBLE_FAIL=failing)
    assert way(printed, "auto: device here, device there") == expected, printed


def test_devices_that_do_not_reach_one_another_use_messages(double: Path) -> None:
    apart = {"KVFERRY_CUDA_DOUBLE_DEVICES": "2", "KVFERRY_CUDA_DOUBLE_PEER": "0"}
    test = "auto: device 0 here, device 1 there"
    assert way(check(double, "--only", test, **apart), test) == "by messages"
    # UCX asks of one device only whether it reaches the peer's.
    for device in ("0", "1"):
        test = f"auto: two devices here, device {device} there"
        printed = check(double, "--only", test, **apart)
        assert way(printed, test) == "by messages", printed
        assert "4194304 bytes copied by the device" in printed, printed


def flushes(double: Path, calls: Path, *command: object, order: str) -> int:
    """How often a program flushes what RDMA devices wrote, on devices with this order of such writes."""
    calls.unlink(missing_ok=True)
    # UCX reads one-sided: the first to open a handle is kvferry, which copies by the device where it can.
    variables = {"KVFERRY_CUDA_DOUBLE_CALLS": str(calls), "KVFERRY_CUDA_DOUBLE_FAIL": "cuIpcOpenMemHandle_v2:1:999"}
    run(double, *command, KVFERRY_CUDA_DOUBLE_RDMA_ORDER=order, **variables)
    return calls.read_text().count(" cuFlushGPUDirectRDMAWrites")


def test_what_came_one_sided_is_flushed_where_the_device_needs_it(double: Path, tmp_path: Path) -> None:
    reads = (ROOT / "tests" / "gpu" / "check.py", "--short")
    # One of each of the two sides to see that it can, and two reads.
    assert flushes(double, tmp_path / "calls", *reads, order="0") == 2 + 2
    assert flushes(double, tmp_path / "calls", *reads, order="100") == 0
    messages = (Path(__file__).parent / "told.py",)
    assert flushes(double, tmp_path / "calls", *messages, order="0") == 1 + 1
    assert flushes(double, tmp_path / "calls", *messages, order="100") == 0


def test_a_read_that_cannot_be_flushed_fails(double: Path) -> None:
    with pytest.raises(AssertionError, match="cuFlushGPUDirectRDMAWrites"):
        run(
            double,
            ROOT / "tests" / "gpu" / "check.py",
            "--short",
            KVFERRY_CUDA_DOUBLE_FAIL="cuIpcOpenMemHandle_v2:1:999,cuFlushGPUDirectRDMAWrites:2+:999",
            KVFERRY_CUDA_DOUBLE_RDMA_ORDER="0",
        )


def test_an_agent_can_be_shut_down_though_its_device_hangs(double: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.touch()
    # An hour until a copy begins.
    late = {"KVFERRY_CUDA_DOUBLE_DELAY_US": str(3600 * 10**6), "KVFERRY_CUDA_DOUBLE_CALLS": str(calls)}
    printed = run(double, Path(__file__).parent / "hung_device.py", **late)
    assert "keep registered memory alive" in printed, printed
