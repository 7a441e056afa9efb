"""`scripts/import-graph`: what it reads and draws, and that the picture in docs/ is of today."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from commands import ROOT

SPEC = importlib.util.spec_from_file_location("import_graph", ROOT / "scripts/lib/import_graph.py")
assert SPEC is not None
assert SPEC.loader is not None
import_graph = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(import_graph)

PICTURE = ROOT / "docs/imports-after.svg"
TABLE = [["agent::core"], ["agent::peers"], ["agent::engine"]]


def made_up(**files: str) -> import_graph.Graph:
    """The graph of files of src/agent whose names have `__` for a folder."""
    paths = {f"src/agent/{name.replace('__', '/')}.rs": text for name, text in files.items()}
    return import_graph.graph(import_graph.sources(iter(paths.items())))


def test_the_picture_is_of_today() -> None:
    """Unless KVFERRY_BLESS draws it."""
    drawn = import_graph.picture()
    if "KVFERRY_BLESS" in os.environ:
        PICTURE.write_text(drawn, encoding="utf-8")
    fresh = PICTURE.read_text(encoding="utf-8") == drawn
    assert fresh, "draw it again: scripts/import-graph > docs/imports-after.svg"


def test_imports_are_found_however_they_are_written() -> None:
    for line in (
        "use crate::agent::core::ids;",
        "use crate::{error::Error, agent::{core::ids, engine::{self, Loop}}};",
        "use super::core::ids::PeerId as P;",
        "pub(crate) use super::\n    core::ids;",
        "fn f(id: &crate::agent::core::ids::PeerId) {}",
    ):
        found = made_up(mod="", core__ids="", engine__mod="use self::inner::A;", engine__inner="", peers=line)
        assert "agent::core::ids" in found["agent::peers"], line
        assert found["agent::engine"] == set(), line
    again = made_up(core__mod="pub use self::ids::PeerId as Id;", core__ids="", core__frame="use super::Id;")
    assert again["agent::core::frame"] == {"agent::core::ids"}
    for line in ("// use super::core::ids;", "#[cfg(test)]\nmod tests { use super::core::ids; }", "use std::core;"):
        assert made_up(core__ids="", peers=line)["agent::peers"] == set(), line


def test_layers_are_those_of_the_rust_test() -> None:
    table = import_graph.layers((ROOT / "tests/tree/architecture.rs").read_text(encoding="utf-8"))
    assert "agent::core" in table[0]
    assert "agent::handle" in table[-1]
    placed = {part for layer in table for part in layer}
    folders = {f"agent::{path.name}" for path in (ROOT / "src/agent").iterdir() if path.is_dir()}
    assert folders <= placed


def arrows(drawing: str) -> list[tuple[float, float, str]]:
    """Where each arrow of a drawing begins and ends, from the top, and its colour."""
    found = []
    for path in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}path"):
        if "marker-end" in path.attrib:
            places = path.attrib["d"].split()
            found.append((float(places[1]), float(places[-1]), path.attrib["stroke"]))
    return found


def test_arrows_point_down_and_a_circle_is_red() -> None:
    down = import_graph.svg(
        made_up(core__ids="", core__frame="use super::ids::A;", peers="use super::core::ids::A;"), TABLE, "x"
    )
    assert "x: 3 files, 2 imports, no circle" in down
    assert len(arrows(down)) == 2
    assert all(begin < end and colour != import_graph.RED for begin, end, colour in arrows(down))
    round_about = import_graph.svg(
        made_up(core__ids="", peers="use super::{engine::E, core::ids::A};", engine="use super::peers::P;"),
        TABLE,
        "x",
    )
    assert "x: 3 files, 3 imports, a circle of 2 files" in round_about
    assert sorted(colour == import_graph.RED for *_, colour in arrows(round_about)) == [False, True, True]


def test_the_command_draws_the_tree_and_refuses_a_commit_that_is_none() -> None:
    command = [sys.executable, str(ROOT / "scripts/lib/import_graph.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "src/agent: " in done.stdout
    wrong = subprocess.run([*command, "no-such-commit"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stdout == ""
    assert wrong.stderr.startswith("error: fatal:")
