"""The folder that scripts/gpu-bundle makes, and its gpu-check on the double of the CUDA driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GENEROUS, ROOT, needs, skip

pytestmark = pytest.mark.slow

LIMIT = 60 << 20
"""Bytes of a bundle."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the wheel that scripts/test has built."""
    needs("readelf")
    wheels = sorted((ROOT / "target" / "wheels").glob("kvferry-*.whl"))
    if not wheels:
        skip("wheel", "there is none in target/wheels: run scripts/build-wheel")
    folder = tmp_path_factory.mktemp("gpu") / "bundle"
    command = [str(word) for word in (ROOT / "scripts" / "gpu-bundle", "--wheel", wheels[-1], folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}\n"
    return folder


def check(bundle: Path, on_double: dict[str, str], *options: str) -> str:
    """What the bundle's gpu-check prints on the double; it must succeed."""
    # Nothing that is named in this environment may stand in for what the bundle lacks.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    environment = {**kept, **on_double, "KVFERRY_PYTHON": sys.executable}
    command = [str(bundle / "gpu-check"), *options]
    # In its own folder, as users run it.
    ran = subprocess.run(command, cwd=bundle, env=environment, capture_output=True, text=True, timeout=GENEROUS)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout + ran.stderr


def test_it_is_small_and_has_no_driver(bundle: Path) -> None:
    files = list(bundle.rglob("*"))
    assert sum(path.lstat().st_size for path in files) < LIMIT
    # The machine's own would not be found.
    assert [path for path in files if path.name.startswith(("libcuda.so", "libnvidia-ml.so"))] == []


def test_it_is_whole_wherever_it_lies(bundle: Path) -> None:
    for link in (path for path in bundle.rglob("*") if path.is_symlink()):
        assert not link.readlink().is_absolute(), link
        assert link.resolve(strict=True).is_relative_to(bundle.resolve()), link


def test_its_check_passes(bundle: Path, on_double: dict[str, str]) -> None:
    printed = check(bundle, on_double, "--no-benchmark", "--short")
    assert "1 passed, 0 failed" in printed, printed
    assert "copied by the device" in printed, printed
    assert f" at {bundle}/python/libucx/" in printed, printed


def test_its_benchmark_has_nixl_beside_it(bundle: Path, on_double: dict[str, str]) -> None:
    test = "benchmark between device memories"
    printed = check(bundle, on_double, "--tiny-benchmark", "--only", test)
    (passed,) = (line for line in printed.splitlines() if line.startswith(f"passed  {test} ("))
    assert passed.endswith(": beside plain copy, UCX's cuda_ipc, nixl"), printed
