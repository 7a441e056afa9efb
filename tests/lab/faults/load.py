"""Load on one pair of engines: reads that race their lease, and a long run of mixed requests."""

from __future__ import annotations

import os
import random
import statistics
import time
from dataclasses import replace
from typing import Any

from lab.engines import chunked
from lab.engines.engine import engines
from lab.faults.series import (
    Options,
    Requests,
    Tally,
    grown,
    hand_over,
    resources,
    settle,
    setup_of,
    wait_unpinned,
)

RACE_LEASE_MS = 1000
PATIENT: dict[str, object] = {"transfer_timeout_ms": 60_000, "verdict_timeout_ms": 60_000}
"""No fault ends the reads that race their lease, so nothing else may end them on a slow machine either."""


def _part(tally: Tally, started: int, validated: bool, **more: Any) -> dict[str, Any]:
    """One half of a series in which leases may run out."""
    return {
        "requests": started,
        "good": tally.good,
        "wrong": tally.zeros["wrong_bytes"],
        "unreported": tally.zeros["unreported"],
        "pinned": tally.zeros["pinned_after_lease"],
        "unexpected": tally.causes.total() - tally.causes["lease_expired"] + tally.zeros["unexpected"],
        "causes": dict(tally.causes),
        **more,
        "notes": tally.notes if validated else tally.notes[:3],
    }


def _compared(checked: dict[str, Any], control: dict[str, Any], **more: int) -> dict[str, Any]:
    """Both halves; `more`: further numbers that must be 0."""
    return {
        "zeros": {
            "wrong_bytes": checked["wrong"],
            "unreported": checked["unreported"] + control["unreported"],
            "pinned": checked["pinned"] + control["pinned"],
            "unexpected": checked["unexpected"],
            "control_without_wrong_bytes": int(control["wrong"] == 0),
            **more,
        },
        "validated": checked,
        "not_validated": control,
    }


def lease_race(options: Options, transport: str) -> dict[str, Any]:
    """Leases run out at random moments of reads, and the producer overwrites the blocks at once.

    The consumer's first heartbeat renews the lease when the request arrives, and it sends no other (it is told that
    the lease lasts an hour); then it waits for almost a lease before it loads. Twice: with the lease as the producer's
    worker knows it, and with one of an hour there, while the blocks are overwritten after a second all the same: that
    is a producer without validation, and must be caught with wrong bytes, or the first part proves nothing.
    """
    checked = _race(options, transport, validated=True)
    control = _race(options, transport, validated=False)
    return _compared(checked, control, no_lease_ran_out=int(checked["lease_expired"] == 0))


