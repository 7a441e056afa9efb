"""Draws which files of src/agent import which: `import_graph.py [COMMIT]` writes an SVG to standard output.

Imports are read as tests/tree/architecture.rs reads them, and the layers are those of its table: a module is a file,
unit tests are left out, and so are a module's imports of its own submodules.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "src/agent"
FLAT = "agent"
"""The part of the files that stand in none: those that lie in the folder itself."""

Sources = dict[str, str]
"""The code of each module by its path, such as `agent::peers::hello`."""
Graph = dict[str, set[str]]
"""Which modules each module imports."""

# --- reading


def tree_files() -> Iterator[tuple[str, str]]:
    """Path and text of every Rust file of the working tree's folder."""
    for path in sorted((ROOT / FOLDER).rglob("*.rs")):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def commit_files(commit: str) -> Iterator[tuple[str, str]]:
    """The same, of a commit. Raises `CalledProcessError` if there is no such commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout

    for name in git("ls-tree", "-r", "--name-only", commit, f"{FOLDER}/").splitlines():
        if name.endswith(".rs"):
            yield name, git("show", f"{commit}:{name}")


def sources(files: Iterator[tuple[str, str]]) -> Sources:
    """The modules of files, each without comments and unit tests."""
    found = {}
    for name, text in files:
        path = PurePosixPath(name).relative_to("src").with_suffix("")
        if path.name != "tests":
            parts = path.parts[:-1] if path.name == "mod" else path.parts
            text = re.split(r"#\[cfg\(test\)\]\n(?:#\[allow|mod tests)", text, maxsplit=1)[0]
            found["::".join(parts)] = re.sub(r"^\s*//.*\n?", "", text, flags=re.MULTILINE)
    return found


def _expand(tree: str) -> Iterator[tuple[str, str]]:
    """The paths of a `use`, such as `a::{b, c::d as e}`, each whole and after the name that it brings."""
    head, brace, rest = tree.partition("{")
    if not brace:
        path, _, alias = tree.partition(" as ")
        path = "".join(path.split()).removesuffix("::self")
        yield alias.strip() or path.rsplit("::", 1)[-1], path
        return
    depth, part = 0, ""
    for letter in f"{rest[: rest.rindex('}')]},":
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            if part.strip():
                yield from _expand(f"{head.strip()}{part.strip()}")
            part = ""
        else:
            part += letter


def _imports(code: str) -> dict[str, str]:
    """The names that a module's code imports, each with its path."""
    trees = re.findall(r"^[ \t]*(?:pub(?:\([\w: ]+\))?\s+)?use ([\w\s:{},*]+);", code, re.MULTILINE)
    return dict(one for tree in trees for one in _expand(tree))


def _target(module: str, path: str, names: dict[str, dict[str, str]]) -> str | None:
    """The module that a path of `module`'s code leads to, if it is one of the sources: where the thing is defined, not
    where it is exported again."""
    parts, steps = module.split("::"), path.split("::")
    if steps[0] == "crate":
        parts, steps = [], steps[1:]
    elif steps[0] == "self":
        steps = steps[1:]
    elif steps[0] == "super":
        while steps and steps[0] == "super":
            parts, steps = parts[:-1], steps[1:]
    elif "::".join([*parts, steps[0]]) not in names:
        imported = names[module].get(steps[0], steps[0])
        if imported.split("::")[0] == steps[0]:
            return None
        return _target(module, "::".join([imported, *steps[1:]]), names)
    parts += steps
    for n in range(len(parts), 0, -1):
        if (found := "::".join(parts[:n])) in names:
            exported = names[found].get(parts[n]) if n < len(parts) else None
            return (exported and _target(found, exported, names)) or found
    return None


def graph(known: Sources) -> Graph:
    """Which modules each module imports, those within it left out."""
    names = {module: _imports(code) for module, code in known.items()}
    found: Graph = {}
    for module, code in known.items():
        paths = {*names[module].values(), *re.findall(r"\w+(?:::\w+)+", code)}
        targets = {_target(module, path, names) for path in paths}
        found[module] = {to for to in targets if to is not None and not f"{to}::".startswith(f"{module}::")}
    return found


