"""Mooncake beside kvferry: every byte of its transfers, what it adds to a row, its column of `scripts/bench`.

No time is judged. What moves bytes needs `scripts/setup mooncake` and runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import GENEROUS, ROOT, skip
from kvferry.bench.engines.engine import Setup, Took
from kvferry.bench.pair import Round
from kvferry.bench.transfer import Plan, Samples
from kvferry.bench.work import Work
from lab.bench import beside, measure, run, table
from lab.bench.engines import mooncake
from lab.bench.measure import SHM, TCP, Measurements, Settings

FOLDER = ROOT / ".deps" / "mooncake"


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of a process that finds Mooncake, and the package and library that this one has."""
    return environment_with(FOLDER)


def environment_with(folder: Path) -> dict[str, str]:
    if not (folder / ".stamp").is_file():
        skip("mooncake", "it is not installed: run scripts/setup mooncake")
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "tests"), str(folder)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_without_mooncake_tests_are_skipped_or_fail_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVFERRY_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="scripts/setup mooncake"):
        environment_with(tmp_path)
    monkeypatch.setenv("KVFERRY_REQUIRE", "netns,mooncake")
    with pytest.raises(pytest.fail.Exception, match="scripts/setup mooncake"):
        environment_with(tmp_path)


def in_a_process(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs Python that finds Mooncake."""
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=GENEROUS
    )


def measured(words: str, environment: dict[str, str], out: Path) -> tuple[dict[str, Any], str]:
    """The row of a run beside Mooncake, and what it printed. It fails where a byte is wrong."""
    command = [sys.executable, "-m", "lab.bench", "transfer", "--transport", "tcp", "--beside", "mooncake"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--json", str(out), *shlex.split(words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=GENEROUS,
    )
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(out.read_text())["rows"]
    return one, done.stdout + done.stderr


@pytest.mark.parametrize("direction", ["read", "write"])
def test_every_byte_of_several_requests_and_layers(direction: str, environment: dict[str, str], tmp_path: Path) -> None:
    words = f"--direction {direction} --blocks 30 --layers 2 --requests 3"
    one, output = measured(words, environment, tmp_path / "rows.json")
    assert one["mooncake_ms"] > 0
    assert one["ratio_mooncake"] == pytest.approx(one["ours_ms"] / one["mooncake_ms"])
    assert one["peer_ms"] is None
    for lanes in mooncake.MOONCAKE_LANES:
        assert f"Mooncake, {lanes} lanes" in output
    # Its own log is not between the figures.
    assert "transfer_engine_impl.cpp" not in output


def test_every_byte_of_more_blocks_than_a_call_takes(environment: dict[str, str]) -> None:
    # With what the engine lets wait for a place in its queue, 1,024 blocks, a call takes some more.
    script = (
        "from lab.bench.engines import mooncake\n"
        "from kvferry.bench.engines.engine import Setup\n"
        "from kvferry.bench.pair import Pair\n"
        "from kvferry.bench.work import Work\n"
        "work = Work(block_bytes=1024, blocks=mooncake.BLOCKS_PER_CALL + 4096)\n"
        "with Pair(Setup('Mooncake', 'lab.bench.engines.mooncake', work, 'tcp', options={'lanes': 4})) as pair:\n"
        "    pair.round()\n"
    )
    done = in_a_process(script, environment)
    assert done.returncode == 0, done.stderr


def test_a_transfer_that_fails_is_no_figure(environment: dict[str, str]) -> None:
    # The other side's memory is at an address that it has not registered.
    script = (
        "from lab.bench.engines import mooncake\n"
        "from kvferry.bench.engines.engine import Setup\n"
        "from kvferry.bench.memory import Memory\n"
        "from kvferry.bench.work import Work\n"
        "setup = Setup('Mooncake', '', Work(blocks=4), 'tcp', options={'lanes': 4})\n"
        "other = mooncake.other(setup, Memory(setup.work))\n"
        "starter = mooncake.starter(setup, Memory(setup.work), 0)\n"
        "where, address = other.hello()\n"
        "starter.meet((where, 4096))\n"
        "starter.run(None)\n"
    )
    done = in_a_process(script, environment)
    assert done.returncode == 1
    assert "RuntimeError: a Mooncake transfer of 4 blocks failed" in done.stderr


MS = {"kvferry": 10, "NIXL, num_threads 0": 50, "NIXL, num_threads 4": 60}
MS |= {"Mooncake, 4 lanes": 80, "Mooncake, 16 lanes": 40, "one TCP stream": 5}


def measured_samples(plan: Plan, others: list[Setup]) -> list[Samples]:
    """One round of each engine."""
    took = [(one, Took(MS.get(one.name, 5) / 1e3, None, 0.0)) for one in (plan.setup, *others)]
    return [Samples(one, [Round(some, None)]) for one, some in took]


def test_the_figure_is_that_of_the_better_setting_and_apart_from_nixls() -> None:
    plan = Plan(Work(), "tcp", 1)
    others = [*beside.nixl(plan.setup), *beside.mooncake(plan.setup), *beside.baselines(plan.setup, None)]
    assert ["kvferry", *(one.name for one in others)] == list(MS)
    one = beside.summary(plan, measured_samples(plan, others))
    assert (one["peer_ms"], one["mooncake_ms"], one["ratio_mooncake"]) == (50, 40, 0.25)
    assert (one["limit_ms"], one["ratio_peer"], one["ratio_limit"]) == (5, 0.2, 0.5)
    alone = beside.summary(plan, measured_samples(plan, []))
    assert (alone["peer_ms"], alone["ratio_mooncake"], alone["peer_p99_ms"]) == (None, None, None)


@pytest.mark.parametrize(("installed", "column"), [(True, "0.250"), (False, "not here")])
def test_transfers_over_tcp_have_the_column_and_no_others(
    installed: bool, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured_plan(plan: Plan, others: list[Setup]) -> list[Samples]:
        assert any(one.engine == beside.MOONCAKE for one in others) == (installed and plan.transport == "tcp")
        return measured_samples(plan, others)

    monkeypatch.setattr(measure.transfer, "measure", measured_plan)
    taken = Measurements(Settings(1, True, None, installed))
    lines = {line.name.partition(":")[0]: line for line in table.LINES}
    found = {name: lines[name].judge(taken) for name in ("shm-16k", "tcp-16k", "tcp-4k", "tcp-64k")}
    assert {name: verdict.mooncake for name, verdict in found.items()} == {
        "shm-16k": "",
        "tcp-16k": column,
        "tcp-4k": column,
        "tcp-64k": column,
    }
    assert all(verdict.got == "0.200" for verdict in found.values())
    assert {shape[0] for shape in SHM} == {"shm"}
    assert {shape[0] for shape in TCP} == {"tcp"}


def test_the_table_has_a_further_column_where_there_are_peers() -> None:
    line = next(line for line in table.LINES if line.name.startswith("tcp-16k"))
    judged = [(line, table.Verdict("0.2", True, "not here"), "met")]
    head, _, cells = run.summary(judged, True).splitlines()
    assert head.endswith("of Mooncake's")
    assert cells.endswith("not here")
    head, _, cells = run.summary(judged, False).splitlines()
    assert head.endswith("got")
    assert cells.endswith("met")


def test_without_the_package_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    asked: list[str] = []

    def measured_plan(plan: Plan, others: list[Setup]) -> list[Samples]:
        asked.extend(one.engine for one in others)
        return measured_samples(plan, others)

    monkeypatch.setattr(measure.transfer, "measure", measured_plan)
    out = tmp_path / "bench.json"
    assert run.main(["--only", "tcp-16k", "--rounds", "1", "--json", str(out)]) == 0
    assert beside.NIXL in asked
    assert beside.MOONCAKE not in asked
    assert "not here" in capsys.readouterr().out
    assert json.loads(out.read_text())["lines"][0]["mooncake"] == "not here"


def test_what_is_not_here_or_has_no_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As where they are not installed: the import fails.
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    for words, told in (
        ("--beside nixl", "pip install nixl"),
        ("--beside mooncake", "--beside mooncake goes with --transport tcp"),
        ("--beside mooncake --transport tcp", "scripts/setup mooncake"),
        ("--beside moon", "invalid choice"),
        ("--peer here", "go with `kvferry bench transfer`"),
    ):
        with pytest.raises(SystemExit) as ended:
            run.main(["transfer", *shlex.split(words)])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_a_transfer_beside_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(shlex.split("transfer --blocks 40 --rounds 1 --beside baseline")) == 0
    output = capsys.readouterr().out
    assert "process_vm_readv" in output
    assert "memcpy" in output
