"""What the demo's table of shapes says of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.demo.cache_check import CacheCheck
from lab.demo.report import Result, Row
from lab.demo.shapes import PAIRS, Outcome, describe, find_causes, format_table, server_logs


def row(name: str = "p00", equal: bool = True, error: str = "", cache: CacheCheck | None = None) -> Row:
    return Row(name, 100, 1, 10, 1.0, 2.0, equal, error, cache)


def words(result: Result, causes: tuple[str, ...] = ()) -> str:
    return describe(result.as_json(), result.passed, causes)


def test_all_equal() -> None:
    result = Result("stock", rows=[row(), row("p01")])
    assert result.passed
    assert words(result) == "tokens equal: 2 of 2"


def test_wrong_tokens_are_told_apart_from_failed_requests() -> None:
    result = Result("stock", rows=[row(), row("p01", equal=False), row("p02", equal=False, error="HTTP 500: broken")])
    assert not result.passed
    assert words(result) == (
        "1 of 3 requests failed: HTTP 500: broken; tokens equal: 1 of 3, wrong tokens with HTTP 200: 1"
    )
    assert words(result, ("AssertionError: layers differ",)).startswith(
        "1 of 3 requests failed: AssertionError: layers"
    )


def test_with_mla_the_bytes_decide() -> None:
    right, wrong = CacheCheck(100, 0), CacheCheck(100, 3)
    result = Result("kvferry", tokens_count=False, rows=[row(equal=False, cache=right)])
    assert result.passed
    assert words(result) == "cache bytes equal: 1 of 1"
    result.rows.append(row("p01", cache=wrong))
    assert not result.passed
    assert words(result).startswith("cache bytes equal: 1 of 2")
    # Without a comparison nothing is proven.
    assert not Result("kvferry", tokens_count=False, rows=[row()]).passed
    assert not Result("kvferry", tokens_count=False, rows=[row(error="HTTP 500", cache=right)]).passed


def test_bytes_count_where_tokens_do_too() -> None:
    assert not Result("kvferry", rows=[row(cache=CacheCheck(100, 3))]).passed
    assert not Result("kvferry", rows=[row(equal=False, cache=CacheCheck(100, 0))]).passed
    assert Result("kvferry", rows=[row(cache=CacheCheck(100, 0))]).passed


def test_other_failures_and_no_result() -> None:
    result = Result("stock", rows=[row()], failures=["control: it has the baseline's output", "another"])
    assert words(result) == "tokens equal: 1 of 1; control: it has the baseline's output"
    assert words(result, ("ValueError: no",)).endswith("output; ValueError: no")
    assert describe({"error": "no answer from decode\nlog"}, False, ()) == "failed: no answer from decode"
    value: dict[str, Any] = {"error": "5 hand-overs failed"}
    assert describe(value, False, ("ValueError: no",)) == "failed: ValueError: no (5 hand-overs failed)"
    assert describe({}, False, ()) == "failed: it ended without a result"


def test_causes_come_from_the_servers_logs(tmp_path: Path) -> None:
    (tmp_path / "decode-stock.log").write_text(
        "(EngineCore pid=7) ERROR 11-21 [x.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-21 [x.py:1] AssertionError: layers must match\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace\n"
        "INFO no error here\n"
    )
    (tmp_path / "decode-kvferry.log").write_text(
        "(Worker pid=3) WARNING 11-21 [log.py:17] kvferry worker (pp 0, tp 0): request cmpl-a-0-1 was not received "
        "(invalid_request): KV-cache group 0: no block\n"
        "(Worker pid=3) WARNING 11-21 [log.py:17] kvferry worker (pp 0, tp 0): request cmpl-b-0-2 was not received "
        "(aborted): this engine aborted the request\n"
    )
    (tmp_path / "prefill.log").write_text("RuntimeError: second\nAssertionError: layers must match\n")
    (tmp_path / "baseline.log").write_text("ValueError: not asked\n")
    logs = server_logs(f"starting\nmodel: m; logs: {tmp_path}\nmore\n")
    assert find_causes(logs) == [
        "invalid_request: KV-cache group 0: no block",
        "AssertionError: layers must match",
        "RuntimeError: second",
    ]
    assert server_logs("nothing was started") == []


def test_the_table() -> None:
    table = format_table("stock", [Outcome(PAIRS[0], True, "a | b", 1.0), Outcome(PAIRS[1], False, "c", 2.0)])
    lines = table.splitlines()
    assert len(lines) == 4
    assert lines[2] == "| tp1-tp1 | llama | `tp=1` | `tp=1` | passed: a \\| b |"
    assert lines[3].endswith("| NOT PASSED: c |")
