"""Figures: the table of them, Prometheus' text as its own parser reads it, and what real hand-overs and failures
count."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvferry
import numpy as np
import pytest
from kvferry import Scheduler, Worker, stats
from peer import GENEROUS, process, receive
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

BLOCKS, TOKENS, CONTENT = 64, 16, 4096
BLOCK = TOKENS * CONTENT
"""Bytes: longer than what is gathered into messages, so that over shared memory they are copied by the kernel."""
GROUPS = [{"kind": "full", "block_size": TOKENS}]
CAUSES = next(metric for metric in stats.metrics() if metric.key == "recv_failures").causes


def worker_of(engine: str, address: int, **more: object) -> Worker:
    worker = Worker({"engine_id": engine, "transport": "tcp", "compat": [["model", "m"]], **more})
    worker.register(address, BLOCKS * BLOCK)
    area = {"layer": "l", "part": "kv", "group": 0, "region": 0, "offset": 0, "num_blocks": BLOCKS, "heads": 1}
    area |= {"block_stride": BLOCK, "first_head": 0, "total_heads": 1, "head_stride": BLOCK, "tokens": TOKENS}
    worker.set_geometry({"groups": GROUPS, "areas": [{**area, "token_stride": CONTENT, "content": CONTENT}]})
    return worker


def scheduler_of(engine: str, **more: object) -> Scheduler:
    return Scheduler(
        {"engine_id": engine, "groups": GROUPS, "null_block": None, "host": "127.0.0.1", "port": 0, **more}
    )


class Producer:
    """The producer's process: grants what it is asked for, and damages itself when told to."""

    def __init__(self, more: dict[str, object], lease_ms: int) -> None:
        self.memory = mmap.mmap(-1, BLOCKS * BLOCK)
        self.cache = np.frombuffer(self.memory, dtype=np.uint8)
        self.worker = worker_of("prefill", self.cache.ctypes.data, **more)
        self.scheduler = scheduler_of("prefill", lease_ms=lease_ms)
        self.scheduler.serve({(0, 0): self.worker.metadata()})
        self.changing = threading.Event()
        self.steps()

    def steps(self) -> None:
        while self.scheduler.has_pending():
            self.worker.submit(self.scheduler.step())

    def grant(self, request: str, blocks: list[int]) -> Any:
        wanted = {"do_remote_decode": True}
        keep, params = self.scheduler.finished(request, wanted, "complete", [blocks], len(blocks) * TOKENS)
        assert keep
        self.steps()
        return params

    def sent(self) -> list[str]:
        report = self.worker.poll()
        if report is not None:
            self.scheduler.report(report)
        return [] if report is None else report["finished_sending"]

    def figures(self) -> Any:
        return {"labels": {"side": "prefill"}, "scheduler": self.scheduler.stats(), **self.worker.stats()}

    def pid(self) -> int:
        return os.getpid()

    def protect(self) -> None:
        """Nobody may read the cache any more, the kernel included."""
        result = ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.cache.ctypes.data), BLOCKS * BLOCK, 0)  # PROT_NONE
        assert result == 0

    def change(self) -> None:
        """The cache changes all the time from now on."""

        def run() -> None:
            while not self.changing.wait(0):
                self.cache += 1

        threading.Thread(target=run, daemon=True).start()


def produce(pipe: Connection, more: dict[str, object], lease_ms: int) -> None:
    producer = Producer(more, lease_ms)
    pipe.send("up")
    while True:
        order, arguments = pipe.recv()
        if order == "end":
            producer.changing.set()
            producer.worker.shutdown()
            producer.scheduler.shutdown()
            return
        pipe.send(getattr(producer, order)(*arguments))


class Pair:
    """A producer in a process of its own, and a consumer here."""

    def __init__(
        self, stack: ExitStack, lease_ms: int = 30_000, producer: Any = None, ends: int = 0, **consumer: object
    ) -> None:
        config = {"transport": consumer.get("transport", "tcp"), **(producer or {})}
        self.pipe = stack.enter_context(process(produce, config, lease_ms, ends=ends))
        assert receive(self.pipe) == "up"
        self.cache = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
        self.worker = stack.enter_context(worker_of("decode", self.cache.ctypes.data, **consumer))
        self.scheduler = stack.enter_context(scheduler_of("decode"))
        self.scheduler.set_engine({(0, 0): self.worker.metadata()})
        self.count = 0
        self.reported: dict[str, Any] = {}
        stack.callback(self.end)

    def ask(self, order: str, *arguments: object) -> Any:
        self.pipe.send((order, arguments))
        return receive(self.pipe)

    def end(self) -> None:
        try:
            self.pipe.send(("end", ()))
        except OSError:
            pass  # It was killed by its test.

    def grant(self, number: int = 4) -> tuple[str, Any]:
        self.count += 1
        return f"r{self.count}", self.ask("grant", f"p{self.count}", list(range(number)))

    def load(self, request: str, params: Any, number: int = 4) -> None:
        self.scheduler.arrived(request, params)
        self.scheduler.allocated(request, params, [list(range(number))], number * TOKENS, number * TOKENS)
        self.worker.submit(self.scheduler.step())

    def over(self, request: str) -> str | None:
        """The cause of a receive's failure, when it is over; None for one that succeeded."""
        deadline = time.monotonic() + GENEROUS
        while time.monotonic() < deadline:
            report = self.worker.wait(1.0)
            if report is None:
                continue
            self.reported = stats.merge(self.reported, report["stats"])
            self.scheduler.report(report)
            if request in report["finished_recving"]:
                causes = {failure["request"]: failure["cause"] for failure in report["failed_recving"]}
                return causes.get(request)
        raise AssertionError(f"{request} is not over")

    def hand_over(self, number: int = 4) -> str | None:
        request, params = self.grant(number)
        self.load(request, params, number)
        return self.over(request)

    def totals(self) -> dict[str, Any]:
        totals: Any = self.worker.stats()["totals"]
        return totals


@contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, **options)


def until(what: str, enough: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS
    while not enough():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


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
        assert set(families) == {f"kvferry_{metric.name}" for metric in stats.metrics()}
        for metric in stats.metrics():
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
                    assert [float(le) for le, _ in buckets[:-1]] == [bound * metric.scale for bound in metric.bounds]
                    counts = [*value["counts"], *[0] * (len(buckets) - len(value["counts"]))]
                    assert [count for _, count in buckets] == np.cumsum(counts).tolist()
                    (total,) = [sample.value for sample in samples if sample.name.endswith("_sum")]
                    assert total == pytest.approx(value["sum"] * metric.scale)


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
        ends = -signal.SIGKILL if cause == "peer_died" else 0
        both = Pair(stack, ends=ends, transfer_timeout_ms=60_000 if ends else 1500)
        assert both.hand_over() is None
        request, params = both.grant()
        pid = both.ask("pid")
        os.kill(pid, signal.SIGSTOP)
        try:
            both.load(request, params)
            if cause == "peer_died":
                until("the load is under way", lambda: both.worker.stats()["agent"]["transfers"] == 1)  # type: ignore[index]
                os.kill(pid, signal.SIGKILL)
            assert both.over(request) == cause
        finally:
            if cause != "peer_died":
                os.kill(pid, signal.SIGCONT)
        failed(both, cause)
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
