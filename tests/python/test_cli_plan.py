"""`kvferry plan`: what it prints, draws and refuses. The figures are worked out by hand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import kvferry
import pytest
from kvferry.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
TINY = "--layers 4 --kv-heads 4 --head-size 4 --tokens 64"
"""16 bytes of K and V per layer, head and token."""


def run(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["plan", *shlex.split(words)]) == 0
    return capsys.readouterr().out


def rows(output: str, first: str) -> list[dict[str, str]]:
    """The table whose first column is `first`, as a dict per row."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    found = []
    # The line of dashes says where the columns are; figures may be as wide as their column.
    spans = [match.span() for match in re.finditer("-+", lines[start + 1])]
    head = [lines[start][a:b].strip() for a, b in spans]
    for line in lines[start + 2 :]:
        if not line:
            break
        found.append(dict(zip(head, [line[a:b].strip() for a, b in spans], strict=True)))
    return found


def test_two_ranks_to_one_with_larger_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, f"--prefill tp=2,block=16 --decode tp=1,block=32 {TINY}")
    assert out.startswith("prefill  tp 2 x pp 1, blocks of 16 tokens, head-major\n")
    assert "request  64 tokens, blocks scattered" in out
    # 4 layers x 2 heads x 4 blocks of 16 tokens of 16 bytes. A segment for each layer, head and half of a block.
    figures = {
        **{"layers": "0-3", "parts": "k+v", "bytes": "8 KiB", "segments": "16", "operations": "32"},
        **{"shortest": "256 B", "median": "256 B", "longest": "256 B", "mean run": "256 B", "host memory": "gathered"},
    }
    links = rows(out, "decode rank")
    assert [{key: link[key] for key in figures} for link in links[:-1]] == [figures, figures]
    ends = [(link["decode rank"], link["reads from"], link["heads"]) for link in links[:-1]]
    assert ends == [("pp 0 tp 0", "pp 0 tp 0", "0-1"), ("pp 0 tp 0", "pp 0 tp 1", "2-3")]
    assert (links[-1]["decode rank"], links[-1]["bytes"], links[-1]["operations"]) == ("all", "16 KiB", "64")
    read = [(rank["prefill rank"], rank["is read"], rank["hears from"]) for rank in rows(out, "prefill rank")]
    assert read == [("pp 0 tp 0", "8 KiB", "1"), ("pp 0 tp 1", "8 KiB", "1")]


def test_stages_and_ranks_to_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, f"--prefill tp=2,pp=2,stages=1+3 --decode tp=4,layout=token-major {TINY}")
    links = rows(out, "decode rank")[:-1]
    assert [(link["decode rank"], link["reads from"], link["layers"], link["heads"]) for link in links] == [
        (f"pp 0 tp {tp}", f"pp {pp} tp {tp // 2}", layers, str(tp))
        for tp in range(4)
        for pp, layers in ((0, "0"), (1, "1-3"))
    ]
    # One head on the decode side: its tokens lie next to each other there, and per head on the other side.
    assert [link["bytes"] for link in links] == ["1 KiB", "3 KiB"] * 4
    assert {link["operations"] for link in links} == {"4", "12"}
    assert {link["mean run"] for link in links} == {"256 B"}
    assert {rank["hears from"] for rank in rows(out, "prefill rank")} == {"2"}


def test_layouts_that_have_a_token_and_head_in_common(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, f"--prefill block=64 --decode block=16,layout=token-major {TINY}")
    (link,) = rows(out, "decode rank")[:-1]
    assert (link["operations"], link["mean run"], link["bytes"]) == (str(4 * 4 * 64), "16 B", "16 KiB")
    # vLLM's CPU attention keeps the tokens of one element of K together: 2 bytes, in runs of 16 tokens.
    out = run(capsys, f"--prefill layout=cpu --decode layout=cpu,block=64 {TINY}")
    (link,) = rows(out, "decode rank")[:-1]
    k, v = 4 * 4 * 4 * 4, 4 * 4 * 4
    assert (link["operations"], link["shortest"], link["longest"]) == (str(k + v), "32 B", "128 B")


