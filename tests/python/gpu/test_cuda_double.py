"""The device tests on the double of the CUDA driver: results here are the double's, not a GPU's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LIMIT_S = 1200
"""Seconds of all of gpu-check's tests."""
Variables = dict[str, str]
DEVICE, ONE_SIDED, MESSAGES = "copied by the device", "one-sided", "by messages"


def run(on_double: Variables, *command: object, **variables: str) -> str:
    """What a program prints on the double; it must succeed."""
    # The kvferry of whoever runs the tests, installed or named in their environment.
    folders = (str(ROOT / "tests" / "gpu"), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONDONTWRITEBYTECODE": "1",
        **on_double,
        **variables,
    }
    arguments = [sys.executable, *map(str, command)]
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def check(on_double: Variables, *options: str, **variables: str) -> str:
    """Runs gpu-check's tests."""
    return run(on_double, ROOT / "tests" / "gpu" / "check.py", "--no-benchmark", *options, **variables)


def ways(printed: str, test: str) -> list[str]:
    """The paths that a test's bytes have gone."""
    lines = [line for line in printed.splitlines() if line.startswith(f"passed  {test} (")]
    assert len(lines) == 1, f"{test}:\n{printed}"
    return re.findall(r"\d+ bytes ([a-z -]+)", lines[0])


def test_the_double_is_as_strict_as_it_says(double: Path, on_double: Variables) -> None:
    assert "38 passed, 0 failed" in run(on_double, ROOT / "tests" / "cuda_double" / "selftest.py", double)


def test_gpu_check_passes(on_double: Variables) -> None:
    machine = {"KVFERRY_CUDA_DOUBLE_DEVICES": "2", "KVFERRY_CUDA_DOUBLE_FABRIC": "1"}
    printed = check(on_double, "--transports", "auto,tcp", **machine)
    for test, expected in (
        ("auto: device here, device there", DEVICE),
        ("auto: pieces here and there", DEVICE),
        ("auto: device 0 here, device 1 there", DEVICE),
        ("auto: two devices here, device 0 there", DEVICE),
        ("auto: two devices here, device 1 there", DEVICE),
        ("auto: two devices here, two that are counted otherwise there", DEVICE),
        ("auto: two pieces here, two that are counted otherwise there", DEVICE),
        ("auto: pieces of device 0 here, of device 1 there", DEVICE),
        ("auto: device here, a hidden device's there", DEVICE),
        # The driver imports no descriptor of memory on a device that it does not show.
        ("auto: pieces here, a hidden device's there", MESSAGES),
        ("auto: pieces that sleep and wake", DEVICE),
        ("auto: sealed pieces that sleep and wake", MESSAGES),
        ("tcp: pieces that sleep and wake", MESSAGES),
        ("tcp: sealed pieces that sleep and wake", MESSAGES),
        ("auto: sealed pieces here and there", MESSAGES),
        ("auto: fabric pieces here and there", DEVICE),
        ("auto: memory of pools here and there", MESSAGES),
        ("auto: while a graph is recorded", DEVICE),
        ("tcp: while a graph is recorded", MESSAGES),
        ("auto: device here, host there", MESSAGES),
        ("auto: host here, device there", MESSAGES),
        ("tcp: beside a stream that waits", MESSAGES),
        ("tcp: device here, device there", MESSAGES),
        ("tcp: many layers", MESSAGES),
    ):
        assert ways(printed, test) == [expected], printed


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        # UCX opens the handle of the first of two regions after that.
        ("cuIpcOpenMemHandle_v2:1:999", [DEVICE, ONE_SIDED]),
        ("cuIpcOpenMemHandle_v2:1+:999", [MESSAGES]),
        ("cuModuleLoadData:1+:218", [DEVICE]),
        # What is left of the device's memory once the test has its own two.
        ("cuMemAlloc_v2:3+:2", [DEVICE]),
    ],
)
def test_another_path_is_taken_where_the_driver_refuses(
    on_double: Variables, failing: str, expected: list[str]
) -> None:
    printed = check(on_double, "--short", KVFERRY_CUDA_DOUBLE_FAIL=failing)
    assert ways(printed, "auto: device here, device there") == expected, printed


