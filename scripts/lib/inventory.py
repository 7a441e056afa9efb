"""What libkvferry.so is made of: a bill of materials, the licences' texts, and a check of the licences.

Needs nothing but Python and cargo. What counts is what is linked in on Linux: the crates that the library depends on,
with what they bring along in C and C++, and Rust's own library.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")

ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "ISC",
        "MIT",
        "MIT-0",
        "Unicode-3.0",
        "Unlicense",
        "Zlib",
    }
)
"""Licences that a part of the library may have: they ask for no more than to be named."""

TOOLS = {"cbindgen": "MPL-2.0"}
"""Crates with another licence that only tests use."""

ZMQ_LICENCE = "LGPL-3.0-or-later with the ZeroMQ exception for static linking"
"""Of libzmq before 4.3.5, whose COPYING.LESSER permits linking it into anything, statically too."""


class InventoryError(Exception):
    """A part has no licence, or one that is not allowed, or cannot be looked at."""


def metadata(target: str) -> dict[str, Any]:
    """What cargo knows of the workspace and all that it depends on."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if out.returncode != 0:
        raise InventoryError(f"{' '.join(command)} failed:\n{out.stderr}")
    found: dict[str, Any] = json.loads(out.stdout)
    return found


def linked(known: dict[str, Any]) -> dict[str, list[str]]:
    """The packages that are linked into the library, by id, each with those that it depends on."""
    nodes = {node["id"]: node for node in known["resolve"]["nodes"]}
    macros = {
        package["id"] for package in known["packages"] if any("proc-macro" in t["kind"] for t in package["targets"])
    }
    (root,) = [package["id"] for package in known["packages"] if package["name"] == "kvferry"]
    found: dict[str, list[str]] = {}
    waiting = [root]
    while waiting:
        package = waiting.pop()
        if package in found:
            continue
        found[package] = [
            dependency["pkg"]
            for dependency in nodes[package]["deps"]
            if dependency["pkg"] not in macros and any(kind["kind"] is None for kind in dependency["dep_kinds"])
        ]
        waiting += found[package]
    return found


# --- licences


def expression(text: str) -> str:
    """A licence expression as SPDX spells it; crates still write "/" for "OR"."""
    return re.sub(r"\s*/\s*", " OR ", text.strip())


def allowed(text: str) -> bool:
    """Whether an SPDX expression can be met with the allowed licences."""
    words = re.findall(r"[()]|\bAND\b|\bOR\b|[^\s()]+(?:\s+WITH\s+[^\s()]+)?", expression(text))
    place = 0

    def term() -> bool:
        nonlocal place
        if place >= len(words):
            raise InventoryError(f"{text!r} is no licence expression")
        word = words[place]
        place += 1
        if word != "(":
            return " ".join(word.split()) in ALLOWED
        value = alternatives()
        if place >= len(words) or words[place] != ")":
            raise InventoryError(f"{text!r} is no licence expression")
        place += 1
        return value

    def combination() -> bool:
        nonlocal place
        value = term()
        while place < len(words) and words[place] == "AND":
            place += 1
            value = term() and value
        return value

    def alternatives() -> bool:
        nonlocal place
        value = combination()
        while place < len(words) and words[place] == "OR":
            place += 1
            value = combination() or value
        return value

    value = alternatives()
    if place != len(words):
        raise InventoryError(f"{text!r} is no licence expression")
    return value


