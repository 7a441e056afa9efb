"""Traces of real hand-overs: the file, and what `kvferry trace` says of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import kvferry
import pytest
from kvferry import cli, trace
from lab.process import is_dead, process
from pair import BLOCK, BLOCKS, Pair, pair, until

pytestmark = pytest.mark.slow


def cli_text(summary: trace.Summary) -> str:
    from kvferry.cli.trace import text

    return text(summary)


def events_of(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "["
    assert all(line.endswith(",") for line in lines[1:])
    return [json.loads(line[:-1]) for line in lines[1:]]


def is_whole(path: Path) -> bool:
    """Whether a trace has its one request, which a thread of the library writes behind the report."""
    try:
        return trace.summarize(trace.read([path]))["received"] == 1
    except trace.TraceError:
        return False


def traced(folder: Path, names: tuple[str, ...] = ("a", "b", "c")) -> list[Path]:
    """The files of a producer and a consumer after hand-overs of these names, one that failed, and one that was given
    back."""
    with pair(trace=str(folder / "decode-%p.json"), producer={"trace": str(folder / "prefill-%p.json")}) as both:
        for index, name in enumerate(names):
            params = both.ask("grant", f"p-{name}", list(range(index + 1)))
            both.load(name, params, index + 1)
            assert both.over(name) is None
        request, params = both.grant()
        params["remote_block_ids"] = [[1, 2, 3, BLOCKS + 7]]
        both.load(request, params)
        assert both.over(request) == "invalid_request"
        held, params = both.grant()
        both.scheduler.arrived(held, params)
        both.worker.submit(both.scheduler.step())
        both.scheduler.finished(held, params, "aborted", [[]], 0)
        both.worker.submit(both.scheduler.step())
        sends = len(names) + 2
        until(
            "the producer knows",
            lambda: sum(both.ask("figures")["totals"][f"sends_{how}"] for how in ("read", "released")) == sends,
        )
    files = sorted(folder.glob("*.json"))
    assert len(files) == 2
    assert files[0].name == f"decode-{os.getpid()}.json"

    def are_whole() -> bool:
        try:
            summary = trace.summarize(trace.read(files))
        except trace.TraceError:
            return False
        counts = [summary[key] for key in ("received", "failed", "released")]
        return (sum(counts), sum(summary["sends"].values()), summary["damaged"]) == (len(names) + 2, sends, 0)

    # This process's is written by a thread that the end of a worker does not wait for without limit.
    until("the files are whole", are_whole)
    return files


def test_the_file_is_a_trace_that_viewers_take(tmp_path: Path) -> None:
    decode, prefill = traced(tmp_path)
    for path in (decode, prefill):
        # With the bracket that the format allows to be left out.
        whole = json.loads(path.read_text(encoding="utf-8").rstrip(",\n") + "]")
        assert whole == events_of(path)
        names = {(event["name"], event["tid"]): event["args"] for event in whole if event["ph"] == "M"}
        assert names["thread_name", 1] == {"name": "receives"}
        assert names["process_name", 0]["name"].startswith("decode" if path is decode else "prefill")
        for event in whole:
            assert isinstance(event["pid"], int)
            assert isinstance(event["tid"], int)
            assert event["ph"] in ("M", "b", "e")
            if event["ph"] != "M":
                assert isinstance(event["ts"], int)
                assert event["cat"] in ("recv", "send", "handshake", "chunk")
        # Slices of one id are nested: what is opened last is closed first.
        open_slices: dict[tuple[str, str], list[str]] = {}
        for event in sorted((e for e in whole if e["ph"] != "M"), key=lambda e: e["ts"]):
            stack = open_slices.setdefault((event["cat"], event["id"]), [])
            if event["ph"] == "b":
                stack.append(event["name"])
            else:
                assert stack.pop() == event["name"]
        assert not any(open_slices.values())


def test_chunks_of_a_prefill_under_way(tmp_path: Path) -> None:
    """Three blocks are read while the fourth is computed, after two that were given away."""
    name, path = "x-1", tmp_path / "decode.json"
    with pair(trace=str(path), chunk_tokens=16) as both:
        both.load("r", both.ask("awaited", name))
        until("the producer is asked", lambda: both.ask("is_followed", name))

        def holds(*values: int) -> bool:
            return all((both.cache[i * BLOCK : (i + 1) * BLOCK] == value).all() for i, value in enumerate(values))

        for blocks in ([9], [9, 7]):
            both.ask("write", "p", name, blocks, len(blocks))
        until("two blocks are read", lambda: holds(1, 2))
        both.ask("give_away", "p", name, [9, 7])
        for blocks in ([5], [5, 6], [5, 6, 9]):
            both.ask("write", "p", name, blocks, 10 + len(blocks))
        until("they are read anew", lambda: holds(11, 12, 13))
        early = both.worker.poll_encoded()
        assert early is None or both.scheduler.report(early)["finished_recving"] == []
        both.ask("write", "p", name, [5, 6, 9, 30], 14)
        both.ask("finish", "p", name, [5, 6, 9, 30])
        until("the grant is told", lambda: both.ask("report"))
        assert both.over("r") is None
        assert holds(11, 12, 13, 14)
        totals = both.totals()
        assert 3 * BLOCK <= totals["ahead_bytes"] <= totals["bytes"] == 4 * BLOCK
        assert not both.ask("is_followed", name)
    until("the file is whole", lambda: is_whole(path))
    summary = trace.summarize(trace.read([path]))
    assert summary["received"] == 1
    assert summary["chunks"] >= 1
    assert summary["ahead_bytes"] >= 3 * BLOCK
    stages = {stage["stage"]: stage for stage in summary["stages"]}
    assert stages["ahead"]["count"] == 1
    chunks = [event for event in events_of(path) if event.get("cat") == "chunk" and event["ph"] == "b"]
    assert chunks[0]["args"]["tokens"][0] == 0
    assert sum(event["args"]["bytes"] for event in chunks) == summary["ahead_bytes"]
    assert f"{summary['chunks']} chunks" in cli_text(summary)
    older = path.with_name("older.json")
    text = path.read_text(encoding="utf-8").replace('"chunks"', '"portions"').replace("first_chunk", "first_portion")
    older.write_text(text, encoding="utf-8")
    of_older = trace.summarize(trace.read([older]))
    assert (of_older["chunks"], of_older["stages"]) == (summary["chunks"], summary["stages"])


def test_what_is_in_the_files_is_what_happened(tmp_path: Path) -> None:
    files = traced(tmp_path)
    read = trace.read(files)
    assert [(process.engine, process.rank) for process in read.processes] == [
        ("decode", "pp 0 tp 0"),
        ("prefill", "pp 0 tp 0"),
    ]
    received = {one.request: one for one in read.receives if one.outcome == "received"}
    assert sorted(received) == ["a", "b", "c"]
    for blocks, name in enumerate("abc", 1):
        one = received[name]
        assert (one.blocks, one.bytes, one.engine, one.remote_request) == (
            blocks,
            blocks * BLOCK,
            "prefill",
            f"p-{name}",
        )
        order = [
            one.moments[key] for key in ("known", "queued", "planned", "posted", "last_byte", "confirmed", "reported")
        ]
        assert order == sorted(order)
        assert one.moments["posted"] <= one.moments["all_posted"] <= one.moments["last_byte"]
    assert "handshake" in received["a"].moments
    assert "handshake" not in received["c"].moments
    summary = trace.summarize(read)
    assert (summary["received"], summary["failed"], summary["released"], summary["unfinished"]) == (3, 1, 1, 0)
    assert summary["sends"] == {"read": 3, "released": 2}
    (failure,) = summary["failures"]
    assert (failure["cause"], failure["count"]) == ("invalid_request", 1)
    assert str(BLOCKS + 7) in failure["message"]
    assert (summary["left_out"], summary["damaged"], summary["bytes"]) == (0, 0, 6 * BLOCK)
    stages = {one["stage"]: one for one in summary["stages"]}
    assert stages["transfer"]["count"] == stages["total"]["count"] == 3
    assert 0 < stages["transfer"]["p50_ms"] <= stages["total"]["p50_ms"] <= stages["total"]["max_ms"]
    assert summary["slowest"][0]["stages_ms"]["total"] == stages["total"]["max_ms"]


def test_the_command_prints_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in traced(tmp_path)]
    assert cli.main(["trace", *files, "--slowest", "2"]) == 0
    text = capsys.readouterr().out
    assert "3 received, 1 failed, 1 released unread, 0 without an end" in text
    assert re.search(r"^transfer +3 ", text, re.MULTILINE)
    assert re.search(r"invalid_request: 1; .*block", text)
    assert "leases granted: 3 read, 2 released" in text
    assert cli.main(["trace", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == trace.summarize(trace.read(map(Path, files)))


def test_a_terminal_is_given_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = traced(tmp_path, ("\x1b[2J\x07 wiped", "b"))
    assert cli.main(["trace", *map(str, files)]) == 0
    text = capsys.readouterr().out
    assert "?[2J? wiped" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize("text", ["", "nothing", "[\n", "[]", '{"traceEvents": []}', "\x00\xff", "[\n" + "[" * 100_000])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", str(path)])
    assert ended.value.code == 2
    assert f"{path} is no trace of kvferry" in capsys.readouterr().err


def test_places_that_cannot_be_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["trace", str(tmp_path / "none.json")])
    assert "cannot be read: No such file" in capsys.readouterr().err
    for bad in ("/no/such/folder/t.json", str(tmp_path), "/proc/none/t.json"):
        with pytest.raises(kvferry.OsError, match=re.escape(bad)):
            kvferry.Worker({"engine_id": "e", "transport": "tcp", "trace": bad})
    with pytest.raises(kvferry.InvalidArgumentError, match="trace"):
        kvferry.Worker({"engine_id": "e", "transport": "tcp", "trace": 7})


def test_damaged_lines_cost_only_themselves(tmp_path: Path) -> None:
    path = traced(tmp_path)[0]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    bad = ["garbage\n", '{"ph": "b"\n', "7,\n", '{"ph":"b","cat":"recv","id":3,"ts":1,"args":{"request":"x"}},\n']
    bad += [
        '{"ph":"e","cat":"recv","id":"x","ts":NaN,"args":{"outcome":"received"}},\n',
        '{"ph":"i","name":"left out","args":{"left_out":5}},\n',
    ]
    path.write_text("".join([*lines[:6], *bad, *lines[6:], '{"ph":"b","cat":"recv","id":"to']), encoding="utf-8")
    summary = trace.summarize(trace.read([path]))
    assert (summary["received"], summary["damaged"], summary["left_out"]) == (3, 5, 5)


def worker_until_killed(pipe: Any, path: str) -> None:
    with ExitStack() as stack:
        both = Pair(stack, trace=path)
        for _ in range(3):
            assert both.hand_over() is None
        request, params = both.grant()
        both.producer.freeze()
        both.load(request, params)
        until("the load is under way", lambda: both.worker.stats()["agent"]["transfers"] == 1)  # type: ignore[index]
        pipe.send((os.getpid(), both.producer.pid))
        pipe.recv()


def test_a_file_of_a_killed_process_still_loads(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with process(worker_until_killed, str(path), ends=-signal.SIGKILL) as pipe:
        assert pipe.poll(60)
        pid, producer = pipe.recv()

        def begun() -> bool:
            try:
                return any(one.outcome is None for one in trace.read([path]).receives)
            except trace.TraceError:  # not even its head is written
                return False

        until("the last request's begin is written", begun)
        os.kill(pid, signal.SIGKILL)
        until("the producer, which does not move, ends with it", lambda: is_dead(producer))
    summary = trace.summarize(trace.read([path]))
    assert (summary["received"], summary["unfinished"], summary["damaged"]) == (3, 1, 0)


def test_no_process_writes_over_the_file_of_another(tmp_path: Path) -> None:
    path = tmp_path / "same.json"
    path.write_text("precious", encoding="utf-8")
    code = (
        f"import kvferry; kvferry.Worker({{'engine_id': 'e', 'transport': 'tcp', 'trace': {str(path)!r}}}).shutdown()"
    )
    # By the environment too, where the configuration says nothing; an empty text in it means none.
    other = "import kvferry; kvferry.Worker({'engine_id': 'e', 'transport': 'tcp'}).shutdown()"
    none = "import kvferry; kvferry.Worker({'engine_id': 'e', 'transport': 'tcp', 'trace': ''}).shutdown()"
    environment = {**os.environ, "KVFERRY_TRACE": str(path)}
    for command in (code, code, other, none):
        subprocess.run([sys.executable, "-c", command], check=True, timeout=60, env=environment)
    assert path.read_text(encoding="utf-8") == "precious"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "same.2.json",
        "same.3.json",
        "same.4.json",
        "same.json",
    ]
    assert len(trace.read([tmp_path / f"same.{number}.json" for number in (2, 3, 4)]).processes) == 3


class Page(HTMLParser):
    """The text of a page, whether its elements are closed, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.fetched: list[str] = []
        self.widths: list[float] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched += [name for name in ("src", "href", "onload", "onerror") if name in given]
        self.fetched += [tag] if tag in ("script", "link", "img", "iframe", "object") else []
        self.widths += [float(found) for found in re.findall(r"width:([\d.]+)%", given.get("style") or "")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_has_the_summary_and_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "<script>alert('a')</script>"
    files = traced(tmp_path, (name, "b & c", "d"))
    assert cli.main(["trace", "--html", *map(str, files)]) == 0
    page = Page(capsys.readouterr().out)
    assert (page.open, page.fetched) == ([], [])
    summary = trace.summarize(trace.read(files))
    for text in ("transfer", name, "b & c", "invalid_request", summary["failures"][0]["message"], "released"):
        assert text in page.texts, text
    assert any("3 received, 1 failed, 1 released unread" in text for text in page.texts)
    assert page.widths
    assert all(0 < width <= 100 for width in page.widths)


def test_a_page_of_a_trace_without_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    kvferry.Worker({"engine_id": "e", "transport": "tcp", "trace": str(path)}).shutdown()
    assert cli.main(["trace", "--html", str(path)]) == 0
    page = Page(capsys.readouterr().out)
    assert page.open == []
    assert any("0 received" in text for text in page.texts)