def circles(imports: Graph) -> list[set[str]]:
    """The sets of modules that import each other in a circle."""

    def reach(module: str) -> set[str]:
        seen: set[str] = set()
        following = [module]
        while following:
            new = imports.get(following.pop(), set()) - seen
            seen |= new
            following += new
        return seen

    reached = {module: reach(module) for module in imports}
    found: list[set[str]] = []
    for module in sorted(imports):
        if module in reached[module] and not any(module in circle for circle in found):
            found.append({other for other in reached[module] if module in reached[other]})
    return found


def layers(test: str) -> list[list[str]]:
    """The agent's layers in the text of tests/tree/architecture.rs, from the bottom up."""
    table = re.search(r"const AGENT_LAYERS[^=]*= &\[(.*?)^\];", test, re.MULTILINE | re.DOTALL)
    if table is None:
        raise ValueError("tests/tree/architecture.rs has no table AGENT_LAYERS")
    return [re.findall(r'"([\w:]+)"', line) for line in re.findall(r"&\[(.*?)\]", table[1])]


# --- drawing

BOX, GAP, MARGIN, HEAD = 24, 30, 14, 26
"""Height of a box, space between two rows, space around a part's boxes, height of its heading."""
ROW = 9
"""Boxes beside each other in a part, at most."""
RED = "#c62828"
COLOURS = ("#5d6d7e", "#1f6fb4", "#2d8a39", "#8e6bbf", "#b8860b", "#d1620a", "#00838f", "#ad1457")
"""Of the arrows that leave a layer, from the bottom up."""


class Place(NamedTuple):
    """Where a box is drawn."""

    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def _part(module: str, table: list[list[str]]) -> str:
    """The part of the table that a module stands in."""
    return next((part for layer in table for part in layer if f"{module}::".startswith(f"{part}::")), FLAT)


def _label(module: str) -> str:
    return module.rsplit("::", 1)[-1]


def _width(module: str) -> float:
    return 7 * len(_label(module)) + 16