def _race(options: Options, transport: str, validated: bool) -> dict[str, Any]:
    rounds = options.rounds if validated else max(200, options.rounds // 10)
    dice, requests, tally = random.Random(options.seed), Requests(options.seed, most=64), Tally()
    lease = RACE_LEASE_MS if validated else 3_600_000
    setup = setup_of("decode", False, transport, PATIENT, lease_ms=lease)
    with engines(replace(setup, name="prefill", serves=True), setup) as (producer, consumer):
        # Connections are made before, so that the time from arrival to the first heartbeat is short.
        settle(consumer, hand_over(producer, consumer, requests.make(2)), tally, may_fail=False)
        started = 0
        while started < rounds:
            wanted = requests.make(min(100, rounds - started))
            params = dict(producer.ask("prefill", wanted))
            loads = []
            for name, key, size in wanted:
                if params[name] is None:
                    continue
                delay = RACE_LEASE_MS / 1000 + dice.uniform(-0.25, 0.02)
                loads.append((name, key, size, {**params[name], "remote_lease_ms": 3_600_000}, delay))
            waiting = {name for name, *_ in loads} - set(consumer.ask("load", loads))
            started += len(waiting)
            if not validated:
                time.sleep(RACE_LEASE_MS / 1000 - 0.1)
                producer.tell("overwrite")
            settle(consumer, waiting, tally)
            wait_unpinned(producer, tally, 10.0)
            options.progress(started, rounds)
    return _part(tally, started, validated, lease_expired=tally.causes["lease_expired"])


def preempt(options: Options, transport: str) -> dict[str, Any]:
    """Prompts are read while a producer with few blocks computes them, gives their blocks away, and begins again.

    Twice: as it must be, with clients that leave, and with a producer that computes prompts again in the same blocks
    and does not say so. What was read before then counts, and wrong bytes must be found, or the first part proves
    nothing.
    """
    os.environ[chunked.VARIABLE] = "1"
    checked = _preempted(options, transport, silent=False)
    control = _preempted(options, transport, silent=True)
    return _compared(checked, control, never_preempted=int(checked["preempted"] == 0))


def _preempted(options: Options, transport: str, silent: bool) -> dict[str, Any]:
    rounds = max(300, options.rounds // 10) if silent else options.rounds
    requests, tally = Requests(options.seed, most=64), Tally()
    setup = setup_of("decode", False, transport)
    small = replace(setup, name="prefill", serves=True, blocks=512, silent=silent, aborts=0 if silent else 1)
    started = 0
    with engines(small, setup) as (producer, consumer):
        while started < rounds:
            waiting = hand_over(producer, consumer, requests.make(min(32, rounds - started)))
            started += len(waiting)
            settle(consumer, waiting, tally)
            options.progress(started, rounds)
        wait_unpinned(producer, tally, 60)
        state = producer.ask("state")
    # Of a prompt whose client has left, nothing is kept.
    ended = tally.causes["lease_expired"]
    more = {"preempted": state["preempted"], "aborted": state["aborted"], "ended_without_cache": ended}
    return _part(tally, started, not silent, **more)


def soak(options: Options, transport: str) -> dict[str, Any]:
    """Requests of mixed sizes through one pair of engines: memory and latency at a tenth and at the end."""
    rounds = options.rounds
    requests, tally = Requests(options.seed, most=32), Tally()
    setup = setup_of("decode", False, transport, blocks=32_768, block_bytes=2048, lease_ms=30_000)
    levels: list[dict[str, dict[str, int]]] = []
    first: list[float] = []
    started = 0
    tenth = rounds // 10
    begin = time.monotonic()
    with engines(replace(setup, name="prefill", serves=True), setup) as (producer, consumer):

        def level() -> dict[str, dict[str, int]]:
            wait_unpinned(producer, tally, 60)
            return {"producer": resources(producer), "consumer": resources(consumer)}

        while started < rounds:
            if started >= (tenth, rounds // 2, rounds)[len(levels)]:
                levels.append(level())
                if len(levels) == 1:
                    first, tally.seconds = tally.seconds, []
            waiting = hand_over(producer, consumer, requests.make(min(32, rounds - started)))
            started += len(waiting)
            settle(consumer, waiting, tally, may_fail=False)
            if levels:
                # The last tenth is what the first is compared with.
                del tally.seconds[:-tenth]
            options.progress(started, rounds)
        at_end = level()
    at_tenth, at_half = levels[:2]
    over = [grown(at_tenth[side], at_end[side]) for side in ("producer", "consumer")]
    ratio = statistics.median(tally.seconds) / statistics.median(first)
    return {
        "zeros": {
            **tally.zeros,
            "grown": sum(sum(entry.values()) for entry in over),
            # On a shared machine medians of thousands still move by tens of percent.
            "latency_grown": int(ratio > 1.5),
        },
        "requests": started,
        "requests_per_s": round(started / (time.monotonic() - begin), 1),
        "at_10_percent": {**at_tenth, **_latency(first)},
        "at_50_percent": at_half,
        "at_100_percent": {**at_end, **_latency(tally.seconds)},
        "latency_p50_ratio": round(ratio, 3),
        "notes": tally.notes,
    }


def _latency(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
    }
