"""`scripts/bench --compare`: how set-ups are judged, and that the builds swap their roles. No time is judged."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest
from bench_lib import compare, run, table
from commands import GENEROUS, ROOT
from kvferry.bench import transfer
from kvferry.bench.engines.engine import Took
from kvferry.bench.errors import BenchError
from kvferry.bench.pair import Round
from kvferry.bench.transfer import Plan, Samples


def test_the_mean_is_geometric_and_has_the_standard_error_of_its_logarithm() -> None:
    # Twice as slow in one set-up and twice as fast in the other is no difference.
    found = compare.change([2.0, 0.5])
    assert found.ratio == pytest.approx(1.0)
    assert found.error == pytest.approx(math.log(2))
    found = compare.change([1.1, 1.21, 1.331])
    assert found.ratio == pytest.approx(1.21)
    assert found.error == pytest.approx(math.log(1.1) / math.sqrt(3))
    assert math.isnan(compare.change([1.5]).error)
    with pytest.raises(ValueError, match="no set-up"):
        compare.change([])


@pytest.mark.parametrize(
    ("ratio", "error", "verdict"),
    [
        (1.10, 0.02, "slower"),
        (1 / 1.10, 0.02, "faster"),
        # Within three errors.
        (1.10, 0.035, ""),
        (1 / 1.10, 0.035, ""),
        # Beyond three errors, but within 5 %.
        (1.04, 0.001, ""),
        (1 / 1.04, 0.001, ""),
        (1.0, 0.0, ""),
        (1.06, 0.0, "slower"),
        # One set-up does not tell.
        (2.0, math.nan, ""),
    ],
)
def test_a_line_moved_if_it_differs_by_more_than_noise_and_by_more_than_5_percent(
    ratio: float, error: float, verdict: str
) -> None:
    assert compare.Change(ratio, error).verdict == verdict


def test_the_lines_are_those_of_the_table() -> None:
    assert set(compare.LINES) <= {line.name.partition(":")[0] for line in table.LINES}


def rounds(name: str, seconds: float) -> Samples:
    return Samples(name, [Round(Took(seconds, None, 0.0), None)])


def test_builds_swap_their_roles_and_the_ratio_is_always_the_trees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_LIBRARY", "before")
    took = {"/tree.so": 1.2, "/other.so": 1.0}
    roles: list[tuple[str, str]] = []

    def measure(plan: Plan) -> list[Samples]:
        first, second = os.environ["KVFERRY_LIBRARY"], str(plan.library)
        roles.append((first, second))
        # Whoever is first has an advantage, which the swap takes out.
        return [rounds("agent", took[first] * 0.9), rounds("agent@", took[second])]

    monkeypatch.setattr(transfer, "measure", measure)
    assert compare.compare(["shm-16k"], 3, 4, Path("/tree.so"), Path("/other.so"), "abc") == 0
    # The first two are whether the builds work.
    assert roles[2:] == [("/tree.so", "/other.so"), ("/other.so", "/tree.so")] * 2
    assert "shm-16k: 1.200 +- " in capsys.readouterr().out


def test_a_build_that_the_package_cannot_drive_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_LIBRARY", "before")

    def measure(plan: Plan) -> list[Samples]:
        if plan.library == Path("/other.so"):
            raise BenchError("agent, start: has C ABI 7, this package was written for 1")
        return [rounds("agent", 1.0), rounds("agent@", 1.0)]

    monkeypatch.setattr(transfer, "measure", measure)
    assert compare.compare(["shm-16k"], 3, 2, Path("/tree.so"), Path("/other.so"), "abc") == 1
    output = capsys.readouterr().out
    assert output.startswith("error: the library of abc does not work with this tree's Python package")
    assert "C ABI 7" in output


def test_what_cannot_be_compared_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["--only", "listener"], "--compare has none of listener, only shm-4k"),
        (["--setups", "4"], "--compare needs an even number of set-ups, at least 6"),
        (["--setups", "7"], "--compare needs an even number of set-ups, at least 6"),
    ):
        with pytest.raises(SystemExit):
            run.main(["--compare", "HEAD", *words])
        assert text in capsys.readouterr().err
    done = subprocess.run(
        ["scripts/bench", "--compare", "no-such-commit"], cwd=ROOT, capture_output=True, text=True, timeout=GENEROUS
    )
    assert done.returncode == 1
    assert "error: --compare: there is no commit 'no-such-commit'" in done.stderr