def _rows(members: list[str], imports: Graph, rings: list[set[str]]) -> list[list[str]]:
    """A part's modules in rows: each above those that it imports, a circle's in rows of their own."""
    of = {module: n for n, ring in enumerate(rings) for module in ring}

    def unit(module: str) -> set[str]:
        return {other for other in members if other == module or (module in of and of.get(other) == of[module])}

    heights: dict[str, int] = {}

    def height(module: str) -> int:
        if module not in heights:
            ring = unit(module)
            below = {to for one in ring for to in imports[one] if to in members} - ring
            heights.update(dict.fromkeys(ring, max((height(to) + 1 for to in below), default=0)))
        return heights[module]

    found = []
    for level in sorted({height(module) for module in members}, reverse=True):
        row = sorted((m for m in members if heights[m] == level), key=lambda m: (m not in of, m))
        count = -(-len(row) // ROW)
        size = -(-len(row) // count)
        found += [row[n : n + size] for n in range(0, len(row), size)]
    return found


def _arrow(start: Place, end: Place, colour: str, thick: bool) -> str:
    if end.y > start.y:
        y1, y2, bow = start.y + BOX, end.y, 0.0
    elif end.y < start.y:
        y1, y2, bow = start.y, end.y + BOX, 0.0
    else:
        y1, y2, bow = start.y + BOX, end.y + BOX, 18.0
    lean = (y2 - y1) / 2 + bow
    back = -lean if bow == 0 else lean
    return (
        f'<path d="M{start.middle:.0f} {y1:.0f} C{start.middle:.0f} {y1 + lean:.0f} {end.middle:.0f} {y2 + back:.0f} '
        f'{end.middle:.0f} {y2:.0f}" fill="none" stroke="{colour}" stroke-width="{1.3 if thick else 1}" '
        f'stroke-opacity="{0.6 if thick else 0.45}" marker-end="url(#{"red" if thick else "grey"})"/>'
    )


def svg(imports: Graph, table: list[list[str]], title: str) -> str:
    """The picture of a graph, its layers from the top down."""
    rings = circles(imports)
    ringed = {module: ring for ring in rings for module in ring}
    parts: dict[str, list[str]] = {}
    # The module of the folder itself only names the others.
    for module in sorted(imports):
        if module != FLAT:
            parts.setdefault(_part(module, table), []).append(module)
    bands = [[part for part in layer if part in parts] for layer in [*table, [FLAT]]]
    places: dict[str, Place] = {}
    frames: list[tuple[str, float, float, float, float]] = []
    y, widest = 50.0, 0.0
    for band in reversed([band for band in bands if band]):
        x, tallest = MARGIN, 0.0
        for part in band:
            rows = _rows(parts[part], imports, rings)
            lengths = [sum(map(_width, row)) + 12 * (len(row) - 1) for row in rows]
            inner = max([*lengths, 7 * len(_label(part)) + 10])
            for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                at = x + MARGIN + (inner - length) / 2
                for module in row:
                    places[module] = Place(at, y + HEAD + n * (BOX + GAP), _width(module))
                    at += _width(module) + 12
            high = HEAD + len(rows) * (BOX + GAP) - GAP + MARGIN
            frames.append((part, x, y, inner + 2 * MARGIN, high))
            x, tallest = x + inner + 3 * MARGIN, max(tallest, high)
        widest = max(widest, x)
        y += tallest + 1.5 * GAP
    # Bands stand centred above each other.
    ends: dict[float, float] = {}
    for _, x, top, width, _ in frames:
        ends[top] = max(ends.get(top, 0), x + width + MARGIN)
    shift = {part: (widest - ends[top]) / 2 for part, _, top, _, _ in frames}
    places = {m: p._replace(x=p.x + shift[_part(m, table)]) for m, p in places.items()}
    colours = {part: COLOURS[n % len(COLOURS)] for n, layer in enumerate([*table, [FLAT]]) for part in layer}

    arrows = sum(len(targets - {FLAT}) for module, targets in imports.items() if module != FLAT)
    told = [f"a circle of {len(ring)} files" for ring in rings] or ["no circle"]
    heading = f"{title}: {len(places)} files, {arrows} imports, {', '.join(told)}"
    width, height = max(widest, 8 * len(heading) + 2 * MARGIN), y - GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} '
        f'{height:.0f}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        "<defs>",
        *(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 Z" fill="{colour}"/></marker>'
            for name, colour in (("grey", "#777"), ("red", RED))
        ),
        "</defs>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="{MARGIN}" y="28" font-size="14" font-weight="bold" fill="{RED if rings else "#222"}">'
        f"{escape(heading)}</text>",
    ]
    for part, x, top, wide, high in frames:
        out.append(
            f'<rect x="{x + shift[part]:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{high:.0f}" rx="6" '
            f'fill="#f4f6f8" stroke="{colours[part]}"/>'
        )
    for circular in (False, True):
        for module, targets in imports.items():
            for to in sorted(targets & places.keys()) if module in places else ():
                if (to in ringed.get(module, set())) == circular:
                    colour = RED if circular else colours[_part(module, table)]
                    out.append(_arrow(places[module], places[to], colour, circular))
    for part, x, top, _, _ in frames:
        out.append(
            f'<text x="{x + shift[part] + 8:.0f}" y="{top + 17:.0f}" font-size="12" font-weight="bold" '
            f'fill="{colours[part]}">{escape(_label(part))}</text>'
        )
    for module, place in places.items():
        out.append(
            f'<rect x="{place.x:.0f}" y="{place.y:.0f}" width="{place.width:.0f}" height="{BOX}" rx="4" fill="white" '
            f'stroke="{RED if module in ringed else "#888"}"/>'
            f'<text x="{place.middle:.0f}" y="{place.y + 16:.0f}" text-anchor="middle" fill="#222">'
            f"{escape(_label(module))}</text>"
        )
    return "\n".join([*out, "</svg>", ""])


def picture(commit: str | None = None) -> str:
    """The picture of the working tree, or of a commit."""
    known = sources(tree_files() if commit is None else commit_files(commit))
    table = layers((ROOT / "tests/tree/architecture.rs").read_text(encoding="utf-8"))
    return svg(graph(known), table, FOLDER if commit is None else f"{FOLDER} at {commit}")


def main() -> int:
    """The command line."""
    try:
        sys.stdout.write(picture(*sys.argv[1:2]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error.stderr.strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
