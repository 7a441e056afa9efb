"""The plug-in, built, and the versions of NIXL that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvferry._find import library_path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hosts import HERE, ROOT, needs_nixl, plugin_folder, versions

VERSIONS = versions()


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in, for NIXL_PLUGIN_DIR."""
    needs_nixl(VERSIONS)
    # The one that the other tests use.
    os.environ.setdefault("KVFERRY_LIBRARY", str(library_path()))
    command = [ROOT / "scripts" / "build-nixl", "--library"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return plugin_folder(ROOT / done.stdout.strip(), tmp_path_factory.mktemp("nixl") / "plugins")


@pytest.fixture(scope="session")
def late(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libkvferry that late.cpp makes late."""
    del plugin
    folder = tmp_path_factory.mktemp("late")
    (folder / "libkvferry.so.1").symlink_to(os.environ["KVFERRY_LIBRARY"])
    made = folder / "libkvferry_late.so"
    build = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", ROOT / "include"]
    link = ["-Wl,--no-as-needed", folder / "libkvferry.so.1", f"-Wl,-rpath,{folder}", "-ldl", "-o", made]
    subprocess.run([*build, HERE / "late.cpp", *link], check=True)
    return made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`version`: every version that is installed; `edge`: the oldest and the newest of them."""
    if "version" in metafunc.fixturenames:
        metafunc.parametrize("version", VERSIONS or ["none"])
    if "edge" in metafunc.fixturenames:
        metafunc.parametrize("edge", sorted({VERSIONS[0], VERSIONS[-1]}) if VERSIONS else ["none"])
