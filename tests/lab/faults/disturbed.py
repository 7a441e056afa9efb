"""Engines that are killed, frozen, cut off or moved while requests are under way."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lab.engines.engine import Setup
from lab.faults.options import Options
from lab.faults.series import (
    LONG,
    Child,
    Requests,
    Tally,
    engines,
    hand_over,
    resources,
    settle,
    start_loads,
    until_good,
    wait_level,
    wait_unpinned,
)
from lab.network import run, two_hosts

TRANSPORTS = ("tcp", "shm")

LEASE_MS = 1000
UNPINNED_S = LEASE_MS / 1000 + 4.0
"""The lease, and what noticing, reporting and being asked may take on a busy machine."""

BURST = 16
"""Requests at once: about 25 MiB, which are under way for 5 ms (shared memory) to 50 ms (TCP)."""


def _moment(dice: random.Random) -> float:
    """A random moment of a burst, in seconds from its start; half of them early."""
    return dice.uniform(0, 0.008) if dice.random() < 0.5 else dice.uniform(0, 0.06)


def _setup(name: str, transport: str, serves: bool, **more: Any) -> Setup:
    return Setup(
        name=name,
        serves=serves,
        transport=transport,
        lease_ms=LEASE_MS,
        blocks=4096,
        block_bytes=16384,
        **more,
    )


def _summary(tally: Tally, over: dict[str, int], **more: Any) -> dict[str, Any]:
    return {
        "zeros": {
            "wrong_bytes": tally.wrong,
            "unreported": tally.unreported,
            "pinned_after_lease": tally.pinned,
            "unexpected": tally.unexpected,
            **{f"grown_{key}": value for key, value in over.items()},
        },
        "good": tally.good,
        "failed_by_cause": dict(sorted(tally.causes.items())),
        "notes": tally.notes,
        **more,
    }


def _plain(producer: Child, consumer: Child, requests: Requests, tally: Tally, number: int = 3) -> None:
    """Requests that must arrive, after whatever went before.

    On a machine so busy that a lease runs out all the same, saying so is right; then others must arrive.
    """
    deadline = time.monotonic() + LONG
    wanted = tally.good + number
    while tally.good < wanted:
        if time.monotonic() > deadline:
            tally.unexpected += 1
            tally.note(f"no request works within {LONG:.0f} s of a fault")
            return
        before = tally.causes.total() - tally.causes["lease_expired"]
        settle(consumer, hand_over(producer, consumer, requests.make(wanted - tally.good)), tally)
        failed = tally.causes.total() - tally.causes["lease_expired"] - before
        if failed:
            tally.unexpected += failed
            tally.note(f"{failed} requests failed that nothing disturbed: {dict(tally.causes)}")


def _levels(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    return {"resources_start": before, "resources_end": after}


class Pair(NamedTuple):
    """Two engines, and what a series makes of them."""

    producer: Child
    consumer: Child
    requests: Requests
    tally: Tally
    dice: random.Random

    def burst(self) -> set[str]:
        """Many requests at once; returns at a random moment of them."""
        names = hand_over(self.producer, self.consumer, self.requests.make(BURST))
        time.sleep(_moment(self.dice))
        return names


def _survived(
    options: Options, producer: Setup, consumer: Setup, fault: Callable[[Pair, int], None], counted: str
) -> dict[str, Any]:
    """A series of `fault(pair, number)` that both engines survive, and after which requests must arrive."""
    requests, tally, dice = Requests(options.seed, most=128), Tally(), random.Random(options.seed)
    warm = max(2, options.rounds // 10)
    before: list[dict[str, int]] = []
    with engines(producer, consumer) as children:
        both = Pair(children[0], children[1], requests, tally, dice)
        for number in range(warm + options.rounds):
            _plain(both.producer, both.consumer, requests, tally)
            if number == warm:
                wait_unpinned(both.producer, tally, UNPINNED_S)
                before = [resources(child) for child in children]
            fault(both, number)
            options.progress(number + 1, warm + options.rounds)
        _plain(both.producer, both.consumer, requests, tally)
        wait_unpinned(both.producer, tally, UNPINNED_S)
        levels = [wait_level(child, start) for child, start in zip(children, before, strict=True)]
    (of_producer, over_producer), (of_consumer, over_consumer) = levels
    over = {key: over_producer[key] + over_consumer[key] for key in over_producer}
    return _summary(tally, over, producer=of_producer, consumer=of_consumer, **{counted: options.rounds})


def kill_consumer(options: Options, transport: str) -> dict[str, Any]:
    """A decode engine is killed in the middle of its loads; the prefill engine goes on with the next one."""
    rounds = options.rounds
    warm = max(min(5, rounds), rounds // 4)
    dice, requests, tally = random.Random(options.seed), Requests(options.seed, most=128), Tally()
    producer = Child(_setup("prefill", transport, True))
    spare = Child(_setup("decode", transport, False))
    before, in_flight, longest = {}, 0, 0.0
    killed_at: dict[str, float] = {}
    try:
        producer.wait_up()
        for number in range(warm + rounds):
            if number == warm:
                wait_unpinned(producer, tally, UNPINNED_S)
                before = resources(producer)
                in_flight = 0
            consumer, spare = spare, Child(_setup("decode", transport, False))
            consumer.wait_up()
            _plain(producer, consumer, requests, tally)
            burst = hand_over(producer, consumer, requests.make(BURST))
            time.sleep(_moment(dice))
            ended = consumer.take_done()
            consumer.kill()
            now = time.monotonic()
            for done in ended:
                burst.discard(done.request)
                tally.take(done)
            in_flight += len(burst)
            killed_at.update(dict.fromkeys(burst, now))
            for name, at in producer.ask("state")["freed"]:
                longest = max(longest, at - killed_at.pop(name, at))
            options.progress(number + 1, warm + rounds)
        wait_unpinned(producer, tally, UNPINNED_S)
        for name, at in producer.ask("state")["freed"]:
            longest = max(longest, at - killed_at.pop(name, at))
        if longest > UNPINNED_S:
            tally.pinned += 1
            tally.note(f"blocks came free {longest:.1f} s after their consumer was killed")
        after, over = wait_level(producer, before)
    finally:
        spare.kill()
        producer.close()
    return _summary(
        tally,
        over,
        kills=rounds,
        requests_under_way_when_killed=in_flight,
        longest_pinned_s=round(longest, 2),
        **_levels(before, after),
    )


def kill_producer(options: Options, transport: str) -> dict[str, Any]:
    """A prefill engine is killed while it is read; the decode engine goes on with its successor of the same name."""
    rounds = options.rounds
    warm = max(min(5, rounds), rounds // 4)
    dice, requests, tally = random.Random(options.seed), Requests(options.seed, most=128), Tally()
    consumer = Child(_setup("decode", transport, False))
    spare = Child(_setup("prefill", transport, True))
    before, in_flight = {}, 0
    try:
        consumer.wait_up()
        for number in range(warm + rounds):
            if number == warm:
                before = resources(consumer)
            producer, spare = spare, Child(_setup("prefill", transport, True))
            producer.wait_up()
            _plain(producer, consumer, requests, tally)
            burst = hand_over(producer, consumer, requests.make(BURST))
            time.sleep(_moment(dice))
            for done in consumer.take_done():
                burst.discard(done.request)
                tally.take(done)
            producer.kill()
            in_flight += len(burst)
            settle(consumer, burst, tally)
            options.progress(number + 1, warm + rounds)
        after, over = wait_level(consumer, before)
    finally:
        spare.kill()
        consumer.close()
    return _summary(tally, over, kills=rounds, requests_under_way_when_killed=in_flight, **_levels(before, after))


def freeze(options: Options, transport: str) -> dict[str, Any]:
    """One of the two engines stands still for longer than the lease, then goes on; in turns."""

    def fault(both: Pair, number: int) -> None:
        victim = (both.producer, both.consumer)[number % 2]
        burst = both.burst()
        victim.signal(signal.SIGSTOP)
        time.sleep(LEASE_MS / 1000 * (1.2 + both.dice.random()))
        victim.signal(signal.SIGCONT)
        settle(both.consumer, burst, both.tally)
        wait_unpinned(both.producer, both.tally, UNPINNED_S)

    return _survived(options, _setup("prefill", transport, True), _setup("decode", transport, False), fault, "freezes")


def restart_listener(options: Options, transport: str) -> dict[str, Any]:
    """The head's listener ends and comes back on another port while requests are under way."""

    def fault(both: Pair, number: int) -> None:
        wanted = both.requests.make(BURST)
        params = dict(both.producer.ask("prefill", wanted))
        burst = start_loads(both.consumer, wanted[: BURST // 2], params)
        time.sleep(_moment(both.dice))
        both.producer.ask("restart_listener")
        # These still name the former port, where nobody listens: they fail or use the connection that is there.
        burst |= start_loads(both.consumer, wanted[BURST // 2 :], params)
        settle(both.consumer, burst, both.tally)

    return _survived(options, _setup("prefill", transport, True), _setup("decode", transport, False), fault, "restarts")


def sleep(options: Options, transport: str) -> dict[str, Any]:
    """One of the two engines gives its cache back in the middle of loads, and has it again, there or elsewhere.

    Requests that come while the decode engine sleeps wait for it.
    """

    def fault(both: Pair, number: int) -> None:
        victim, moves = (both.producer, both.consumer)[number % 2], number // 2 % 2 == 1
        waiting = both.requests.make(4) if victim is both.consumer else []
        params = dict(both.producer.ask("prefill", waiting))
        burst = both.burst()
        victim.ask("fall_asleep")
        burst |= start_loads(both.consumer, waiting, params)
        time.sleep(LEASE_MS / 1000 * 1.5 * both.dice.random())
        victim.ask("wake", moves)
        settle(both.consumer, burst, both.tally)
        wait_unpinned(both.producer, both.tally, UNPINNED_S)

    return _survived(options, _setup("prefill", transport, True), _setup("decode", transport, False), fault, "sleeps")


def cut(options: Options, transport: str) -> dict[str, Any]:
    """The network between two hosts drops everything for a while, short or long, then works again."""
    with two_hosts() as ((p_netns, p_address), (d_netns, d_address)):

        def fault(both: Pair, number: int) -> None:
            burst = both.burst()
            side = (p_netns, d_netns)[number % 2]
            run("ip", "netns", "exec", side, "iptables", "-I", "INPUT", "-i", "eth0", "-j", "DROP")
            run("ip", "netns", "exec", side, "iptables", "-I", "OUTPUT", "-o", "eth0", "-j", "DROP")
            time.sleep(both.dice.choice((0.1, 0.5, 2.5)) * (0.5 + both.dice.random()))
            run("ip", "netns", "exec", side, "iptables", "-F")
            settle(both.consumer, burst, both.tally)
            # Connections that died in the cut may fail a request more; none may be lost or wrong.
            until_good(both.producer, both.consumer, both.requests, both.tally, "a cut")

        return _survived(
            options,
            _setup("prefill", transport, True, host=p_address, netns=p_netns),
            _setup("decode", transport, False, host=d_address, netns=d_netns),
            fault,
            "cuts",
        )
