"""A prefill engine whose listener answers and whose data ports a firewall drops, beside one that is open."""

from __future__ import annotations

import time
from typing import Any

from lab.engines.engine import RemoteEngine
from lab.faults.series import (
    BURST,
    LONG,
    Options,
    Requests,
    Series,
    Tally,
    hand_over,
    settle,
    until_good,
    wait_unpinned,
)
from lab.network import Network

HANDSHAKE_MS = 3000
FROZEN_S = HANDSHAKE_MS / 1000 / 2
"""A read from the open engine that takes longer has waited for the other engine. Reads otherwise take milliseconds."""

OPEN_LEASE_MS = round(LONG * 1000)
"""The open engine's lease. The thread that a firewall could freeze also keeps it alive: with a short lease, a read that
waits fails as `lease_expired`, as one does on a busy machine. With this lease it is late, and none may fail."""

SHUT_LIMIT_S = HANDSHAKE_MS / 1000 + 10.0
"""When a load from behind the firewall must have failed, on a busy machine; a blocking connect takes 130 s."""

DATA, LISTENER = "10.78.0.3", "10.78.0.4"
"""Addresses of the engine behind the firewall. UCX takes the first one of its interface."""

HOSTS = {"prefill": ("10.78.0.1",), "decode": ("10.78.0.2",), "shut": (DATA, LISTENER)}


def _behind(
    shut: RemoteEngine,
    producer: RemoteEngine,
    consumer: RemoteEngine,
    requests: Requests,
    tally: Tally,
    beside: Tally,
    took: list[float],
) -> tuple[int, float]:
    """Loads from behind the firewall, and from the open engine until those have failed.

    `beside` counts the reads from the open engine, none of which may fail. `took` gets the seconds of each, however it
    ends. They count from before its prefill, those of the first reads from before the loads that the firewall stops: a
    consumer that stands still before a read begins makes it late too. Returns the loads from behind the firewall and
    the longest time that one took to fail.
    """
    begin = start = time.monotonic()
    waiting = hand_over(shut, consumer, requests.make(BURST))
    count, longest = len(waiting), 0.0
    running: dict[str, float] = {}
    deadline = begin + SHUT_LIMIT_S
    while (waiting or running) and time.monotonic() < begin + LONG:
        if waiting and not running:
            running = dict.fromkeys(hand_over(producer, consumer, requests.make(4)), start)
        for done in consumer.take_done(0.02):
            if done.request in running:
                took.append(time.monotonic() - running.pop(done.request))
                beside.take(done, may_fail=False)
            elif done.request in waiting:
                waiting.discard(done.request)
                tally.take(done)
                longest = time.monotonic() - begin
                if done.cause is None or time.monotonic() > deadline:
                    tally.bad("unexpected", f"{done.request}: {done.cause} after {longest:.1f} s, expected a failure")
            else:
                tally.bad("unexpected", f"{done.request}: an end that nobody waits for ({done.cause})")
        if not running:
            start = time.monotonic()
    for open_requests in (waiting, running):
        tally.zeros["unreported"] += len(open_requests)
    return count, longest


def firewall(options: Options, transport: str) -> dict[str, Any]:
    """See the module's text. Afterwards the firewall opens, and the engine behind it serves."""
    series = Series(options, transport, max(2, options.rounds // 10), most=64)
    requests, tally, beside = series.requests, series.tally, Tally()
    took: list[float] = []
    behind, longest = 0, 0.0
    with Network(hosts=HOSTS) as network:

        def start(name: str, host: str, lease_ms: int, **worker: object) -> RemoteEngine:
            where = network.hosts[name]
            more = {"lease_ms": lease_ms, "worker": worker, "netns": where.netns, "host": host}
            return RemoteEngine(series.setup(name, name != "decode", **more))

        def start_shut() -> RemoteEngine:
            return start("shut", LISTENER, 1000)

        producer = start("prefill", HOSTS["prefill"][0], OPEN_LEASE_MS)
        consumer = start("decode", HOSTS["decode"][0], 1000, handshake_timeout_ms=HANDSHAKE_MS)
        spare = start_shut()

        def fault(number: int) -> None:
            nonlocal spare, behind, longest
            # A new life each time, so that the consumer has no connection to it.
            shut, spare = spare, start_shut()
            shut.wait_up()
            settle(consumer, hand_over(producer, consumer, requests.make(2)), tally, may_fail=False)
            network.swallow(network.decode, DATA)
            time.sleep(series.dice.uniform(0, 0.05))
            count, until_failed = _behind(shut, producer, consumer, requests, tally, beside, took)
            behind, longest = behind + count, max(longest, until_failed)
            network.deliver(network.decode, DATA)
            until_good(shut, consumer, requests, tally, "the firewall's opening")
            wait_unpinned(shut, tally)
            shut.kill()

        try:
            found = series.run([producer, consumer], fault)
        finally:
            for engine in (spare, producer, consumer):
                engine.close()
    found["zeros"]["wrong_bytes"] += beside.zeros["wrong_bytes"]
    found["zeros"]["unexpected"] += beside.zeros["unexpected"]
    found["zeros"]["frozen_reads"] = sum(seconds > FROZEN_S for seconds in took)
    found["notes"] += beside.notes
    found["failed_by_cause"] = dict(sorted((tally.causes + beside.causes).items()))
    return {
        **found,
        "loads_behind_it": behind,
        "longest_until_they_failed_s": round(longest, 2),
        "good_meanwhile": beside.good,
        "slowest_meanwhile_ms": round(max(took, default=0.0) * 1000, 1),
    }