@pytest.mark.parametrize("kind", ["pieces", "fabric pieces"])
def test_ucx_is_not_asked_for_memory_of_several_allocations(on_double: Variables, kind: str) -> None:
    """It would take the first of them for all. Each side of the peer's two regions cannot be mapped here."""
    machine = {
        "KVFERRY_CUDA_DOUBLE_FABRIC": "1",
        "KVFERRY_CUDA_DOUBLE_FAIL": "cuMemImportFromShareableHandle:1:999,cuMemImportFromShareableHandle:2:999",
    }
    test = f"auto: {kind} here and there"
    assert re.search(r": \d+ operations, 1146504 bytes by messages$", check(on_double, "--only", test, **machine), re.M)


def test_devices_that_do_not_reach_one_another_use_messages(on_double: Variables) -> None:
    apart = {"KVFERRY_CUDA_DOUBLE_DEVICES": "2", "KVFERRY_CUDA_DOUBLE_PEER": "0"}
    for test, expected in (
        ("auto: device 0 here, device 1 there", [MESSAGES]),
        ("auto: pieces of device 0 here, of device 1 there", [MESSAGES]),
        ("auto: device here, a hidden device's there", [MESSAGES]),
        # Half of the bytes stay on their device.
        ("auto: two pieces here, two that are counted otherwise there", [DEVICE, MESSAGES]),
    ):
        printed = check(on_double, "--only", test, **apart)
        assert ways(printed, test) == expected, printed
    # UCX asks of one device only whether it reaches the peer's.
    for device in ("0", "1"):
        test = f"auto: two devices here, device {device} there"
        printed = check(on_double, "--only", test, **apart)
        assert ": 8388608 bytes copied by the device, 8388608 bytes by messages" in printed, printed


def test_instances_of_one_card_do_not_map_each_other_s_memory(on_double: Variables) -> None:
    one, other = (f"MIG-6b766665-7272-7900-646f-75626c654d0{number}" for number in range(2))
    card = {"KVFERRY_CUDA_DOUBLE_MIG": "1", "CUDA_VISIBLE_DEVICES": one}
    assert "1146504 bytes copied by the device" in run(on_double, HERE / "mig.py", one, **card)
    assert "1146504 bytes by messages" in run(on_double, HERE / "mig.py", other, **card)


def flushes(on_double: Variables, calls: Path, *command: object, order: str) -> int:
    """How often a program flushes what RDMA devices wrote, on devices with this order of such writes."""
    calls.unlink(missing_ok=True)
    # UCX reads one-sided: the first to open a handle is kvferry, which copies by the device where it can.
    variables = {"KVFERRY_CUDA_DOUBLE_CALLS": str(calls), "KVFERRY_CUDA_DOUBLE_FAIL": "cuIpcOpenMemHandle_v2:1:999"}
    run(on_double, *command, KVFERRY_CUDA_DOUBLE_RDMA_ORDER=order, **variables)
    return calls.read_text().count(" cuFlushGPUDirectRDMAWrites")


def test_what_came_one_sided_is_flushed_where_the_device_needs_it(on_double: Variables, tmp_path: Path) -> None:
    reads = (ROOT / "tests" / "gpu" / "check.py", "--short")
    # One of each of the two sides to see that it can, and two reads.
    assert flushes(on_double, tmp_path / "calls", *reads, order="0") == 2 + 2
    assert flushes(on_double, tmp_path / "calls", *reads, order="100") == 0
    messages = (HERE / "told.py",)
    assert flushes(on_double, tmp_path / "calls", *messages, order="0") == 1 + 1
    assert flushes(on_double, tmp_path / "calls", *messages, order="100") == 0


def test_a_read_that_cannot_be_flushed_fails(on_double: Variables) -> None:
    with pytest.raises(AssertionError, match="cuFlushGPUDirectRDMAWrites"):
        run(
            on_double,
            ROOT / "tests" / "gpu" / "check.py",
            "--short",
            KVFERRY_CUDA_DOUBLE_FAIL="cuIpcOpenMemHandle_v2:1:999,cuFlushGPUDirectRDMAWrites:2+:999",
            KVFERRY_CUDA_DOUBLE_RDMA_ORDER="0",
        )


def test_the_benchmark_runs_to_its_end(on_double: Variables) -> None:
    printed = check(on_double, "--tiny-benchmark", "--transports", "auto,tcp")
    assert "beside plain copy, UCX's cuda_ipc" in printed, printed
    assert "7 passed, 0 failed" in printed, printed


