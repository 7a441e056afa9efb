"""`kvferry bench`: every subcommand in small, what its JSON holds, and what it refuses. No time is judged."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvferry.bench.cli import PATTERNS
from kvferry.bench.figures import columns, number, percentile
from kvferry.bench.memory import Memory
from kvferry.bench.plot import svg
from kvferry.bench.sizes import parse_size, size_text
from kvferry.bench.work import Work
from kvferry.cli import main

pytestmark = pytest.mark.slow

KEYS = ["work", "transport", "ours_ms", "ours_p99_ms", "caller_us", "notify_us", "cpu_s_per_gb"]
"""Of a transfer's row."""


def bench(tmp_path: Path, words: str) -> list[dict[str, Any]]:
    """The rows of a run."""
    out = tmp_path / "rows.json"
    assert main(["bench", *shlex.split(words), "--json", str(out)]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    assert all(list(one)[:3] == KEYS[:3] for one in rows)
    return rows


def test_transfer_over_shared_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "rounds.svg"
    (one,) = bench(tmp_path, f"transfer --blocks 40 --layers 2 --rounds 1 --plot {drawing}")
    assert list(one) == KEYS
    assert one["work"] == "40 x 16 KiB x 2 layers random, READ"
    assert one["transport"] == "shm"
    assert min(one[key] for key in ("ours_ms", "caller_us", "cpu_s_per_gb")) > 0
    assert "40 x 16 KiB x 2 layers random, READ, shm" in capsys.readouterr().out
    assert len(list(ElementTree.parse(drawing).getroot().iter("{http://www.w3.org/2000/svg}g"))) == 1


def test_an_engines_file_of_metrics_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An agent that wanted to write this one would not start.
    monkeypatch.setenv("KVFERRY_METRICS_FILE", "/no/such/folder/metrics.prom")
    (one,) = bench(tmp_path, "transfer --blocks 4 --rounds 1")
    assert one["ours_ms"] > 0


def test_transfers_over_tcp_that_write(tmp_path: Path) -> None:
    words = "--transport tcp --direction write --pattern strided --requests 3 --blocks 20 --block-bytes 4KiB"
    (one,) = bench(tmp_path, f"transfer {words} --rounds 1")
    assert one["work"] == "3 requests at once of 20 x 4 KiB strided, WRITE"
    assert one["ours_ms"] > 0


def test_looking_at_intervals_with_a_watcher_tells_when_the_producer_knew(tmp_path: Path) -> None:
    (one,) = bench(tmp_path, "transfer --api worker --blocks 8 --requests 2 --rounds 1 --poll-ms 20 --watch")
    assert one["work"].endswith("polling every 20 ms")
    assert one["ours_ms"] >= 20
    assert one["notify_us"] is not None


def test_what_counting_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvferry.bench.telemetry.WORKS", (Work("random", 16384, 1), Work("random", 16384, 32)))
    out = tmp_path / "rows.json"
    assert main(["bench", "telemetry", "--rounds", "2", "--sittings", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [one["work"] for one in rows] == ["1 x 16 KiB random, READ", "32 x 16 KiB random, READ"]
    for one in rows:
        assert set(one["ms"]) == {"counting", "not counting", "not counting, again", "counting and tracing"}
        assert min(one["ms"].values()) > 0
        assert one["ratio"]["not counting"] == 1
    assert "4 rounds in 2 sittings" in capsys.readouterr().out


def test_the_other_subcommands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.bench.idle.SETTLE_S", 0.1)
    (cold,) = bench(tmp_path, "handshake --ranks 2 --blocks 1024 --rounds 1")
    assert cold["work"] == "first contact to first byte, 2 ranks of 1,024 blocks"
    (visits,) = bench(tmp_path, "listener --clients 20 --total 60")
    assert visits["ours_ms"] > 0
    (idle,) = bench(tmp_path, "idle --peers 2 --seconds 1 --transport shm")
    assert idle["ours_ms"] >= 0
    (behind,) = bench(tmp_path, "behind --blocks 64 --rounds 1 --transport shm")
    assert behind["work"] == "1 x 16 KiB behind 1 MiB"
    assert behind["ratio_limit"] == pytest.approx(behind["limit_ms"] / behind["ours_ms"])
    plans = bench(tmp_path, "plan --layers 2 --blocks 10 --steps 2 --rounds 1")
    assert [one["work"] for one in plans] == [
        "plan 2 layers x 10 blocks, TP 4 to 1",
        "plan 2 layers x 20 blocks, TP 4 to 1",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("transfer --block-bytes 63", "number of bytes from 64B to 64MiB"),
        ("transfer --block-bytes 65MiB", "number of bytes from 64B to 64MiB"),
        ("transfer --blocks 0", "whole number from 1 to 1,000,000"),
        ("transfer --blocks 1000001", "whole number from 1 to 1,000,000"),
        ("transfer --blocks 1000000 --block-bytes 64MiB", "this machine has"),
        ("transfer --ucx TLS", "'TLS' is not NAME=VALUE"),
        ("transfer --watch --direction write", "--watch"),
        ("transfer --api worker --direction write", "--direction write goes with --api agent"),
        ("transfer --rounds 0", "whole number from 1"),
        ("transfer --json /nowhere/rows.json", "/nowhere/rows.json cannot be written"),
        ("plan --plot /nowhere/plan.svg", "/nowhere/plan.svg cannot be written"),
        ("nothing", "invalid choice"),
    ],
)
def test_what_cannot_be_is_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *shlex.split(words)])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_without_numpy_the_other_commands_work_and_its_remedy_is_told() -> None:
    # In a process of its own: numpy is loaded here.
    script = "import sys; sys.modules['numpy'] = None; from kvferry.cli import main; main(sys.argv[1:])"
    told = subprocess.run([sys.executable, "-c", script, "bench", "idle"], capture_output=True, text=True)
    assert told.returncode == 2
    assert "pip install numpy" in told.stderr
    words = shlex.split("plan --prefill tp=1 --decode tp=1 --layers 1 --mla 8")
    planned = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr


def test_without_a_gpu_cuda_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from kvferry.bench.cuda import why_not

    if why_not() is None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "transfer", "--transport", "cuda"])
    assert ended.value.code == 2
    assert "--transport cuda" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", PATTERNS)
def test_wrong_bytes_are_seen(pattern: Any) -> None:
    work = Work(pattern, 1024, 10, layers=2, requests=2)
    source, target = Memory(work), Memory(work)
    source.fill()
    assert len(np.unique(source.words)) == source.words.size
    pairs = work.ids()
    assert all(len(np.unique(np.concatenate(ids))) == 20 for ids in zip(*pairs, strict=True))

    def copied() -> Memory:
        target.wipe(1)
        for written, read in pairs:
            target.words[:, written] = source.words[:, read]
        return target

    assert copied().wrong_words(pairs) == 0
    written = pairs[1][0]
    copied().words[1, written[3], 5] ^= np.uint64(1 << 40)
    assert target.wrong_words(pairs) == 1
    # Two blocks changed places.
    copied().words[0, written[:2]] = target.words[0, written[1::-1]]
    assert target.wrong_words(pairs) == 2 * 128
    # Something else was written to.
    untouched = np.setdiff1d(np.arange(work.pool_blocks), np.concatenate([w for w, _ in pairs]))
    copied().words[1, untouched[0], 0] = 0
    assert target.wrong_words(pairs) == 1
    target.wipe(2)
    assert target.wrong_words(pairs) == 2 * 20 * 128


def test_a_watcher_sees_the_last_block() -> None:
    work = Work("random", 1024, 5, layers=2)
    memory = Memory(work)
    pairs = work.ids()
    waiting = memory.last_words(pairs)
    memory.words[:, pairs[0][0]] = 1
    memory.words[1, pairs[0][0][4], -1] = memory.blank
    assert not waiting.over()
    memory.words[1, pairs[0][0][4], -1] = 1
    assert waiting.over()


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4096", "4KiB", "1MiB")] == [4096, 4096, 1 << 20]
    for text in ("", "KiB", "1.5KiB", "4kb"):
        with pytest.raises(ValueError, match="invalid literal"):
            parse_size(text)
    assert [size_text(size) for size in (0, 1024, 1536, 32 << 20)] == ["0 B", "1 KiB", "1.5 KiB", "32 MiB"]


def test_figures() -> None:
    assert percentile([5, 1, 4, 2, 3], 0.5) == 3
    assert percentile(range(1, 16), 0.99) == 15
    assert [number(value) for value in (None, 0, 0.01234, 1.234, 1234.5)] == ["-", "0", "0.0123", "1.23", "1,234"]
    assert columns(("a", "b"), [("x", "1"), ("yy", "22")]) == "a    b\n--  --\nx    1\nyy  22"


def test_a_drawing_of_what_is_doubled() -> None:
    root = ElementTree.fromstring(svg("t <&>", "blocks", "ms", {"one": [(1, 2), (2, 4), (4, 8)]}, doubling=True))
    space = "{http://www.w3.org/2000/svg}"
    places = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{space}circle")]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(places)]
    # Equal steps: both axes are logarithmic.
    assert steps[0] == pytest.approx(steps[1], abs=0.2)
    assert "t <&>" in [text.text for text in root.iter(f"{space}text")]
