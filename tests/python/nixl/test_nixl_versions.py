"""Which NIXL the plug-in accepts: by its version, by its plug-in interface, or because the user says so."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from hosts import HERE, INSTALLED, ROOT, SIZE, Failed, Process, acquaint, read, versions

pytestmark = pytest.mark.slow

STATED = "9.9.9"
"""A version that no NIXL has."""
LIBRARIES = ".nixl_cu12.mesonpy.libs"
CONNECT = "  virtual nixl_status_t connect(const std::string &) = 0;\n"
EXTRA = f"  virtual bool isNew() const {{ return true; }}\n{CONNECT}"
ABSTRACT = (
    "getPublicData",
    "getConnInfo",
    "loadRemoteConnInfo",
    "loadRemoteMD",
    "loadLocalMD",
    "getNotifs",
    "genNotif",
)
"""What POSIX does not define."""
BODY = " { return NIXL_ERR_NOT_SUPPORTED; }"


def other_version(version: str, folder: Path) -> dict[str, str]:
    """An environment with an installed NIXL whose metadata state another version."""
    folder.mkdir(exist_ok=True)
    for path in (INSTALLED / version).iterdir():
        (folder / path.name.replace(f"nixl_cu12-{version}", f"nixl_cu12-{STATED}")).symlink_to(path)
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, HERE / "stubs", HERE)))}


class Interfaces:
    """Environments with the newest NIXL that is installed, whose own plug-in POSIX is of another interface."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def other(self, old: str, new: str) -> dict[str, str]:
        """One that is compiled for an abi.h with `new` in the place of `old`."""
        folder = self._folder / str(len(list(self._folder.iterdir())))
        environment = other_version(versions()[-1], folder)
        libraries = folder / LIBRARIES
        libraries.unlink()
        (libraries / "plugins").mkdir(parents=True)
        for path in (INSTALLED / versions()[-1] / LIBRARIES).iterdir():
            if path.name != "plugins":
                (libraries / path.name).symlink_to(path)
        plugin = libraries / "plugins" / "libplugin_POSIX.so"
        if new in self._made:
            plugin.symlink_to(self._made[new])
            return environment
        (folder / "abi.h").write_text(declared(old, new))
        options = ["-std=c++17", "-shared", "-fPIC", "-I", folder]
        subprocess.run(["g++", *options, HERE / "other.cpp", "-o", plugin], check=True)
        self._made[new] = plugin
        return environment


def declared(old: str, new: str) -> str:
    """An abi.h with `new` in the place of `old`."""
    text = (ROOT / "nixl" / "src" / "abi.h").read_text()
    assert text.count(old) == 1
    # A change of a size is what is tried, and no mistake here.
    lines = text.replace(old, new).splitlines()
    text = "\n".join(line for line in lines if not line.startswith("static_assert"))
    # The engine inherits what NIXL's classes export.
    for name in ABSTRACT:
        start = text.index(f"virtual nixl_status_t {name}(")
        end = text.index(" = 0;", start)
        text = text[:end] + BODY + text[end + len(" = 0;") :]
    return text


@pytest.fixture(scope="module")
def interfaces(tmp_path_factory: pytest.TempPathFactory) -> Interfaces:
    return Interfaces(tmp_path_factory.mktemp("interfaces"))


def test_an_unknown_version_of_the_same_interface_works(plugin: Path, edge: str, tmp_path: Path) -> None:
    env = other_version(edge, tmp_path)
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        read(a, acquaint(a, b, SIZE))
        assert a.said(f"NIXL {STATED}", 1) == 1, a.log
        assert a.said("has the plug-in interface of the tested versions (1.3.0, ", 1) == 1, a.log


