"""The double of the CUDA driver has every function that UCX's CUDA modules link to, and no wheel ships a driver."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from commands import GENEROUS, ROOT, needs, skip

pytestmark = pytest.mark.slow

OF_THE_DRIVER = re.compile(r"(cu|nvml)[A-Z]\w*")
DRIVER = re.compile(r"lib(cuda|nvidia-ml)\.so")


def symbols(library: Path, *options: str) -> set[str]:
    """The driver's functions among a library's dynamic symbols."""
    listed = subprocess.run(
        ["nm", "-D", "--format=posix", *options, library], check=True, capture_output=True, text=True, timeout=GENEROUS
    )
    names = {line.split()[0].partition("@")[0] for line in listed.stdout.splitlines()}
    return {name for name in names if OF_THE_DRIVER.fullmatch(name)}


def modules() -> list[Path]:
    """UCX's modules for CUDA that the package libucx has."""
    spec = importlib.util.find_spec("libucx")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return [path for folder in folders for path in sorted(Path(folder).glob("lib/ucx/libuc[tm]_cuda*.so"))]


def test_the_double_has_what_ucx_links_to(double: Path) -> None:
    needs("nm")
    if not modules():
        skip("libucx", "this environment has none with CUDA modules")
    libraries = [double / name for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    there = set().union(*(symbols(library, "--defined-only") for library in libraries))
    needed = {module.name: symbols(module, "--undefined-only") for module in modules()}
    assert {"cuInit", "nvmlErrorString"} <= set().union(*needed.values()), needed
    missing = {name: sorted(functions - there) for name, functions in needed.items() if functions - there}
    assert missing == {}


def test_wheels_have_no_driver() -> None:
    wheels = sorted((ROOT / "target" / "wheels").glob("kvferry*.whl"))
    if not wheels:
        skip("wheel", "there is none in target/wheels: run scripts/build-wheel")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            assert [name for name in archive.namelist() if DRIVER.search(name)] == [], wheel.name
