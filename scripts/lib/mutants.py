"""Judges the tests by mutation: cargo-mutants changes one function or operator at a time, and a test has to fail.

Two parts, each a random sample that a seed fixes, the same ones again after an edit elsewhere:

  proto    the crate kvferry-proto, judged by its tests; a mutant takes seconds.
  drivers  src/net, src/connector, src/agent and src/planner, judged by their unit tests and the integration tests
           of the same name.

The sample is drawn from all mutants but the deletions of a field of a struct. A mutant counts as caught if a test fails
or hangs, as missed if all pass; what does not compile does not count. A missed one needs a test, or a line in
tests/mutants.txt that says why none of these tests can tell it from the original.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / ".deps/cargo/bin/cargo-mutants"
WORK = ROOT / "target/mutants"
ACCEPTED = ROOT / "tests/mutants.txt"

DELETED_FIELD = re.compile(": delete field ")


@dataclass
class Group:
    """Sources that are judged by the same tests."""

    sources: str
    tests: tuple[str, ...]
    """Names of integration tests; `*` at the end stands for anything."""
    optimization: int = 0

    @property
    def package(self) -> str:
        """The folder of the package that they belong to."""
        return self.sources.partition("src/")[0]


@dataclass
class Part:
    """One of the two samples."""

    sample: int
    wanted: float
    """The share that has to be caught."""
    limit: int
    """Seconds after which a mutant's tests count as hanging."""
    groups: list[Group]


PARTS = {
    # Random tests take five times as long unoptimized, and a mutant is little to compile.
    "proto": Part(120, 0.95, 60, [Group("proto/src/", ("proto_*",), optimization=1)]),
    "drivers": Part(
        60,
        0.85,
        240,
        [
            Group("src/net/", ("net", "connector")),
            Group("src/agent/", ("agent",)),
            Group("src/connector/", ("connector", "tree")),
            Group("src/planner/", ()),
        ],
    ),
}


@dataclass
class Outcome:
    """Names of mutants by what became of them."""

    caught: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    unviable: list[str] = field(default_factory=list)


def copy_into(target: Path, files: Iterable[str]) -> None:
    """Copies files of the repository that differ from those in `target`, so that what was built there stays valid."""
    for name in files:
        source, copy = ROOT / name, target / name
        if source.is_symlink() or not source.is_file():
            continue
        if copy.exists() and copy.read_bytes() == source.read_bytes():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)


def tracked() -> list[str]:
    """The files that git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def whole_tree() -> Path:
    """A copy of the repository, which mutants may be written into."""
    tree = WORK / "tree"
    copy_into(tree, tracked())
    if not (tree / ".deps").exists():
        (tree / ".deps").symlink_to(ROOT / ".deps")
    return tree


def mutants_of(tree: Path, group: Group) -> list[str]:
    """The names of all mutants of a group."""
    command = [TOOL, "mutants", "--list", "--json", "--no-config", "--file", f"{group.sources}**/*.rs"]
    listed = subprocess.run(command, cwd=tree / group.package, check=True, capture_output=True, text=True).stdout
    return [mutant["name"] for mutant in json.loads(listed)]


def test_names(tree: Path, group: Group) -> list[str]:
    """The integration tests of a group."""
    folder = tree / group.package / "tests"
    return sorted({path.stem for pattern in group.tests for path in folder.glob(pattern) if names_test(path)})


def names_test(path: Path) -> bool:
    return path.suffix == ".rs" or (path / "main.rs").is_file()


def environment(group: Group) -> dict[str, str]:
    """Of cargo: nextest beside cargo-mutants, nothing compiled for a debugger, and tests that wait leave the
    processors to others."""
    threads = str(2 * len(os.sched_getaffinity(0)))
    path = f"{TOOL.parent}:{ROOT / '.deps/venv/bin'}:{os.environ['PATH']}"
    nextest = {"NEXTEST_PROFILE": "mutants", "NEXTEST_TEST_THREADS": threads}
    profile = {"CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_PROFILE_DEV_OPT_LEVEL": str(group.optimization)}
    return {**os.environ, **nextest, **profile, "PATH": path}


def run_group(tree: Path, group: Group, chosen: Sequence[str], limit: int) -> Outcome:
    """Tries the chosen mutants of a group. The first test that fails ends the tests of a mutant."""
    out = WORK / f"out-{group.sources.strip('/').replace('/', '-')}"
    shutil.rmtree(out, ignore_errors=True)
    results = out / "mutants.out"
    results.mkdir(parents=True)
    config = out / "config.toml"
    config.write_text("examine_re = " + json.dumps([f"^{re.escape(name)}$" for name in chosen]))
    # No pattern keeps cargo-mutants from deleting fields, but it does not try again what it has caught before.
    fields = [name for name in mutants_of(tree, group) if DELETED_FIELD.search(name)]
    (results / "caught.txt").write_text("".join(f"{name}\n" for name in fields))
    command = [str(TOOL), "mutants", "--in-place", "--config", str(config), "--output", str(out), "--colors", "never"]
    command += ["--iterate", "--test-tool", "nextest", "--minimum-test-timeout", str(limit), "--cap-lints", "true"]
    command += [word for source in sorted({name.split(":")[0] for name in chosen}) for word in ("--file", source)]
    # Of cargo, not of the tests: else every test of the repository is built for every mutant.
    command += [f"--cargo-arg={word}" for word in ("--lib", *(f"--test={name}" for name in test_names(tree, group)))]
    done = subprocess.run(command, cwd=tree / group.package, env=environment(group))
    # 2: some were missed, 3: some ran into the time limit. Anything else is a mistake of the run.
    if done.returncode not in (0, 2, 3):
        sys.exit(f"{' '.join(command[:3])} failed with status {done.returncode}: its output is above")

    def names(kind: str) -> list[str]:
        return (results / f"{kind}.txt").read_text().splitlines()

    return Outcome(names("caught") + names("timeout"), names("missed"), names("unviable"))


def bare(name: str) -> str:
    """A mutant's name without its place in the file, which changes with every edit."""
    return re.sub(r"^([^:]+):\d+:\d+:", r"\1:", name)


