"""Device memory through stock NIXL with the plug-in, on the double of the CUDA driver: what is seen is the double's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import HERE, INSTALLED, ROOT

pytestmark = pytest.mark.slow

LIMIT_S = 600


def environment(plugin: Path, version: str, folder: Path) -> dict[str, str]:
    """Variables for a process with the double, NIXL for CUDA 12 and what that NIXL's UCX needs to see device memory."""
    libraries, packages = folder / "lib", folder / "packages"
    libraries.mkdir()
    packages.mkdir()
    subprocess.run([ROOT / "tests" / "cuda_double" / "build", libraries], check=True, timeout=LIMIT_S)
    # Without CUDA's runtime library, which PyTorch brings on a machine with a GPU, UCX takes all memory for the host's.
    libucx = importlib.util.find_spec("libucx")
    assert libucx is not None
    assert libucx.submodule_search_locations is not None
    wheels = Path(libucx.submodule_search_locations[0]).parent
    (runtime,) = wheels.glob("libucx_cu12.libs/libcudart-*.so.12*")
    (libraries / "libcudart.so.12").symlink_to(runtime)
    for path in (INSTALLED / version).iterdir():
        if "nixl_cu12" in path.name or path.name == "nixl_meta_utils.py":
            (packages / path.name).symlink_to(path)
    paths = (ROOT / "tests" / "gpu", HERE / "stubs", packages, os.environ.get("PYTHONPATH"))
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "NIXL_PLUGIN_DIR": str(plugin),
        # Beside other tests' memory on the same double.
        "KVFERRY_CUDA_DOUBLE_MACHINE": f"nixl_{os.getpid()}_{version}",
    }


def test_device_and_host_memory_are_read_and_written(plugin: Path, edge: str, tmp_path: Path) -> None:
    program = [sys.executable, ROOT / "tests" / "gpu" / "plugin.py", "--no-benchmark"]
    variables = environment(plugin, edge, tmp_path)
    ran = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    told = [line for line in ran.stdout.splitlines() if line.startswith("  nixl with kvferry, ")]
    within = [line for line in told if " of one agent: " in line]
    assert (len(told), len(within)) == (8, 3), ran.stdout
    assert all(line.endswith(": 320 descriptors" if line in within else ": 640 descriptors") for line in told), (
        ran.stdout
    )
