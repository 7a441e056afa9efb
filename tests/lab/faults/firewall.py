"""A prefill engine whose listener answers and whose data ports a firewall drops, beside one that is open."""

from __future__ import annotations

import random
import time
from typing import Any

from lab.engines.engine import Setup
from lab.faults.disturbed import BURST, LEASE_MS, UNPINNED_S
from lab.faults.options import Options
from lab.faults.series import (
    LONG,
    Child,
    Requests,
    Tally,
    hand_over,
    resources,
    settle,
    until_good,
    wait_level,
    wait_unpinned,
)
from lab.network import deliver, hosts, swallow

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

HOSTS = {"p": ["10.78.0.1"], "d": ["10.78.0.2"], "s": [DATA, LISTENER]}


def _setup(
    name: str, transport: str, serves: bool, netns: str, host: str, lease_ms: int = LEASE_MS, **worker: Any
) -> Setup:
    return Setup(
        name=name,
        serves=serves,
        transport=transport,
        lease_ms=lease_ms,
        blocks=4096,
        block_bytes=16384,
        netns=netns,
        host=host,
        worker=worker,
    )


def _behind(
    shut: Child, producer: Child, consumer: Child, requests: Requests, tally: Tally, beside: Tally, took: list[float]
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
                    tally.unexpected += 1
                    tally.note(f"{done.request}: {done.cause} after {longest:.1f} s, expected a failure")
            else:
                tally.unexpected += 1
                tally.note(f"{done.request}: an end that nobody waits for ({done.cause})")
        if not running:
            start = time.monotonic()
    for open_requests in (waiting, running):
        tally.unreported += len(open_requests)
    return count, longest


def firewall(options: Options, transport: str) -> dict[str, Any]:
    """See the module's text. Afterwards the firewall opens, and the engine behind it serves."""
    rounds = options.rounds
    warm = max(2, rounds // 10)
    requests, tally, beside = Requests(options.seed, most=64), Tally(), Tally()
    took: list[float] = []
    dice = random.Random(options.seed)
    before: dict[str, int] = {}
    behind, longest = 0, 0.0
    with hosts(HOSTS) as netns:

        def start_shut() -> Child:
            return Child(_setup("shut", transport, True, netns["s"], LISTENER))

        producer = Child(_setup("prefill", transport, True, netns["p"], "10.78.0.1", OPEN_LEASE_MS))
        times = {"handshake_timeout_ms": HANDSHAKE_MS}
        consumer = Child(_setup("decode", transport, False, netns["d"], "10.78.0.2", **times))
        spare = start_shut()
        try:
            for number in range(warm + rounds):
                # A new life each time, so that the consumer has no connection to it.
                shut, spare = spare, start_shut()
                shut.wait_up()
                settle(consumer, hand_over(producer, consumer, requests.make(2)), tally, may_fail=False)
                if number == warm:
                    wait_unpinned(producer, tally, UNPINNED_S)
                    before = resources(consumer)
                swallow(netns["d"], DATA)
                time.sleep(dice.uniform(0, 0.05))
                count, until_failed = _behind(shut, producer, consumer, requests, tally, beside, took)
                behind, longest = behind + count, max(longest, until_failed)
                deliver(netns["d"], DATA)
                until_good(shut, consumer, requests, tally, "the firewall's opening")
                wait_unpinned(shut, tally, UNPINNED_S)
                shut.kill()
                options.progress(number + 1, warm + rounds)
            wait_unpinned(producer, tally, UNPINNED_S)
            after, over = wait_level(consumer, before)
        finally:
            for child in (spare, producer, consumer):
                child.close()
    frozen = sum(seconds > FROZEN_S for seconds in took)
    return {
        "zeros": {
            "wrong_bytes": tally.wrong + beside.wrong,
            "unreported": tally.unreported,
            "pinned_after_lease": tally.pinned,
            "unexpected": tally.unexpected + beside.unexpected,
            "frozen_reads": frozen,
            **{f"grown_{key}": value for key, value in over.items()},
        },
        "firewalls": rounds,
        "loads_behind_it": behind,
        "longest_until_they_failed_s": round(longest, 2),
        "good_meanwhile": beside.good,
        "slowest_meanwhile_ms": round(max(took, default=0.0) * 1000, 1),
        "failed_by_cause": dict(sorted((tally.causes + beside.causes).items())),
        "notes": tally.notes + beside.notes,
        "resources_start": before,
        "resources_end": after,
    }
