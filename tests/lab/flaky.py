"""Runs pytest or cargo nextest, and each test that fails once more, alone.

A test that then passes is flaky. The first time, that fails nothing: its name goes into the record. The next time it
fails the run, until the test is mended and its name deleted from the record.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree.ElementTree import Element, parse

MOST = 8
"""Tests that are run again. Where more fail, something is broken."""
FAILED = (1, 100)
"""The exit statuses of pytest and nextest when all tests ran and some failed. With others, some did not run."""


def nextest_report(command: list[str]) -> Path:
    """Where nextest leaves its report."""
    profile = command[command.index("--profile") + 1] if "--profile" in command else "default"
    return Path(os.environ.get("CARGO_TARGET_DIR", "target"), "nextest", profile, "junit.xml")


def alone_in_nextest(command: list[str], case: Element) -> tuple[str, list[str]]:
    """The name of a test in the report, and the command that runs it alone."""
    binary, test = case.attrib["classname"], case.attrib["name"]
    words = [word for word, before in zip(command, ["", *command], strict=False) if "-E" not in (word, before)]
    return f"{binary} {test}", [*words, "-E", f"binary_id(={binary}) & test(={test})"]


def alone_in_pytest(command: list[str], case: Element) -> tuple[str, list[str]]:
    """As `alone_in_nextest`."""
    test = f"{case.attrib['file']}::{case.attrib['name']}"
    options = command.index("pytest") + 1
    words = [word for word in command[options:] if not Path(word).exists()]
    return test, [*command[:options], *words, *(["-n0"] if "-n" in words else []), test]


def run(command: list[str], record: Path, report: Path) -> int:
    """The exit status of the command, or 0 where every test that failed is flaky for the first time."""
    if "nextest" in command:
        alone, report, options = alone_in_nextest, nextest_report(command), []
    else:
        alone, options = alone_in_pytest, [f"--junit-xml={report}", "--override-ini=junit_family=xunit1"]
    report.unlink(missing_ok=True)
    status = subprocess.run([*command, *options]).returncode
    cases = list(parse(report).iter("testcase")) if status in FAILED and report.exists() else []
    bad = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
    # A process of pytest-xdist that dies may leave tests that never run.
    if not 0 < len(bad) <= MOST or any("crashed while running" in part.get("message", "") for c in bad for part in c):
        return status
    failed = dict(alone(command, case) for case in bad)
    known = record.read_text().splitlines() if record.exists() else []
    for name, again in failed.items():
        print(f"\n---- failed, so it is run again alone: {name}", flush=True)
        report.unlink(missing_ok=True)
        if subprocess.run([*again, *options]).returncode or next(parse(report).iter("skipped"), None) is not None:
            continue
        print(f"FLAKY{' again' if name in known else ''}: {name}", flush=True)
        with record.open("a") as lines:
            print(name, file=lines)
        if name not in known:
            failed[name] = []
    return status if any(failed.values()) else 0


def main() -> int:
    """Runs the command of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="a file with the names of tests that were flaky, a line each")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python -m pytest ..., or cargo nextest run ...")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return run(arguments.command, arguments.record, Path(folder) / "junit.xml")


if __name__ == "__main__":
    sys.exit(main())
