"""What C users install, one version everywhere, and the inventory of what is linked in."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import kvferry
import pytest
from commands import GENEROUS, ROOT, needs, run


def version() -> str:
    """The one number, in Cargo.toml."""
    found = re.search(r'^\[workspace\.package\]\nversion = "([^"]+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_one_version_everywhere(prefix: Path) -> None:
    header = (prefix / "include/kvferry.h").read_text()
    assert f'#define KVF_VERSION "{version()}"\n' in header
    assert kvferry.version() == version()
    assert (prefix / "lib" / f"libkvferry.so.{version()}").is_file()
    assert os.readlink(prefix / "lib/libkvferry.so.1") == f"libkvferry.so.{version()}"
    assert os.readlink(prefix / "lib/libkvferry.so") == "libkvferry.so.1"
    assert f"\nVersion: {version()}\n" in (prefix / "lib/pkgconfig/kvferry.pc").read_text()
    assert f"\n## {version()} " in (ROOT / "CHANGELOG.md").read_text()
    bill = json.loads((prefix / "share/doc/kvferry/kvferry.cdx.json").read_text())
    assert bill["metadata"]["component"]["version"] == version()


def test_destdir_and_libdir_are_honoured(tmp_path: Path) -> None:
    needs("cargo")
    run("scripts/install", "--prefix", "/opt/kvferry", "--libdir", "lib64", "--profile", "dev", DESTDIR=str(tmp_path))
    root = tmp_path / "opt/kvferry"
    assert (root / "include/kvferry.h").is_file()
    assert (root / "lib64/libkvferry.so").is_file()
    text = (root / "lib64/pkgconfig/kvferry.pc").read_text()
    assert text.startswith("prefix=/opt/kvferry\nlibdir=${prefix}/lib64\n")
    # Nothing outside of the folders that the prefix has, and nothing that tells of the staging folder.
    assert {path.name for path in root.iterdir()} == {"include", "lib64", "share"}
    assert str(tmp_path) not in text


def test_wrong_options_are_named() -> None:
    for options, expected in [
        ((), "--prefix must be an absolute path"),
        (("--prefix", "here"), "not 'here'"),
        (("--prefix",), "--prefix needs a value"),
        (("--prefix", "/x", "--profile", "fast"), "--profile must be release or dev"),
        (("--prefix", "/x", "--libdir", "/lib"), "--libdir must be relative"),
        (("--perfix", "/x"), "unknown option '--perfix'"),
    ]:
        done = subprocess.run(["scripts/install", *options], cwd=ROOT, capture_output=True, text=True, timeout=GENEROUS)
        assert done.returncode == 1
        assert expected in done.stderr


@pytest.fixture(scope="module")
def inventory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inventory", ROOT / "scripts/lib/inventory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_licences_are_understood(inventory: ModuleType) -> None:
    for text in ("MIT", "MIT/Apache-2.0", "GPL-3.0-only OR MIT", "(MIT OR Apache-2.0) AND Unicode-3.0"):
        assert inventory.allowed(text), text
    assert inventory.allowed("Apache-2.0 WITH LLVM-exception OR GPL-2.0-only")
    for text in ("GPL-3.0-only", "MIT AND GPL-3.0-only", "(MIT OR Apache-2.0) AND SSPL-1.0", "MPL-2.0"):
        assert not inventory.allowed(text), text
    for text in ("", "(MIT", "MIT Apache-2.0", "MIT OR"):
        with pytest.raises(inventory.InventoryError, match="no licence expression"):
            inventory.allowed(text)


def test_the_bill_has_what_is_linked_in_and_nothing_of_this_machine(prefix: Path) -> None:
    text = (prefix / "share/doc/kvferry/kvferry.cdx.json").read_text()
    bill = json.loads(text)
    names = {component["name"] for component in bill["components"]}
    assert {"libzmq", "rust-std", "snow", "serde_json", "kvferry-proto", "ucx-sys"} <= names
    # Of builds and tests only.
    assert not {"bindgen", "proptest", "cbindgen", "serde_derive", "windows-sys"} & names
    refs = {component["bom-ref"] for component in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert {entry["ref"] for entry in bill["dependencies"]} == refs
    assert all(set(entry["dependsOn"]) <= refs for entry in bill["dependencies"])
    assert str(ROOT) not in text
    assert str(Path.home()) not in text
    notices = (prefix / "share/doc/kvferry/THIRD-PARTY.txt").read_text()
    for component in bill["components"]:
        if component["purl"].startswith("pkg:cargo/") and component["name"] not in ("kvferry-proto", "ucx-sys"):
            assert f"\n{component['name']} {component['version']}: " in notices
    assert "SPECIAL EXCEPTION GRANTED BY COPYRIGHT HOLDERS" in notices