def test_the_same_interface_in_another_plug_in_is_accepted(plugin: Path, interfaces: Interfaces) -> None:
    env = interfaces.other(CONNECT, CONNECT)
    with Process(versions()[-1], plugin, env=env) as host:
        assert host.start("a", ["KVFERRY"], {}) == ["KVFERRY"]


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        (CONNECT, EXTRA, "nixlBackendEngine has 28 slots, expected 27; slot 8 of nixlBackendEngine is isNew"),
        (
            "virtual nixl_status_t getConnInfo(std::string &) const",
            "virtual nixl_status_t getConnInfo(std::string &, int) const",
            "std::char_traits<char>, std::allocator<char> >&, int) const, expected (std::__cxx11::basic_string<char",
        ),
        (
            "  bool initErr = false;\n",
            "  bool initErr = false;\n  std::string isNew;\n",
            "the field localAgent is elsewhere",
        ),
        (
            "constexpr int NIXL_PLUGIN_API = 1;",
            "constexpr int NIXL_PLUGIN_API = 2;",
            "the plug-in API is 2, expected 1",
        ),
    ],
    ids=["slots", "parameters", "field", "api"],
)
def test_another_interface_is_refused_by_its_difference(
    plugin: Path, interfaces: Interfaces, old: str, new: str, difference: str
) -> None:
    env = interfaces.other(old, new)
    with Process(versions()[-1], plugin, env=env) as host, pytest.raises(Failed):
        host.start("a", ["KVFERRY"], {})
    (line,) = [line for line in host.log if f"NIXL {STATED}" in line]
    assert "is refused: its plug-in interface differs from that of the tested versions (1.3.0, " in line
    assert difference in line
    assert f"KVFERRY_NIXL_VERSION={STATED}" in line


def test_a_crash_while_comparing_is_a_refusal(plugin: Path, interfaces: Interfaces) -> None:
    env = interfaces.other(CONNECT, CONNECT) | {"KVFERRY_TEST_CRASH": "1"}
    with Process(versions()[-1], plugin, env=env) as host, pytest.raises(Failed):
        host.start("a", ["KVFERRY"], {})
    assert host.said("comparing ended in the middle, by Segmentation fault", 1) == 1, host.log


def test_a_user_may_vouch_for_an_unknown_version(plugin: Path, interfaces: Interfaces) -> None:
    env = interfaces.other(CONNECT, EXTRA)
    with Process(versions()[-1], plugin, env={**env, "KVFERRY_NIXL_VERSION": STATED}) as host:
        assert host.start("a", ["KVFERRY"], {}) == ["KVFERRY"]
    assert host.said(f"NIXL {STATED}", 1) == 1, host.log
    assert host.said("was not compared", 1) == 1, host.log


def test_a_version_that_is_stated_is_that_of_the_wheel(plugin: Path, edge: str) -> None:
    with Process(edge, plugin, env={"KVFERRY_NIXL_VERSION": edge}) as host:
        assert host.start("a", ["KVFERRY"], {}) == ["KVFERRY"]
    with Process(edge, plugin, env={"KVFERRY_NIXL_VERSION": "1.4.0"}) as host, pytest.raises(Failed):
        host.start("a", ["KVFERRY"], {})
    assert f"KVFERRY_NIXL_VERSION is 1.4.0, but NIXL {edge} is installed" in "".join(host.log), host.log


def wheel(folder: Path, package: str, files: dict[str, Path]) -> None:
    """A wheel of NIXL with these files, by the place that each is installed in."""
    info = f"{package}-{STATED}.dist-info"
    named = package.replace("_", "-")
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {named}\nVersion: {STATED}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{package}-{STATED}-py3-none-any.whl", "w") as made:
        for place, path in files.items():
            made.write(path, place)
        for name, text in metadata.items():
            made.writestr(f"{info}/{name}", text)


def test_the_newest_wheels_are_tried(plugin: Path, tmp_path: Path) -> None:
    """One that works like the newest that is tested, and one that cannot be imported."""
    site = INSTALLED / versions()[-1]
    folders = [site / name for name in (LIBRARIES, "nixl_cu12", "nixl_cu12.libs")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    wheel(tmp_path, "nixl_cu12", {str(path.relative_to(site)): path for path in paths})
    broken = tmp_path / "broken.py"
    broken.write_text("raise ImportError('of nobody')\n")
    wheel(tmp_path, "nixl_cu13", {"nixl_cu13/_api.py": broken})
    index = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(tmp_path), "UV_NO_CACHE": "1"}
    # As on a host whose tests have built all.
    command = [ROOT / "scripts" / "nixl-newest"]
    done = subprocess.run(command, env={**os.environ, **index}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    cu12, cu13 = done.stdout.split("nixl_cu13 ")
    assert cu12.startswith(f"nixl_cu12 {STATED}\n")
    assert "and is accepted" in cu12
    assert "read through it: every byte right" in cu12
    assert "of nobody" in cu13
    assert f"NIXL {STATED} is not among the versions that are tested" in done.stderr
    del plugin
