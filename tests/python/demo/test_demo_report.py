"""The transfers in the tables of scripts/demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.demo import report
from lab.demo.options import parse_options
from lab.demo.report import Receive, Row
from lab.servers.connectors import CONNECTORS
from pair import pair, until


@pytest.mark.slow
def test_a_transfer_of_kvferry_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "receives-0-kvferry.jsonl"
    environment = CONNECTORS["kvferry"].environment("kv_consumer", parse_options([]), log, tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pair() as both:
        _, params = both.grant()
        both.load("cmpl-p00-0", params)
        assert both.over("cmpl-p00-0") is None
        until("the receive is told", lambda: "cmpl-p00-0" in report.read_traces(log))
    found = report.read_traces(log)["cmpl-p00-0"]
    assert (found.blocks, found.ranks) == (4, 1)
    assert found.bytes
    assert found.transfer_ms


def trace_of(rank: int, *receives: tuple[str, str, int, int, int]) -> str:
    """A rank's trace: of each receive its request, outcome, blocks, bytes and milliseconds."""
    source = {"engine": "d", "pp_rank": 0, "tp_rank": rank, "incarnation": "1"}
    events: list[dict[str, object]] = [{"ph": "M", "name": "kvferry", "pid": rank + 1, "args": source}]
    for number, (request, outcome, blocks, size, ms) in enumerate(receives):
        event = {"cat": "recv", "id": str(number), "name": request}
        figures = {"blocks": blocks, "bytes": size, "posted": 1000, "last_byte": 1000 + 1000 * ms}
        events.append({**event, "ph": "b", "ts": 1, "args": {"request": request}})
        events.append({**event, "ph": "e", "ts": 2, "args": {"outcome": outcome, **figures}})
    return "[\n" + "".join(json.dumps(event) + ",\n" for event in events)


def test_what_the_ranks_tell_is_joined(tmp_path: Path) -> None:
    log = tmp_path / "receives-1-kvferry.jsonl"
    log.write_text(trace_of(0, ("a", "received", 3, 100, 7), ("b", "timeout", 1, 10, 1)))
    second = trace_of(1, ("a", "received", 2, 20, 9), ("c", "received", 1, 1, 1))
    log.with_name("receives-1-kvferry.2.jsonl").write_text(second)
    log.with_name("receives-2-kvferry.jsonl").write_text("another turn's")
    assert report.read_traces(log) == {"a": Receive(3, 120, 9.0, 2), "c": Receive(1, 1, 1.0, 1)}


def test_an_answer_without_a_transfer_fails_the_run() -> None:
    def row(name: str, size: int | None, error: str = "") -> Row:
        return Row(name, 100, 1, size, 1.0, 2.0, True, error)

    rows = [row("good", 10), row("untold", None), row("empty", 0), row("failed", None, "HTTP 500")]
    assert [failure.split(":")[0] for failure in report.unseen_transfers(rows)] == ["untold", "empty"]
