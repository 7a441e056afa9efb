"""The double of the CUDA driver, for tests that run programs on it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from commands import GENEROUS, ROOT


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the double's libraries."""
    folder = tmp_path_factory.mktemp("cuda_double")
    subprocess.run([ROOT / "tests" / "cuda_double" / "build", folder], check=True, timeout=GENEROUS)
    return folder


@pytest.fixture(scope="session")
def on_double(double: Path) -> dict[str, str]:
    """The variables with which a program finds the double, and must."""
    return {
        "LD_LIBRARY_PATH": str(double),
        "KVFERRY_REQUIRE": "cuda",
        # Beside other tests' memory on the same double.
        "KVFERRY_CUDA_DOUBLE_MACHINE": f"test_{os.getpid()}",
    }
