"""Figures: the table of them, Prometheus' text as its own parser reads it, and what real hand-overs and failures
count."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kvferry
import numpy as np
import pytest
from kvferry import ShutDownError, stats
from lab.process import GENEROUS
from pair import BLOCK, BLOCKS, Pair, pair, until
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.slow

CAUSES = next(metric for metric in stats.metrics() if metric.key == "recv_failures").causes


def parsed(text: str) -> dict[str, Metric]:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def test_what_hand_overs_count_on_both_sides() -> None:
    with pair() as both:
        for number in (1, 4, 9):
            assert both.hand_over(number) is None
        until(
            "the producer knows",
            lambda: both.ask("sent") is not None and both.ask("figures")["totals"]["sends_read"] == 3,
        )
        ours, theirs = (
            {"labels": {"side": "decode"}, "scheduler": both.scheduler.stats(), **both.worker.stats()},
            both.ask("figures"),
        )
        here, there = ours["totals"], theirs["totals"]
        assert (here["recvs"], here["blocks"], here["bytes"]) == (3, 14, 14 * BLOCK)
        assert here["recv_failures"] == {}
        assert here["operations"] > 0
        for key in ("handover_time", "queued_time", "posting_time", "transfer_time", "confirm_time"):
            assert sum(here[key]["counts"]) == 3, key
        assert sum(here["handshake_time"]["counts"]) == here["handshakes"] == 1
        assert here["recv_bytes"] == {"counts": [1, 0, 1, 0, 1], "sum": 14 * BLOCK}
        sums = [here[key]["sum"] for key in ("handover_time", "queued_time", "transfer_time", "confirm_time")]
        assert sums[0] >= sum(sums[1:]) > 0
        assert here["posting_time"]["sum"] <= here["transfer_time"]["sum"]
        assert (there["sends_granted"], there["sends_read"], there["leases"]) == (3, 3, 0)
        assert (here["peers"], here["endpoints"], there["peers"]) == (1, 1, 1)
        assert here["registered_bytes"] == there["registered_bytes"] == BLOCKS * BLOCK
        # What reports brought is what the totals have.
        until("the last report", lambda: both.worker.poll() is None)
        assert both.reported["recvs"] == here["recvs"]
        assert both.reported["registered_bytes"] == here["registered_bytes"]
        assert (ours["scheduler"]["holds"], ours["scheduler"]["loads"], theirs["scheduler"]["grants"]) == (3, 3, 3)
        assert theirs["scheduler"]["listener_requests"] >= 1
        assert sum(ours["agent"]["transfer_time"]["counts"]) == ours["agent"]["transfers_done"] == 3

        families = parsed(stats.prometheus([ours, theirs]))
        told = [metric for metric in stats.metrics() if metric.scope != "peer"]
        assert set(families) == {f"kvferry_{metric.name}" for metric in told}
        for metric in told:
            family = families[f"kvferry_{metric.name}"]
            assert (family.type, family.documentation) == (metric.kind, metric.help)
            for side, row in (("decode", ours), ("prefill", theirs)):
                scope = {"worker": "totals"}.get(metric.scope, metric.scope)
                value = row[scope][metric.key]
                samples = [sample for sample in family.samples if sample.labels["side"] == side]
                if metric.causes:
                    assert {sample.labels["cause"] for sample in samples} == set(metric.causes)
                elif metric.kind != "histogram":
                    assert [sample.value for sample in samples] == [value]
                else:
                    buckets = [
                        (sample.labels["le"], sample.value) for sample in samples if sample.name.endswith("_bucket")
                    ]
                    assert buckets[-1] == ("+Inf", sum(value["counts"]))
                    assert [float(le) for le, _ in buckets[:-1]] == [bound / metric.divisor for bound in metric.bounds]
                    counts = [*value["counts"], *[0] * (len(buckets) - len(value["counts"]))]
                    assert [count for _, count in buckets] == np.cumsum(counts).tolist()
                    (total,) = [sample.value for sample in samples if sample.name.endswith("_sum")]
                    assert total == pytest.approx(value["sum"] / metric.divisor)


def test_the_text_of_an_agent_and_labels_that_need_escaping() -> None:
    label = 'a "quoted" \\ back\nnext line, {braces} ü'
    with kvferry.Agent({"name": "a", "transport": "tcp"}) as agent:
        agent.register(np.zeros(4096, dtype=np.uint8))
        text = stats.prometheus([{"labels": {"host": label}, "agent": agent.stats()}])
    family = parsed(text)["kvferry_agent_region_bytes"]
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"host": label}, 4096)]
    assert stats.prometheus([]) == ""


def test_rows_that_cannot_be_are_named() -> None:
    for bad, part in (
        ({"labels": {"a b": "x"}, "totals": {}}, "a b"),
        ({"labels": {"le": "x"}, "totals": {}}, "le"),
        ({"labels": {"peer": "x"}, "peers": []}, "peer"),
        ({"peers": {}}, "peers"),
        ({"labels": {"rank": 3}, "totals": {}}, "rank"),
        ({"totals": {"recvs": "x"}}, "recvs"),
        ({"totals": 7}, "totals"),
    ):
        with pytest.raises(kvferry.InvalidArgumentError, match=part):
            stats.prometheus([bad])
    with pytest.raises(kvferry.InvalidArgumentError, match="two rows"):
        stats.prometheus([{"totals": {}}, {"totals": {}}])
    with pytest.raises(kvferry.InvalidArgumentError, match="21 buckets"):
        stats.merge({"transfer_time": {"counts": [1] * 21, "sum": 1}}, {})


def test_nothing_is_counted_without_telemetry() -> None:
    with pair(telemetry=False, producer={"telemetry": False}) as both:
        assert both.hand_over() is None
        request, params = both.grant()
        params["remote_block_ids"] = [[1, 2, 3, BLOCKS + 7]]
        both.load(request, params)
        assert both.over(request) == "invalid_request"
        assert both.reported == stats.merge({}, {}) == both.totals()
        assert both.ask("figures")["totals"] == stats.merge({}, {})
        agent: Any = both.worker.stats()["agent"]
        assert (agent["bytes_read"], agent["transfer_time"]) == (4 * BLOCK, {"counts": [], "sum": 0})


# --- a failure of each cause, and what counts it


def failed(both: Pair, cause: str, number: int = 1) -> None:
    totals = both.totals()
    assert totals["recv_failures"] == {cause: number}
    assert both.reported["recv_failures"] == {cause: number}
    (family,) = (
        f
        for f in text_string_to_metric_families(stats.prometheus([{"totals": totals}]))
        if f.name == "kvferry_recv_failures"
    )
    assert {s.labels["cause"]: s.value for s in family.samples} == {name: number * (name == cause) for name in CAUSES}


@pytest.mark.parametrize("cause", ["lease_expired", "invalid_request", "aborted", "handshake_failed", "incompatible"])
def test_failures_that_need_no_violence(cause: str) -> None:
    options: dict[str, Any] = {
        "lease_expired": {"lease_ms": 1000},
        "handshake_failed": {"handshake_timeout_ms": 1500},
        "aborted": {"handshake_timeout_ms": 60_000},
        "incompatible": {"compat": [["model", "another"]]},
    }.get(cause, {})
    with pair(**options) as both:
        request, params = both.grant()
        if cause == "lease_expired":
            until("the lease is over", lambda: both.ask("figures")["totals"]["sends_expired"] == 1)
        elif cause == "invalid_request":
            params["remote_block_ids"] = [[1, 2, 3, BLOCKS + 7]]
        elif cause in ("aborted", "handshake_failed"):
            # Nobody answers there: documentation's addresses of RFC 5737 are routed nowhere.
            params["remote_host"] = "192.0.2.1"
        both.load(request, params)
        if cause == "aborted":
            keep, _ = both.scheduler.finished(request, params, "aborted", [[0, 1, 2, 3]], 0)
            assert keep
            both.worker.submit(both.scheduler.step())
        assert both.over(request) == cause
        failed(both, cause)
        if cause in ("handshake_failed", "incompatible"):
            assert both.totals()["handshake_failures"] == 1


@pytest.mark.parametrize("cause", ["timeout", "peer_died"])
def test_failures_of_a_peer_that_stands_still_or_is_killed(cause: str) -> None:
    with ExitStack() as stack:
        both = Pair(stack, transfer_timeout_ms=60_000 if cause == "peer_died" else 1500)
        # On a machine that stands still, reads that go well may take as long.
        slow, deadline = 0, time.monotonic() + GENEROUS
        while (ended := both.hand_over()) is not None:
            assert ended == cause == "timeout"
            assert time.monotonic() < deadline, "no reads were in time"
            slow += 1
        request, params = both.grant()
        both.producer.freeze()
        try:
            both.load(request, params)
            if cause == "peer_died":
                until("the load is under way", lambda: both.worker.stats()["agent"]["transfers"] == 1)  # type: ignore[index]
                both.producer.kill()
            assert both.over(request) == cause
        finally:
            both.producer.thaw()
        failed(both, cause, slow + 1)
        if cause == "peer_died":
            until("the gauge falls", lambda: both.totals()["peers"] == 0)


def test_a_failure_of_the_transport() -> None:
    with pair(transport="shm") as both:
        assert both.hand_over() is None
        assert both.worker.stats()["agent"]["copied_bytes"] > 0, "the kernel copies nothing on this machine"  # type: ignore[index]
        request, params = both.grant()
        both.ask("protect")
        both.load(request, params)
        assert both.over(request) == "transport_error"
        failed(both, "transport_error")


def test_a_digest_that_differs() -> None:
    with pair(verify=True) as both:
        both.ask("change")
        deadline = time.monotonic() + GENEROUS
        while (cause := both.hand_over(BLOCKS)) is None:
            assert time.monotonic() < deadline, "no digest ever differed"
        assert cause == "digest_mismatch"
        failed(both, "digest_mismatch")


def test_a_poll_sees_the_news_and_no_more_after_the_end() -> None:
    with pair() as both:
        news = both.worker._handle.news
        until("nothing is new", lambda: both.worker.poll() is None and news[0] == 0)
        request, params = both.grant()
        both.load(request, params)
        until("there is news", lambda: news[0] != 0)
        found = both.worker.poll()
        assert found is not None
        assert request in found["finished_recving"] or both.over(request) is None
        until("all is polled", lambda: both.worker.poll() is None and news[0] == 0)
        both.worker.shutdown()
        with pytest.raises(ShutDownError):
            both.worker.poll()
        with pytest.raises(ShutDownError):
            both.worker.wait(0.0)


@pytest.mark.parametrize("capacity", [16, 24, 4096])
def test_a_report_comes_whole_whatever_the_outbox_takes(capacity: int) -> None:
    """16: only told of; 24: too long for it."""
    with pair() as both:
        handle = both.worker._handle
        handle.set_outbox(capacity)
        assert handle.outbox is not None
        news, turns = handle.news, handle.outbox.turns
        until("nothing is new", lambda: both.worker.poll() is None and news[0] == 0)
        for _ in range(3):
            request, params = both.grant()
            both.load(request, params)
            until("there is news", lambda: news[0] != 0)
            # Both flags, or just the first; a report of the second kind waits for a call.
            assert capacity == 4096 or news[0] == 256
            turns.pop()
            assert both.worker.poll() is None, "another thread takes it"
            assert both.worker.wait(0.01) is None
            turns.append(None)
            found = both.worker.poll()
            assert found is not None
            assert request in found["finished_recving"] or both.over(request) is None


def test_what_waits_in_an_outbox_comes_with_what_came_later_and_outlives_it() -> None:
    with pair() as both:
        worker = both.worker
        news = worker._handle.news
        until("nothing is new", lambda: worker.poll() is None and news[0] == 0)
        requests = [both.grant() for _ in range(3)]
        both.load(*requests[0])
        until("a report is in the outbox", lambda: news[0] & 1 == 1)
        both.load(*requests[1])
        until("another is not", lambda: news[0] == 257)
        worker._handle.set_outbox(1 << 16)
        both.load(*requests[2])
        got: list[str] = []
        deadline = time.monotonic() + GENEROUS
        while len(got) < 3:
            assert time.monotonic() < deadline, f"only {got} were reported"
            got += (worker.wait(1.0) or {"finished_recving": []})["finished_recving"]
        assert sorted(got) == sorted(request for request, _ in requests), "each once"


# --- the documentation

DOCS = Path(__file__).resolve().parents[2] / "docs" / "telemetry.md"


def test_the_documentation_lists_every_metric() -> None:
    row = re.compile(r"^\| `kvferry_(\w+)` \| (\w+) \| ([\w ]+) \| (.+) \|$", re.MULTILINE)
    listed = [tuple(match.groups()) for match in row.finditer(DOCS.read_text(encoding="utf-8"))]
    total = {"counter": "_total"}
    code = [
        (metric.name + total.get(metric.kind, ""), metric.kind, metric.unit, metric.help) for metric in stats.metrics()
    ]
    assert listed == code


def test_the_documentation_lists_causes_and_bounds() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert ", ".join(f"`{cause}`" for cause in CAUSES) in " ".join(text.split())
    seconds = next(metric for metric in stats.metrics() if metric.key == "transfer_time")
    assert ", ".join(f"{bound / 1e6:g}" for bound in seconds.bounds) in " ".join(text.split())


def test_maps_travel_as_json() -> None:
    with pair() as both:
        assert both.hand_over() is None
        totals = both.totals()
    assert stats.merge(json.loads(json.dumps(totals)), {}) == totals
