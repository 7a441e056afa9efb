"""The declarations of NIXL's plug-in interface fit every version that the plug-in accepts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hosts import ROOT, Failed, Process, listed, plugins, versions
from kvferry._find import library_path

pytestmark = pytest.mark.slow

COMPILE = ["g++", "-std=c++17", "-g", "-Wall", "-Wextra", "-Werror"]


@pytest.fixture(scope="session")
def program(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nixl/tests/abi_check.cpp, compiled."""
    built = tmp_path_factory.mktemp("abi") / "abi_check"
    sources = [ROOT / "nixl" / "tests" / "abi_check.cpp", ROOT / "nixl" / "src" / "layout.cpp"]
    subprocess.run([*COMPILE, *sources, "-o", built, "-ldl", "-lpthread"], check=True)
    return built


@pytest.mark.parametrize("package", ["nixl_cu12", "nixl_cu13"])
def test_engines_of_every_wheel_have_these_fields_and_slots(program: Path, version: str, package: str) -> None:
    # As the plug-in looks at a version that it does not know.
    done = subprocess.run([program, plugins(version, package)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    # Where UCX's is that has most of its own functions.
    ucx = [plugins(version, package) / "libplugin_UCX.so", "UCX", "nixlUcxEngine"]
    done = subprocess.run([program, *ucx], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_an_interface_that_differs_is_noticed(program: Path, version: str) -> None:
    posix = plugins(version) / "libplugin_POSIX.so"
    done = subprocess.run([program, posix, "UCX"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the name is POSIX" in done.stdout
    done = subprocess.run([program, posix, "POSIX", "nixlPosixIOQueue"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "nixlPosixIOQueue has no table of 27 slots" in done.stdout
    done = subprocess.run([program, plugins(version).parent], capture_output=True, text=True)
    assert done.returncode == 1
    assert "there is no " in done.stdout


def test_the_lists_of_known_versions_are_one() -> None:
    source = (ROOT / "nixl" / "src" / "version.cpp").read_text()
    known = re.search(r"TESTED\[\] = \{(.*?)\}", source, re.DOTALL)
    assert known is not None
    assert re.findall(r'"([0-9.]+)"', known.group(1)) == listed()
    assert set(versions()) <= set(listed())


def test_a_library_that_is_missing_or_foreign_is_an_error(plugin: Path, edge: str) -> None:
    for library, expected in (("/nowhere/libkvferry.so", "cannot load libkvferry"), ("libc.so.6", "has no kvf_")):
        with Process(edge, plugin, env={"KVFERRY_LIBRARY": library}) as host, pytest.raises(Failed):
            host.start("a", ["KVFERRY"], {})
        assert expected in "".join(host.log)
    env = {"KVFERRY_LIBRARY": ""}
    with Process(edge, plugin, env=env) as host, pytest.raises(Failed):
        host.start("a", ["KVFERRY"], {})
    assert "there is no libkvferry beside the plug-in" in "".join(host.log)


@pytest.mark.parametrize(
    ("folder", "library"),
    [("lib", "lib/libkvferry.so"), (".nixl_cu12.mesonpy.libs/plugins", "kvferry/_native/lib_native.so")],
    ids=["beside", "package"],
)
def test_the_library_is_found_from_the_plug_in_through_a_link(
    plugin: Path, edge: str, tmp_path: Path, folder: str, library: str
) -> None:
    for path in (tmp_path / folder / "libplugin_KVFERRY.so", tmp_path / library):
        path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / library).symlink_to(library_path())
    (tmp_path / folder / "libplugin_KVFERRY.so").write_bytes((plugin / "libplugin_KVFERRY.so").read_bytes())
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "libplugin_KVFERRY.so").symlink_to(tmp_path / folder / "libplugin_KVFERRY.so")
    with Process(edge, tmp_path / "plugins", env={"KVFERRY_LIBRARY": ""}) as host:
        assert host.start("a", ["KVFERRY"], {}) == ["KVFERRY"]


def test_parameters_are_checked_by_name(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as host, pytest.raises(Failed):
        host.start("a", ["KVFERRY"], {"colour": "blue"})
    assert "colour" in "".join(host.log)
    with Process(edge, plugin) as host:
        assert host.start("a", ["KVFERRY"], {"window": "8", "num_threads": "4", "verify": "false"}) == ["KVFERRY"]
    assert "num_threads is for other backends" in "".join(host.log)
