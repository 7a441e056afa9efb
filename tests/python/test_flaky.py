"""tests/lab/flaky.py: which failures end a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

PROGRAM = ROOT / "tests" / "lab" / "flaky.py"

TESTS = """
from pathlib import Path
import pytest

def test_good():
    pass

@pytest.mark.parametrize("who", ["a@b", "c"])
def test_that_fails_first(who):
    ran = Path(f"ran-{who}")
    was = ran.exists()
    ran.touch()
    assert was
"""

BAD = """
def test_that_fails_always():
    assert False
"""


def flaky(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder` under the program."""
    words = [sys.executable, PROGRAM, "record", *command]
    return subprocess.run(words, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)


def under_pytest(folder: Path, *paths: str) -> subprocess.CompletedProcess[str]:
    return flaky(folder, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)


def test_what_passes_alone_fails_the_run_the_second_time(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    names = [f"test_it.py::test_that_fails_first[{who}]" for who in ("a@b", "c")]
    first = under_pytest(tmp_path, "test_it.py")
    assert first.returncode == 0, first.stdout
    assert [line for line in first.stdout.splitlines() if line.startswith("FLAKY")] == [f"FLAKY: {n}" for n in names]
    assert (tmp_path / "record").read_text().splitlines() == names
    # It passes now, and then is flaky once more.
    assert under_pytest(tmp_path, "test_it.py").returncode == 0
    (tmp_path / "ran-c").unlink()
    second = under_pytest(tmp_path, "test_it.py")
    assert second.returncode == 1
    assert f"FLAKY again: {names[1]}" in second.stdout


def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_bad.py").write_text(BAD)
    done = under_pytest(tmp_path, ".")
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("FLAKY: ") == 2


@pytest.mark.parametrize("source", ["import nothing_of_this_name", "import os; os._exit(3)"])
def test_what_leaves_no_test_to_run_again_fails_the_run(tmp_path: Path, source: str) -> None:
    (tmp_path / "test_bad.py").write_text(source)
    assert under_pytest(tmp_path, "test_bad.py").returncode != 0


CRASH = """
import os
import pytest

def test_that_ends_its_process():
    if not os.path.exists("ran"):
        open("ran", "w").close()
        os._exit(3)

def test_behind_it():
    pass
"""

SKIPPED = """
from pathlib import Path
import pytest

def test_that_is_skipped_alone():
    if Path("ran").exists():
        pytest.skip("not again")
    Path("ran").touch()
    assert False
"""


@pytest.mark.parametrize(
    ("source", "options"),
    [(CRASH, ("-n1",)), (SKIPPED, ()), (BAD.replace("assert False", "raise KeyboardInterrupt"), ())],
    ids=["crash", "skipped", "interrupt"],
)
def test_what_did_not_run_is_not_passed(tmp_path: Path, source: str, options: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(source)
    done = under_pytest(tmp_path, "test_it.py", *options)
    assert done.returncode != 0, done.stdout
    assert "FLAKY" not in done.stdout


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.replace('["a@b", "c"]', "range(9)"))
    done = under_pytest(tmp_path, "test_it.py")
    assert done.returncode == 1
    assert "FLAKY" not in done.stdout


CARGO = """#!/bin/sh
echo "$@" >>calls
mkdir -p target/nextest/quick
cat >target/nextest/quick/junit.xml <<'XML'
<testsuites><testsuite name="kvferry::agent">
<testcase name="idle::sleeps" classname="kvferry::agent"><failure type="test failure">panicked</failure></testcase>
<testcase name="idle::wakes" classname="kvferry::agent"/>
</testsuite></testsuites>
XML
# The first call fails.
[ "$(wc -l <calls)" -gt 1 ] || exit 100
"""


def test_a_test_of_nextest_is_run_alone(tmp_path: Path) -> None:
    (tmp_path / "cargo").write_text(CARGO)
    (tmp_path / "cargo").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["cargo", "nextest", "run", "--profile", "quick", "-E", "all()"]
    done = flaky(tmp_path, *command, PATH=path, CARGO_TARGET_DIR="target")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "record").read_text() == "kvferry::agent idle::sleeps\n"
    assert (tmp_path / "calls").read_text().splitlines() == [
        "nextest run --profile quick -E all()",
        "nextest run --profile quick -E binary_id(=kvferry::agent) & test(=idle::sleeps)",
    ]
