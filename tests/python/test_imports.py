"""The package's imports form no circle."""

from __future__ import annotations

import ast
from collections.abc import Container
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from commands import ROOT


def imports(package: Path) -> dict[str, set[str]]:
    """Every module of a package and those of the package that it names anywhere, also inside of functions."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return {name: named(name, path, modules) - {name} for name, path in modules.items()}


def named(name: str, path: Path, modules: Container[str]) -> set[str]:
    found = set()
    here = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = ".".join(here.split(".")[: here.count(".") + 2 - node.level]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                # `from . import a` names the module a, or a thing of the package itself.
                module = f"{source}.{alias.name}"
                found.add(module if module in modules else source)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if module in modules}


def order(graph: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(graph).static_order())


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = imports(ROOT / "python" / "kvferry")
    # It reads what is there: absolute names, the package's own, and those of packages above.
    assert "kvferry._lib" in graph["kvferry.agent"]
    assert "kvferry.bench.memory" in graph["kvferry.bench.engines.agent"]
    try:
        order(graph)
    except CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "one"
    (package / "two").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "two" / "__init__.py").write_text("from ..three import x\n")
    (package / "three.py").write_text("def f():\n    from one.two import four\n")
    (package / "two" / "four.py").write_text("import os\n")
    assert order(imports(package))[-1] == "one.two"
    (package / "two" / "four.py").write_text("from . import x\n")
    with pytest.raises(CycleError) as caught:
        order(imports(package))
    assert set(caught.value.args[1]) == {"one.three", "one.two", "one.two.four"}
