"""Judges the device tests on the double of the CUDA driver: puts a fault into the device path, and a test has to fail.

Each fault is one that a GPU may hide for long. It is put into a copy of the tree in target/gpu-faults, the library is
built there, and one test of tests/gpu/check.py runs on the double. The fault counts as caught if that test fails, or
its bytes go another way, and the output has the words that tell this fault from any other. First the same tests have
to pass without a fault.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mutants import ROOT, copy_into, tracked

WORK = ROOT / "target/gpu-faults"
LIMIT_S = 900
MAPPED, MESSAGES = "copied by the device", "by messages"
SEGMENTATION_FAULT = "status -11"


@dataclass(frozen=True)
class Fault:
    """A change of one place, and how it must show."""

    name: str
    source: str
    right: str
    wrong: str
    test: str
    """The test's name in tests/gpu/check.py."""
    shows: str
    """What the output has to match."""
    way: str = MAPPED
    """How the test's bytes go without the fault."""
    double: tuple[str, ...] = ()
    """Settings of the double, without `KVFERRY_CUDA_DOUBLE_`."""


COPIER, IPC = "src/mem/cuda/copier.rs", "src/mem/cuda/ipc.rs"
WAITED = "if seen == sys::CUresult::CUDA_ERROR_NOT_READY || is_refusal(seen) {"
NOT_WAITED = """let seen =
            if seen == sys::CUresult::CUDA_ERROR_NOT_READY { sys::CUresult::CUDA_SUCCESS } else { seen };
        if is_refusal(seen) {"""
STREAM = "let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;"
MADE = "if let Err(error) = copier.load() {"
WAITING = ("CALLS_WAIT=1",)
LATE = ("DELAY_US=50000",)
"""Copies begin when the handle is surely closed."""

FAULTS = (
    Fault(
        "an event is not waited for",
        COPIER,
        WAITED,
        NOT_WAITED,
        "auto: device here, device there",
        r"wrong bytes in region",
    ),
    Fault(
        "an event is not waited for, by messages",
        COPIER,
        WAITED,
        NOT_WAITED,
        "tcp: device here, host there",
        r"wrong bytes in region",
        MESSAGES,
    ),
    Fault(
        "the default stream is used",
        COPIER,
        MADE,
        "copier.stream = ptr::null_mut();\n        " + MADE,
        "auto: beside a stream that waits",
        r"TimedOutError: timeout: transfer \d+ has not ended",
    ),
    Fault(
        "a stream that waits for the default one",
        COPIER,
        STREAM,
        "let flags = sys::CUstream_flags::CU_STREAM_DEFAULT as c_uint;",
        "tcp: beside a stream that waits",
        r"TimedOutError: timeout: transfer \d+ has not ended",
        MESSAGES,
    ),
    Fault(
        "the owner leaves a piece of virtual memory out",
        IPC,
        "while at < range.end() {",
        "while at < range.end() && exported.descriptors.is_empty() {",
        "auto: pieces here and there",
        r"a handle of \d+ bytes of device memory, of a region of \d+ bytes",
    ),
    Fault(
        "a piece of virtual memory is left out of the mapping",
        IPC,
        "for piece in pieces {",
        "for piece in pieces.iter().skip(1) {",
        "auto: pieces here and there",
        r"cuMemSetAccess: invalid argument",
    ),
    Fault(
        "a handle is closed while copies use it",
        COPIER,
        "batch.holds.push(Arc::clone(mapping));",
        "let _ = mapping;",
        "auto: disconnected",
        r"cuda double: .*(freed or unmapped|cuIpcCloseMemHandle|lost memory|illegal address)",
        double=LATE,
    ),
    Fault(
        "the processor copies device memory",
        "src/mem/cuda/staging.rs",
        "unsafe { ptr::copy_nonoverlapping(data.as_ptr(), start, len) };",
        """let at = places.first().map_or(0, |place| place.0) as usize;
            unsafe { ptr::copy_nonoverlapping(data.as_ptr(), ptr::with_exposed_provenance_mut(at), len) };""",
        "tcp: device here, host there",
        SEGMENTATION_FAULT,
        MESSAGES,
    ),
    Fault(
        "a mapping outlives its region",
        "src/agent/peers/imports.rs",
        "self.imports.forget(&run);",
        "let _ = &self.imports.mapped;",
        "auto: memory that is freed",
        r"the peer had not taken what it reads of region",
    ),
    Fault(
        "holes are not looked for",
        "src/mem/cuda.rs",
        "Pointer::Device { .. } => check_mapped(range, device),",
        "Pointer::Device { .. } => Ok(()),",
        "refusals",
        r"bytes of cuda memory at .* were accepted",
        "",
    ),
    Fault(
        "the progress thread unmaps",
        IPC,
        "let _ = queue.send(Some(Box::new(MappedMemory { context, mapping, queue: None, trace })));",
        "drop((queue, MappedMemory { context, mapping, queue: None, trace }));",
        "auto: beside memory that is unmapped and waits",
        r"TimedOutError: timeout: transfer \d+ has not ended",
        double=WAITING,
    ),
    Fault(
        "a region is given back before it is unmapped",
        "src/agent/engine/revocation.rs",
        "let traces = self.device_copies.traces(owner, region);",
        "let traces = Vec::new();",
        "auto: beside memory that is unmapped and waits",
        r"AssertionError: the owner was told of the region before it was unmapped",
        double=WAITING,
    ),
    Fault(
        "calls to the driver count for a graph that is recorded",
        "src/mem/cuda.rs",
        "let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;",
        "let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;",
        "auto: while a graph is recorded",
        r"CUDA error 90[01]",
    ),
)


