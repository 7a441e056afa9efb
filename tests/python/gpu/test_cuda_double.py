"""The device tests on the double of the CUDA driver: results here are the double's, not a GPU's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DOUBLE = ROOT / "tests" / "cuda_double"
LIMIT_S = 1200


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
    assert "38 passed, 0 failed" in run(double, DOUBLE / "selftest.py", double)


def test_gpu_check_passes(double: Path) -> None:
    machine = {"KVFERRY_CUDA_DOUBLE_DEVICES": "2", "KVFERRY_CUDA_DOUBLE_FABRIC": "1"}
    printed = check(double, "--transports", "auto,tcp", **machine)
    for test, expected in (
        ("auto: device here, device there", "copied by the device"),
        ("auto: pieces here and there", "copied by the device"),
        ("auto: device 0 here, device 1 there", "copied by the device"),
        ("auto: two devices here, device 0 there", "copied by the device"),
        ("auto: two devices here, device 1 there", "copied by the device"),
        ("auto: two devices here, two that are counted otherwise there", "copied by the device"),
        ("auto: two pieces here, two that are counted otherwise there", "copied by the device"),
        ("auto: pieces of device 0 here, of device 1 there", "copied by the device"),
        ("auto: device here, a hidden device's there", "copied by the device"),
        # The driver imports no descriptor of memory on a device that it does not show.
        ("auto: pieces here, a hidden device's there", "by messages"),
        ("auto: pieces that sleep and wake", "copied by the device"),
        ("auto: sealed pieces that sleep and wake", "by messages"),
        ("tcp: pieces that sleep and wake", "by messages"),
        ("tcp: sealed pieces that sleep and wake", "by messages"),
        ("auto: sealed pieces here and there", "by messages"),
        ("auto: fabric pieces here and there", "copied by the device"),
        ("auto: memory of pools here and there", "by messages"),
        ("auto: while a graph is recorded", "copied by the device"),
        ("tcp: while a graph is recorded", "by messages"),
        ("auto: device here, host there", "by messages"),
        ("auto: host here, device there", "by messages"),
        ("tcp: beside a stream that waits", "by messages"),
        ("tcp: device here, device there", "by messages"),
        ("tcp: many layers", "by messages"),
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


@pytest.mark.parametrize("kind", ["pieces", "fabric pieces"])
def test_ucx_is_not_asked_for_memory_of_several_allocations(double: Path, kind: str) -> None:
    """It would take the first of them for all. Each side of the peer's two regions cannot be mapped here."""
    machine = {
        "KVFERRY_CUDA_DOUBLE_FABRIC": "1",
        "KVFERRY_CUDA_DOUBLE_FAIL": "cuMemImportFromShareableHandle:1:999,cuMemImportFromShareableHandle:2:999",
    }
    test = f"auto: {kind} here and there"
    assert re.search(r": \d+ operations, 1146504 bytes by messages$", check(double, "--only", test, **machine), re.M)


def test_devices_that_do_not_reach_one_another_use_messages(double: Path) -> None:
    apart = {"KVFERRY_CUDA_DOUBLE_DEVICES": "2", "KVFERRY_CUDA_DOUBLE_PEER": "0"}
    for test in (
        "auto: device 0 here, device 1 there",
        "auto: pieces of device 0 here, of device 1 there",
        "auto: device here, a hidden device's there",
        "auto: two pieces here, two that are counted otherwise there",
    ):
        assert way(check(double, "--only", test, **apart), test) == "by messages"
    # UCX asks of one device only whether it reaches the peer's.
    for device in ("0", "1"):
        test = f"auto: two devices here, device {device} there"
        printed = check(double, "--only", test, **apart)
        assert ": 8388608 bytes copied by the device, 8388608 bytes by messages" in printed, printed


def test_instances_of_one_card_do_not_map_each_other_s_memory(double: Path) -> None:
    one, other = (f"MIG-6b766665-7272-7900-646f-75626c654d0{number}" for number in range(2))
    card = {"KVFERRY_CUDA_DOUBLE_MIG": "1", "CUDA_VISIBLE_DEVICES": one}
    assert "1146504 bytes copied by the device" in run(double, HERE / "mig.py", one, **card)
    assert "1146504 bytes by messages" in run(double, HERE / "mig.py", other, **card)


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
    messages = (HERE / "told.py",)
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


def test_the_benchmark_runs_to_its_end(double: Path) -> None:
    printed = check(double, "--tiny-benchmark", "--transports", "auto,tcp")
    assert "beside plain copy" in printed, printed
    assert "7 passed, 0 failed" in printed, printed


@pytest.mark.parametrize("what", ["handed-over", "asleep", "killed", "verified"])
def test_workers_hand_over_caches_in_device_memory(double: Path, what: str) -> None:
    print(run(double, HERE / "workers.py", what))


def test_bytes_that_differ_from_the_owners_are_refused(double: Path) -> None:
    assert run(double, HERE / "verified.py").count(": noticed") == 5


@pytest.mark.parametrize("kind", ["cuda", "pieces"])
def test_a_region_is_opened_once_and_closed(double: Path, tmp_path: Path, kind: str) -> None:
    calls = {"KVFERRY_CUDA_DOUBLE_CALLS": str(tmp_path / "calls")}
    assert "opened and closed" in run(double, HERE / "opened.py", kind, **calls)


def test_a_device_that_hangs_holds_up_nothing_else(double: Path) -> None:
    late = {"KVFERRY_CUDA_DOUBLE_DELAY_US": str(3600 * 10**6)}
    assert "the read is over, the write is not" in run(double, HERE / "hung_write.py", **late)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_what_the_driver_does_not_tell_is_not_over(double: Path, transport: str) -> None:
    refusing = {
        "KVFERRY_CUDA_DOUBLE_DELAY_US": "300000",
        "KVFERRY_CUDA_DOUBLE_FAIL": "cuEventQuery:1:900,cuStreamSynchronize:1:900",
    }
    assert "every byte" in run(double, HERE / "refused.py", transport, **refusing)


def test_an_agent_leaves_nothing_in_a_context_that_is_reset_after_it(double: Path) -> None:
    assert "moved in both" in run(double, HERE / "reset.py")


def test_an_agent_can_be_shut_down_though_its_device_hangs(double: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.touch()
    # An hour until a copy begins.
    late = {"KVFERRY_CUDA_DOUBLE_DELAY_US": str(3600 * 10**6), "KVFERRY_CUDA_DOUBLE_CALLS": str(calls)}
    printed = run(double, HERE / "hung_device.py", **late)
    assert "keep registered memory alive" in printed, printed