def python_dependencies() -> Iterator[tuple[str, str]]:
    """The packages that the wheel needs, with what they need, and their licences, as installed here."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    optional = re.search(r"^ucx = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    if section is None or optional is None:
        raise InventoryError("pyproject.toml has no dependencies, or no optional dependency ucx")
    waiting = re.findall(r'"([A-Za-z0-9._-]+)', section[1] + optional[1])
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise InventoryError(f"the Python package {name} is not installed here: run scripts/setup") from None
        waiting += [
            match[0]
            for need in found.requires or ()
            if "extra ==" not in need and (match := re.match(r"[A-Za-z0-9._-]+", need))
        ]
        yield f"{name} {found.version}", _python_licence(found)


def _python_licence(found: importlib.metadata.Distribution) -> str:
    about = found.metadata
    stated = about.get("License-Expression") or about.get("License") or ""
    classifiers = [c.rsplit(" :: ", 1)[1] for c in about.get_all("Classifier") or () if c.startswith("License :: OSI")]
    names = {
        "BSD License": "BSD-3-Clause",
        "MIT License": "MIT",
        "Apache Software License": "Apache-2.0",
        "Apache 2.0": "Apache-2.0",
    }
    for candidate in (stated, *classifiers):
        short = names.get(candidate, candidate)
        if short and "\n" not in short:
            return short
    return ""


def check() -> int:
    """Checks every licence, prints how many there were, and returns an exit code."""
    wrong = []
    crates: dict[str, str] = {}
    for target in TARGETS:
        for package in metadata(target)["packages"]:
            crates[f"{package['name']} {package['version']}"] = package["license"] or ""
            if TOOLS.get(package["name"]) == package["license"]:
                if package["id"] in linked(metadata(target)):
                    wrong.append(f"{package['name']}: {package['license']} is for tools, not for the library")
            elif not package["license"] or not allowed(package["license"]):
                wrong.append(f"{package['name']} {package['version']}: {package['license'] or 'no licence'}")
    pythons = list(python_dependencies())
    wrong += [f"{name}: {licence or 'no licence'}" for name, licence in pythons if not licence or not allowed(licence)]
    for line in sorted(set(wrong)):
        print(f"licence not allowed: {line}")
    if wrong:
        print("allow it in scripts/lib/inventory.py if it may be linked into an Apache-2.0 library, or do without")
        return 1
    print(f"{len(crates)} crates and {len(pythons)} Python packages have licences that are allowed")
    return 0


# --- the bill of materials


def _checksums() -> dict[tuple[str, str], str]:
    text = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    found = re.findall(r'name = "([^"]+)"\nversion = "([^"]+)"\nsource = "[^"]+"\nchecksum = "([0-9a-f]{64})"', text)
    return {(name, version): checksum for name, version, checksum in found}


def _crate(package: dict[str, Any], checksums: dict[tuple[str, str], str]) -> dict[str, Any]:
    name, version = package["name"], package["version"]
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"pkg:cargo/{name}@{version}",
        "name": name,
        "version": version,
        "scope": "required",
        "licenses": [{"expression": expression(package["license"])}],
        "purl": f"pkg:cargo/{name}@{version}",
    }
    if package["description"]:
        component["description"] = " ".join(package["description"].split())
    if checksum := checksums.get((name, version)):
        component["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        component["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return component


def _zmq_sources(known: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    for package in known["packages"]:
        if package["name"] == "zeromq-src":
            return package, Path(package["manifest_path"]).parent / "vendor"
    raise InventoryError("cargo metadata knows no zeromq-src, which libzmq comes from")


def _bundled(known: dict[str, Any], zig: str | None) -> list[dict[str, Any]]:
    """What is linked in beside crates."""
    _, vendor = _zmq_sources(known)
    header = (vendor / "include" / "zmq.h").read_text(encoding="utf-8")
    numbers = [re.search(rf"#define ZMQ_VERSION_{part} (\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    zmq = ".".join(match[1] for match in numbers if match)
    rust = re.search(r"^release: (.*)$", _rustc(), re.MULTILINE)
    if rust is None or zmq.count(".") != 2:
        raise InventoryError("rustc or zmq.h does not say its version")
    found = [
        {
            "type": "library",
            "bom-ref": f"pkg:github/zeromq/libzmq@v{zmq}",
            "name": "libzmq",
            "version": zmq,
            "description": "ZeroMQ, compiled from the sources in the crate zeromq-src",
            "scope": "required",
            "licenses": [{"license": {"name": ZMQ_LICENCE}}],
            "purl": f"pkg:github/zeromq/libzmq@v{zmq}",
        },
        {
            "type": "library",
            "bom-ref": f"pkg:github/rust-lang/rust@{rust[1]}",
            "name": "rust-std",
            "version": rust[1],
            "description": "Rust's standard library",
            "scope": "required",
            "licenses": [{"expression": "MIT OR Apache-2.0"}],
            "purl": f"pkg:github/rust-lang/rust@{rust[1]}",
        },
    ]
    if zig is not None:
        found.append(
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/ziglang@{zig}#libcxx",
                "name": "libc++",
                "version": f"zig-{zig}",
                "description": "LLVM's C++ library with its ABI and unwinding parts, as the compiler zig brings it",
                "scope": "required",
                "licenses": [{"expression": "Apache-2.0 WITH LLVM-exception"}],
                "purl": f"pkg:pypi/ziglang@{zig}#libcxx",
            }
        )
    return found


def _rustc() -> str:
    return subprocess.run(["rustc", "-vV"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def bill(target: str, zig: str | None) -> dict[str, Any]:
    """The library's bill of materials in CycloneDX's form, the same for the same sources and tools.

    Args:
        target: Rust's name of the platform.
        zig: The version of zig whose C++ library is linked in; None where the system's is used.
    """
    known = metadata(target)
    packages = {package["id"]: package for package in known["packages"]}
    tree, checksums = linked(known), _checksums()
    crates = {identity: _crate(packages[identity], checksums) for identity in tree}
    (root,) = [component for component in crates.values() if component["name"] == "kvferry"]
    bundled = _bundled(known, zig)
    needs = {
        crates[identity]["bom-ref"]: sorted(crates[need]["bom-ref"] for need in tree[identity]) for identity in tree
    }
    (zmq_sys,) = [ref for ref in needs if ref.startswith("pkg:cargo/zmq-sys@")]
    needs[zmq_sys].append(bundled[0]["bom-ref"])
    needs[root["bom-ref"]] += [component["bom-ref"] for component in bundled[1:]]
    needs |= {component["bom-ref"]: [] for component in bundled}
    components = sorted(
        [c for c in crates.values() if c is not root] + bundled, key=lambda component: str(component["bom-ref"])
    )
    body = {
        "metadata": {
            "component": root,
            "properties": [{"name": "kvferry:target", "value": target}],
        },
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(needs[ref])} for ref in sorted(needs)],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return {**head, **body}


# --- the licences' texts


def notices(target: str) -> str:
    """The licence texts of everything that is linked in, as they came with it; what came often is there once."""
    known = metadata(target)
    tree = linked(known)
    _, vendor = _zmq_sources(known)
    parts: list[tuple[str, str, list[Path]]] = []
    for package in sorted(known["packages"], key=lambda package: (package["name"], package["version"])):
        if package["id"] in tree and package["source"] is not None:
            folder = Path(package["manifest_path"]).parent
            names = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE")
            texts = sorted(path for path in folder.iterdir() if path.is_file() and path.name.upper().startswith(names))
            parts.append((f"{package['name']} {package['version']}", expression(package["license"]), texts))
    parts.append(("libzmq", ZMQ_LICENCE, [vendor / "COPYING.LESSER", vendor / "COPYING"]))
    known_texts: dict[str, int] = {}
    lines = ["Third-party software in libkvferry.so. The texts that came with each part follow by number.", ""]
    for name, licence, paths in parts:
        texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in paths]
        numbers = [known_texts.setdefault(text, len(known_texts) + 1) for text in texts]
        lines.append(f"{name}: {licence}; texts {', '.join(map(str, numbers)) or 'none'}")
    for text, number in known_texts.items():
        lines += ["", "=" * 40 + f" {number} " + "=" * 40, "", text]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="check the licences of the library, its tools and what the Python package needs")
    for name, text in (("sbom", "print the bill of materials"), ("notices", "print the licences' texts")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--target", default=TARGETS[0], help="Rust's name of the platform")
        command.add_argument("--zig", metavar="VERSION", help="zig's C++ library is linked in")
    options = parser.parse_args()
    try:
        if options.command == "check":
            return check()
        if options.command == "sbom":
            print(json.dumps(bill(options.target, options.zig), indent=1))
        else:
            print(notices(options.target), end="")
    except InventoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