@pytest.mark.parametrize("what", ["handed-over", "asleep", "killed", "verified"])
def test_workers_hand_over_caches_in_device_memory(on_double: Variables, what: str) -> None:
    print(run(on_double, HERE / "workers.py", what))


def test_bytes_that_differ_from_the_owners_are_refused(on_double: Variables) -> None:
    assert run(on_double, HERE / "verified.py").count(": noticed") == 5


@pytest.mark.parametrize("kind", ["cuda", "pieces"])
def test_a_region_is_opened_once_and_closed(on_double: Variables, tmp_path: Path, kind: str) -> None:
    calls = {"KVFERRY_CUDA_DOUBLE_CALLS": str(tmp_path / "calls")}
    assert "opened and closed" in run(on_double, HERE / "opened.py", kind, **calls)


@pytest.mark.parametrize("test", ["beside memory that is unmapped and waits", "memory that is freed"])
def test_where_unmapping_waits_for_the_device_nothing_else_does(on_double: Variables, test: str) -> None:
    printed = check(on_double, "--only", f"auto: {test}", KVFERRY_CUDA_DOUBLE_CALLS_WAIT="1")
    assert "1 passed, 0 failed" in printed


def test_a_device_that_hangs_holds_up_nothing_else(on_double: Variables) -> None:
    late = {"KVFERRY_CUDA_DOUBLE_DELAY_US": str(3600 * 10**6)}
    assert "the read is over, the write is not" in run(on_double, HERE / "hung_write.py", **late)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_what_the_driver_does_not_tell_is_not_over(on_double: Variables, transport: str) -> None:
    refusing = {
        "KVFERRY_CUDA_DOUBLE_DELAY_US": "300000",
        "KVFERRY_CUDA_DOUBLE_FAIL": "cuEventQuery:1:900,cuStreamSynchronize:1:900",
    }
    printed = run(on_double, HERE / "refused.py", transport, **refusing)
    assert "every byte" in printed
    # The second refusal, of one of the two shutdowns.
    assert printed.count("registered memory must stay alive") == 1, printed


@pytest.mark.parametrize(("transport", "expected"), [("auto", "copied by the kernel"), ("tcp", "by messages")])
def test_an_agent_that_is_older_than_any_use_of_cuda_spoils_no_graph(
    on_double: Variables, transport: str, expected: str
) -> None:
    assert f"1048576 bytes {expected}" in run(on_double, HERE / "early.py", transport)


@pytest.mark.parametrize(("refused", "expected"), [("17:2", "moved"), ("17+:2", "refused")])
def test_pinned_memory_that_is_refused_is_asked_for_again(on_double: Variables, refused: str, expected: str) -> None:
    # Eight tables for copies on the device, eight for messages, and then what those go by.
    failing = {"KVFERRY_CUDA_DOUBLE_FAIL": f"cuMemHostAlloc:{refused}"}
    assert expected in run(on_double, HERE / "starved.py", expected, **failing)


def test_an_agent_leaves_nothing_in_a_context_that_is_reset_after_it(on_double: Variables) -> None:
    assert "moved in both" in run(on_double, HERE / "reset.py")


def test_an_agent_can_be_shut_down_though_its_device_hangs(on_double: Variables, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.touch()
    # An hour until a copy begins.
    late = {"KVFERRY_CUDA_DOUBLE_DELAY_US": str(3600 * 10**6), "KVFERRY_CUDA_DOUBLE_CALLS": str(calls)}
    printed = run(on_double, HERE / "hung_device.py", **late)
    assert "keep registered memory alive" in printed, printed


BENCH = """
from kvferry.bench import hosts
from kvferry.cli import main
with hosts.serving(0, 1 << 20, "cuda", "auto", {}) as (_, (host, port)):
    for direction in ("read", "write"):
        for memory in ("cuda", "host"):
            words = f"--peer {host}:{port} --direction {direction} --memory {memory} --block-bytes 4KiB --blocks 40"
            assert main(["bench", "transfer", *words.split(), "--rounds", "1"]) == 0
"""


def test_kvferry_bench_with_a_server(on_double: Variables) -> None:
    printed = run(on_double, "-c", BENCH)
    assert printed.count("every byte compared") == 4
    assert "cuda 0 memory there, host memory here" in printed
