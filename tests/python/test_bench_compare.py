"""`scripts/bench --compare`: how set-ups are judged, and that the builds swap their roles. No time is judged."""

from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import kvferry
import pytest
from commands import GENEROUS, ROOT
from kvferry._find import library_path
from kvferry.bench import transfer
from kvferry.bench.engines.engine import Setup, Took
from kvferry.bench.errors import BenchError
from kvferry.bench.pair import Round
from kvferry.bench.transfer import Plan, Samples
from kvferry.bench.work import Work
from lab.bench import compare, run, table


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


def build(name: str) -> compare.Build:
    return compare.Build(Path(f"/{name}.so"), Path(f"/{name}"), name)


def test_builds_swap_their_roles_and_the_ratio_is_always_the_trees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took = {"/tree.so": 1.2, "/other.so": 1.0}
    roles: list[tuple[str, str]] = []

    def alternate(engines: list[Setup], rounds: int, text: str) -> list[Samples]:
        roles.append((engines[0].library, engines[1].library))
        assert [f"{one.package}.so" for one in engines] == list(roles[-1])
        # Whoever is first has an advantage, which the swap takes out.
        seconds = [took[engines[0].library] * 0.9, took[engines[1].library]]
        return [Samples(one, [Round(Took(s, None, 0.0), None)]) for one, s in zip(engines, seconds, strict=True)]

    monkeypatch.setattr(transfer, "alternate", alternate)
    assert compare.compare(["shm-16k"], 3, 4, build("tree"), build("other")) == 0
    # The first two are whether the builds work.
    assert roles[2:] == [("/tree.so", "/other.so"), ("/other.so", "/tree.so")] * 2
    assert "shm-16k: 1.200 +- " in capsys.readouterr().out


def test_a_build_that_does_not_work_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def alternate(engines: list[Setup], rounds: int, text: str) -> list[Samples]:
        if engines[1].library == "/other.so":
            raise BenchError("kvferry, start: cannot load it")
        return [Samples(one, [Round(Took(1.0, None, 0.0), None)]) for one in engines]

    monkeypatch.setattr(transfer, "alternate", alternate)
    assert compare.compare(["shm-16k"], 3, 2, build("tree"), build("other")) == 1
    output = capsys.readouterr().out
    assert output.startswith("error: the build of other cannot be measured")
    assert "cannot load it" in output


@pytest.mark.parametrize("api", ["agent", "worker"])
def test_two_builds_take_turns_and_each_runs_its_own(
    api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A child process that loads what is no library says so: the file is what it loaded.
    other = tmp_path / "older.so"
    words = ["transfer", "--blocks", "40", "--rounds", "1", "--api", api, "--library", str(other)]
    shutil.copy(library_path(), other)
    assert run.main(words) == 0
    assert "of older.so" in capsys.readouterr().out
    other.write_bytes(b"no library")
    with pytest.raises(BenchError, match=f"cannot load {other}"):
        run.main(words)


def test_each_build_has_its_own_package(tmp_path: Path) -> None:
    package = tmp_path / "kvferry"
    shutil.copytree(Path(kvferry.__file__).parent, package)
    with (package / "agent.py").open("a") as module:
        module.write(
            "\n\ndef _refuse(*_):\n    raise RuntimeError('the other package')\n\n\nAgent.__init__ = _refuse\n"
        )
    ours = Plan(Work(blocks=4)).setup
    with pytest.raises(BenchError, match="the other package"):
        transfer.alternate([ours, replace(ours, package=str(tmp_path))], 1, "")


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