def build(tree: Path) -> None:
    """Builds the library of the copy."""
    command = ["cargo", "build", "--quiet", "--locked"]
    subprocess.run(command, cwd=tree, env={**os.environ, "CARGO_TARGET_DIR": str(WORK / "built")}, check=True)


def run(double: Path, test: str, settings: tuple[str, ...]) -> str:
    """What a test of check.py prints on the double, and its status."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(double),
        "PYTHONPATH": str(ROOT / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVFERRY_LIBRARY": str(WORK / "built/debug/libkvferry.so"),
        "KVFERRY_REQUIRE": "cuda",
        "KVFERRY_CUDA_DOUBLE_MACHINE": f"faults_{os.getpid()}",
    }
    for name, value in (setting.split("=") for setting in settings):
        environment[f"KVFERRY_CUDA_DOUBLE_{name}"] = value
    command = [sys.executable, str(ROOT / "tests/gpu/check.py"), "--no-benchmark", "--only", test]
    # To a file: a peer that is left over holds a pipe open.
    log = WORK / "log"
    with log.open("w") as out:
        done = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S)
    return f"{log.read_text(errors='replace')}\nstatus {done.returncode}\n"


def is_good(printed: str, test: str, way: str) -> bool:
    """Whether a test has passed, and its bytes have gone this way."""
    passed = re.search(rf"^passed  {re.escape(test)} \(.*\): (.*)$", printed, re.MULTILINE)
    # A disconnected peer's test tells of no way.
    return passed is not None and (way in passed[1] or " bytes " not in passed[1])


def judge(fault: Fault, tree: Path, double: Path) -> bool:
    """Whether the fault is caught; prints by which line."""
    source = tree / fault.source
    right = source.read_text()
    if right.count(fault.right) != 1:
        print(f"{fault.name}: {fault.source} has not this once any more: {fault.right}")
        return False
    try:
        source.write_text(right.replace(fault.right, fault.wrong))
        build(tree)
        printed = run(double, fault.test, fault.double)
    finally:
        source.write_text(right)
    shown = next((line for line in printed.splitlines() if re.search(fault.shows, line)), None)
    if shown is None or is_good(printed, fault.test, fault.way):
        print(f"MISSED  {fault.name}: {fault.test}\n{printed}")
        return False
    print(f"caught  {fault.name}: {fault.test}\n        {shown.strip()[:300]}", flush=True)
    return True


def main() -> int:
    """Runs the faults that were asked for; the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="the faults whose names match")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if re.search(options.only, fault.name)]
    tree, double = WORK / "tree", WORK / "double"
    copy_into(tree, tracked())
    if not (tree / ".deps").exists():
        (tree / ".deps").symlink_to(ROOT / ".deps")
    subprocess.run([tree / "tests/cuda_double/build", double], check=True)
    build(tree)
    missed = 0
    for test, way, settings in sorted({(fault.test, fault.way, fault.double) for fault in chosen}):
        printed = run(double, test, settings)
        if not is_good(printed, test, way):
            print(f"FAILED without a fault: {test}\n{printed}")
            return 1
    for fault in chosen:
        missed += not judge(fault, tree, double)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
