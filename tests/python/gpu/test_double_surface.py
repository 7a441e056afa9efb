"""The double of the CUDA driver has every function that UCX's CUDA modules link to, and nothing ships a driver."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LIMIT_S = 120
OF_THE_DRIVER = re.compile(r"(cu|nvml)[A-Z]\w*")
DRIVER = re.compile(r"lib(cuda|nvidia-ml)\.so")


def symbols(library: Path, *options: str) -> set[str]:
    """The driver's functions among a library's dynamic symbols."""
    listed = subprocess.run(
        ["nm", "-D", "--format=posix", *options, library], check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    names = {line.split()[0].partition("@")[0] for line in listed.stdout.splitlines()}
    return {name for name in names if OF_THE_DRIVER.fullmatch(name)}


def modules() -> list[Path]:
    """UCX's modules for CUDA that the package libucx has."""
    spec = importlib.util.find_spec("libucx")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return [path for folder in folders for path in sorted(Path(folder).glob("lib/ucx/libuc[tm]_cuda*.so"))]


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (binutils)")
@pytest.mark.skipif(not modules(), reason="no libucx with CUDA modules in this environment")
def test_the_double_has_what_ucx_links_to(tmp_path: Path) -> None:
    subprocess.run([ROOT / "tests" / "cuda_double" / "build", tmp_path], check=True, timeout=LIMIT_S)
    libraries = [tmp_path / name for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    there = set().union(*(symbols(library, "--defined-only") for library in libraries))
    needed = {module.name: symbols(module, "--undefined-only") for module in modules()}
    assert {"cuInit", "nvmlErrorString"} <= set().union(*needed.values()), needed
    missing = {name: sorted(functions - there) for name, functions in needed.items() if functions - there}
    assert missing == {}


def test_the_bundle_takes_no_driver() -> None:
    script = (ROOT / "scripts" / "gpu-bundle").read_text()
    # The runtime, which it takes, is what the pattern must not find.
    assert "libcudart" in script
    assert DRIVER.search(script) is None


def test_wheels_have_no_driver() -> None:
    wheels = sorted((ROOT / "target" / "wheels").glob("kvferry*.whl"))
    if not wheels:
        pytest.skip("no wheel has been built")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            assert [name for name in archive.namelist() if DRIVER.search(name)] == [], wheel.name