def test_latents_of_sixteen_ranks_for_four(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--prefill tp=16 --decode tp=4 --layers 2 --mla 576 --tokens 64 --dtype fp8")
    links = rows(out, "decode rank")[:-1]
    assert len(links) == 16
    read = [link for link in links if link["bytes"] != "-"]
    assert [(link["decode rank"], link["reads from"]) for link in read] == [
        (f"pp 0 tp {tp}", f"pp 0 tp {tp}") for tp in range(4)
    ]
    assert {(link["bytes"], link["operations"], link["parts"]) for link in read} == {("72 KiB", "8", "latent")}
    assert {link["parts"] for link in links if link["bytes"] == "-"} == {"(told when it is over)"}
    assert {rank["hears from"] for rank in rows(out, "prefill rank")} == {"1"}


def test_tokens_dealt_over_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--prefill tp=2,dcp=2,interleave=8 --decode tp=1,block=32 --layers 1 --mla 8 --tokens 64")
    assert [rank["token share"] for rank in rows(out, "prefill rank")] == ["1 of 2", "2 of 2"]
    links = rows(out, "decode rank")[:-1]
    assert [(link["bytes"], link["operations"], link["mean run"]) for link in links] == [("512 B", "4", "128 B")] * 2


def test_windows(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--prefill block=16 --decode block=16 --layers 6 --kv-heads 1 --head-size 4 --tokens 64 --window 20"
    # Of a window of 20 tokens the last 2 blocks of 16 are left.
    (link,) = rows(run(capsys, shape), "decode rank")[:-1]
    assert (link["layers"], link["bytes"]) == ("0-5", "3 KiB")
    (link,) = rows(run(capsys, f"{shape} --full-every 3"), "decode rank")[:-1]
    assert (link["layers"], link["bytes"]) == ("0-5", "4 KiB")
    larger = shape.replace("--decode block=16", "--decode block=64,prefix-caching=no")
    (link,) = rows(run(capsys, larger), "decode rank")[:-1]
    assert link["bytes"] == "3 KiB"


def test_neighbouring_blocks_and_a_cached_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, f"--prefill tp=1 --decode tp=1 {TINY} --blocks consecutive --cached 16")
    assert "request  64 tokens, 16 of them cached by the decode engine, blocks consecutive" in out
    (link,) = rows(out, "decode rank")[:-1]
    assert (link["bytes"], link["operations"], link["longest"]) == ("12 KiB", "4", "3 KiB")


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    shape = f"--prefill tp=2,block=16 --decode tp=1,block=32,prefix-caching=no {TINY}"
    found: dict[str, Any] = json.loads(run(capsys, f"{shape} --json"))
    assert found["deployment"]["producer"]["block_size"] == [16]
    assert found["deployment"]["reuses_blocks"] is False
    assert found["links"][1] == {
        "consumer": {"pp": 0, "tp": 0},
        "producer": {"pp": 0, "tp": 1},
        "layers": [[0, 3]],
        "heads": [[2, 3]],
        "parts": ["k", "v"],
        **{"bytes": 8192, "segments": 16, "operations": 32, "run_min": 256, "run_median": 256, "run_max": 256},
        "gathered": True,
        "plan_bytes": found["links"][1]["plan_bytes"],
    }
    described = kvferry.plan.describe(found["deployment"])
    assert described["links"][0]["heads"] == [(0, 1)]
    assert [rank["peers"] for rank in described["producers"]] == [1, 1]


def test_the_command_itself() -> None:
    command = [sys.executable, "-m", "kvferry", "plan", "--prefill", "tp=2", "--decode", "tp=1", *shlex.split(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(rows(done.stdout, "decode rank")) == 3
    done = subprocess.run([*command, "--cached", "65"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cached_tokens: expected at most the 64 tokens" in done.stderr


def test_the_documented_example_is_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    block = page.split("```")[1].strip()
    command, _, printed = block.partition("\nprefill ")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["$", "kvferry", "plan"]
    file = tmp_path / "plan.svg"
    words[words.index("docs/plan.svg")] = str(file)
    assert run(capsys, shlex.join(words[3:])) == f"prefill {printed}\n"
    assert file.read_bytes() == (DOCS / "plan.svg").read_bytes()


def test_what_a_rate_of_prompts_needs(capsys: pytest.CaptureFixture[str]) -> None:
    shape = f"--prefill tp=2,block=16 --decode tp=1,block=32 {TINY}"
    load = "--rate 1000 --engines 2:4 --link 1 --queue 0.5 --lease-ms 10000"
    found = json.loads(run(capsys, f"{shape} {load} --json"))["capacity"]
    # A prompt of 16 KiB in 4 blocks of 16 tokens, half of it on each prefill rank.
    assert found["handover_s"] == pytest.approx(16384 * 8 / 1e9)
    assert found["prefill"] == {
        "prompts_per_s": 500,
        "link_gbit_per_s": pytest.approx(500 * 16384 * 8 / 1e9),
        "link_share": pytest.approx(500 * 16384 * 8 / 1e9),
        **{"blocks_pinned": 1000, "blocks_pinned_without_readers": 20000},
        **{"peers_of_a_rank": 4, "open_files_of_a_rank": 8},
        "processors_over_tcp": pytest.approx(500 * 16384 / 1e9 * 0.76 / 2),
        "rank_gb_per_s": pytest.approx(500 * 8192 / 1e9),
        "rank_operations_per_s": None,
    }
    decode = found["decode"]
    assert (decode["prompts_per_s"], decode["rank_operations_per_s"], decode["peers_of_a_rank"]) == (250, 16000, 4)
    assert (decode["blocks_pinned"], decode["blocks_pinned_without_readers"]) == (None, None)
    sums = rows(run(capsys, f"{shape} {load}"), "capacity")
    assert [row["each of 2 prefill"] for row in sums if "pinned" in row["capacity"]] == ["1,000", "20,000"]
    # Four blocks of the full layers, and of a window of 20 tokens at most three.
    windows = "--layers 6 --kv-heads 1 --head-size 4 --tokens 64 --window 20 --full-every 3"
    shape = f"--prefill tp=1 --decode tp=1 {windows} --rate 1 --lease-ms 1000"
    found = json.loads(run(capsys, f"{shape} --json"))["capacity"]
    assert found["prefill"]["blocks_pinned_without_readers"] == 7


def test_the_capacity_of_the_documented_example_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    path = DOCS / "scale.md"
    page = path.read_text(encoding="utf-8")
    command = re.search(r"^```\nkvferry plan (.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert command is not None
    printed = run(capsys, command[1].replace("\\\n", " "))
    sums = printed[printed.index("\ncapacity ") + 1 :]
    before, start, rest = page.partition("<!-- printed by the command above -->\n```\n")
    _, end, after = rest.partition("```\n")
    fresh = before + start + sums + end + after
    if "KVFERRY_BLESS" in os.environ:
        path.write_text(fresh, encoding="utf-8")
    assert page == fresh, "run this test with KVFERRY_BLESS=1 and commit docs/scale.md"


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("prefill", "decode", "model"),
    [
        ("tp=4", "tp=1", "--layers 4 --kv-heads 4 --head-size 4"),
        ("tp=16", "tp=4", "--layers 4 --mla 576"),
        ("pp=16", "tp=16", "--layers 64 --kv-heads 16 --head-size 16"),
        ("tp=2,pp=2", "tp=3,pp=3", "--layers 9 --kv-heads 8 --head-size 4"),
    ],
)
def test_the_drawing_has_every_rank_and_arrow(
    prefill: str, decode: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.svg"
    found = json.loads(run(capsys, f"--prefill {prefill} --decode {decode} {model} --tokens 64 --json --svg {file}"))
    root = ElementTree.parse(file).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    ids = {group.get("id") for group in root.iter(f"{SVG}g") if group.get("class") == "rank"}

    def name(engine: str, rank: dict[str, int]) -> str:
        return f"{engine}pp{rank['pp']}-tp{rank['tp']}"

    assert ids == {
        *(name("prefill-", rank["rank"]) for rank in found["producers"]),
        *(name("decode-", rank["rank"]) for rank in found["consumers"]),
    }
    arrows = [(g.get("data-from"), g.get("data-to")) for g in root.iter(f"{SVG}g") if g.get("class") == "link"]
    assert arrows == [(name("", link["producer"]), name("", link["consumer"])) for link in found["links"]]
    widths = {float(path.attrib["stroke-width"]) for path in root.iter(f"{SVG}path")}
    assert min(widths) >= 1
    for text in root.iter(f"{SVG}text"):
        # About 0.6 of its size is a letter wide.
        room = len(text.text or "") * float(text.attrib["font-size"]) * 0.6
        before = {"start": 0.0, "middle": room / 2, "end": room}[text.attrib["text-anchor"]]
        left = float(text.attrib["x"]) - before
        assert left >= 0
        assert left + room <= width
        assert 0 < float(text.attrib["y"]) < height
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib.get("y", 0)) + float(box.attrib["height"]) <= height


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"--decode tp=1 {TINY}", "the following arguments are required: --prefill"),
        (f"--prefill tq=1 --decode tp=1 {TINY}", "--prefill: there is no key 'tq'; the keys are tp, pp, stages"),
        (f"--prefill blok=1 --decode tp=1 {TINY}", "did you mean block?"),
        (f"--prefill tp=two --decode tp=1 {TINY}", "--prefill: tp=two: expected a whole number from 1"),
        (f"--prefill tp=0 --decode tp=1 {TINY}", "--prefill: tp=0: expected a whole number from 1"),
        (f"--prefill tp --decode tp=1 {TINY}", "--prefill: tp=: expected a whole number from 1"),
        (f"--prefill tp=1,tp=2 --decode tp=1 {TINY}", "--prefill: the key tp is given twice"),
        (f"--prefill '' --decode tp=1 {TINY}", "--prefill: there is no key ''"),
        (
            f"--prefill tp=1 --decode stages=1+x {TINY}",
            "--decode: stages=1+x: expected the layers of each pipeline stage",
        ),
        (
            f"--prefill layout=odd --decode tp=1 {TINY}",
            "layout=odd: expected one of head-major, token-major, cpu, whole",
        ),
        (f"--prefill layers-in-block=1 --decode tp=1 {TINY}", "layers-in-block=1: expected yes or no"),
        (f"--prefill prefix-caching=no --decode tp=1 {TINY}", "--prefill: prefix-caching concerns the decode engine"),
        ("--prefill tp=1 --decode tp=1 --layers 0", "argument --layers: invalid whole number from 1 to 8192 value"),
        ("--prefill tp=1 --decode tp=1 --layers 9999999999", "argument --layers: invalid whole number from 1 to 8192"),
        ("--prefill tp=1 --decode tp=1 --layers 4", "--kv-heads is missing"),
        ("--prefill tp=1 --decode tp=1 --layers 4 --kv-heads 2", "--head-size is missing"),
        (f"--prefill tp=1 --decode tp=1 {TINY} --mla 3", "--kv-heads does not go with --mla"),
        (f"--prefill tp=1 --decode tp=1 {TINY} --full-every 3", "--full-every is given without --window"),
        (f"--prefill tp=1 --decode tp=1 {TINY} --dtype int3", "argument --dtype: invalid choice: 'int3'"),
        (f"--prefill tp=1 --decode tp=1 {TINY} --link 100", "--link is given without --rate"),
        (f"--prefill tp=1 --decode tp=1 {TINY} --rate 0", "argument --rate: invalid number above 0 value"),
        (f"--prefill tp=1 --decode tp=1 {TINY} --rate 1 --engines 8", "--engines: invalid pair of whole numbers"),
        (f"--prefill tp=1 --decode tp=1 {TINY} --cached 65", "cached_tokens: expected at most the 64 tokens"),
        (f"--prefill tp=1 --decode pp=5 {TINY}", "the decode engine: 4 layers cannot be split over 5 pipeline stages"),
        (f"--prefill tp=4,dcp=3 --decode tp=1 {TINY}", "the prefill engine: decode-context-parallel size 3"),
        (f"--prefill tp=1000 --decode tp=1 {TINY}", "producer: 1000 ranks, at most 128 are described"),
        (f"--prefill block=16+32 --decode tp=1 {TINY}", "2 block sizes for 1 KV-cache groups"),
        (
            f"--prefill tp=1 --decode tp=1 {TINY} --svg /nowhere/x.svg",
            "--svg: /nowhere/x.svg cannot be written: No such",
        ),
    ],
)
def test_bad_input_names_the_key_and_what_was_expected(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *shlex.split(words)])
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.out == ""
    assert expected in printed.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"--prefill layout=whole --decode layout=whole,block=32 {TINY}", "block size of"),
        (f"--prefill layout=whole --decode tp=1 {TINY}", "differs: "),
        (f"--prefill block=16 --decode block=64 {TINY} --window 20", "the producer has no block for local block"),
    ],
)
def test_engines_that_do_not_fit_each_other(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *shlex.split(words)])
    printed = capsys.readouterr()
    assert caught.value.code in (1, 2)
    assert printed.out == ""
    assert expected in printed.err


def test_maps_from_elsewhere_are_checked() -> None:
    for bad, expected in [
        ({}, "missing field `model`"),
        ({"model": {"groups": []}, "producer": {}, "consumer": {}, "tokens": 1}, "model.groups: expected at least one"),
        ({"model": 1, "producer": {}, "consumer": {}, "tokens": 1}, 'key "model"'),
        ({"model": {"groups": []}, "producer": {"tq": 1}, "consumer": {}, "tokens": 1}, "unknown field `tq`"),
    ]:
        with pytest.raises(kvferry.InvalidArgumentError, match=re.escape(expected)):
            kvferry.plan.describe(bad)
    with pytest.raises(kvferry.InvalidArgumentError, match="deployment must be a mapping"):
        kvferry.plan.describe([])  # type: ignore[arg-type]