def lot(seed: int, name: str) -> str:
    """What orders mutants at random. Each has its own, so that the sample stays as it is where the code does."""
    return hashlib.sha256(f"{seed} {bare(name)}".encode()).hexdigest()


def accepted() -> set[str]:
    """The mutants that no test can notice, by name."""
    lines = ACCEPTED.read_text().splitlines() if ACCEPTED.exists() else []
    return {line for line in lines if line and not line.startswith(("#", " "))}


def judge(name: str, part: Part, sample: int, seed: int, only: str) -> bool:
    """Runs a part, or of its sample the mutants whose names match `only`; prints what was missed and whether enough was
    caught."""
    tree = whole_tree()
    everything = [
        (mutant, group)
        for group in part.groups
        for mutant in mutants_of(tree, group)
        if not DELETED_FIELD.search(mutant)
    ]
    # More than asked for: those that do not compile tell nothing.
    chosen = sorted(everything, key=lambda drawn: lot(seed, drawn[0]))[: sample + sample // 6]
    total = Outcome()
    for group in part.groups:
        names = [mutant for mutant, its in chosen if its is group and re.search(only, mutant)]
        if not names:
            continue
        outcome = run_group(tree, group, names, part.limit)
        for kind in ("caught", "missed", "unviable"):
            getattr(total, kind).extend(getattr(outcome, kind))
    known = accepted()
    missed = [mutant for mutant in total.missed if bare(mutant) not in known]
    viable = len(total.caught) + len(total.missed)
    share = len(total.caught) / viable if viable else 0.0
    print(f"\n{name}: {len(everything)} mutants, {len(chosen)} drawn with seed {seed}, {viable} tried and compiled")
    if only:
        print(f"{name}: only those whose names match {only!r}")
    print(f"{name}: caught {len(total.caught)} of {viable} ({share:.1%}, wanted {part.wanted:.0%})")
    for mutant in missed:
        print(f"  missed: {mutant}")
    if len(total.missed) > len(missed):
        print(f"  {len(total.missed) - len(missed)} more missed, each with its reason in {ACCEPTED.relative_to(ROOT)}")
    return not missed and (bool(only) or (share >= part.wanted and viable >= min(sample, len(everything))))


def main() -> int:
    """Runs the parts that were named."""
    parser = argparse.ArgumentParser(
        prog="scripts/mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="proto, drivers; both if none is named")
    parser.add_argument("--sample", type=int, help="mutants that compile and are tried (120 of proto, 60 of drivers)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--only", metavar="REGEX", default="", help="of the sample, those whose names match")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    good = True
    for name in options.part or PARTS:
        part = PARTS[name]
        good &= judge(name, part, options.sample or part.sample, options.seed, options.only)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
