"""Engines that are killed, frozen, cut off or moved while requests are under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lab.engines.engine import RemoteEngine, Setup, engines
from lab.faults.series import (
    BURST,
    LEASE_MS,
    UNPINNED_S,
    Options,
    Series,
    settle,
    start_loads,
    until_good,
    wait_unpinned,
)
from lab.network import Network


def _killed(options: Options, transport: str, role: str) -> dict[str, Any]:
    """One of two engines is killed in the middle of loads, in each round; the other one goes on with the next one."""
    series = Series(options, transport, max(min(5, options.rounds), options.rounds // 4))
    setups = {name: series.setup(name, name == "prefill") for name in ("prefill", "decode")}
    tally = series.tally
    victim_setup = setups.pop(role)
    (survivor_setup,) = setups.values()
    survivor, spare = RemoteEngine(survivor_setup), RemoteEngine(victim_setup)
    killed_at: dict[str, float] = {}
    longest = 0.0

    def take_freed() -> None:
        nonlocal longest
        for name, at in survivor.ask("state")["freed"]:
            longest = max(longest, at - killed_at.pop(name, at))

    def fault(number: int) -> None:
        nonlocal spare
        victim, spare = spare, RemoteEngine(victim_setup)
        victim.wait_up()
        producer, consumer = (survivor, victim) if survivor_setup.serves else (victim, survivor)
        series.plain(producer, consumer)
        burst = series.burst(producer, consumer)
        for done in consumer.take_done():
            burst.discard(done.request)
            tally.take(done)
        victim.kill()
        if number >= 0:
            tally.figures["requests_under_way_when_killed"] += len(burst)
        if survivor_setup.serves:
            killed_at.update(dict.fromkeys(burst, time.monotonic()))
            take_freed()
        else:
            settle(consumer, burst, tally)

    try:
        found = series.run([survivor], fault)
        if survivor_setup.serves:
            take_freed()
            found["longest_pinned_s"] = round(longest, 2)
            if longest > UNPINNED_S:
                found["zeros"]["pinned_after_lease"] += 1
                tally.notes.append(f"blocks came free {longest:.1f} s after their consumer was killed")
        return found
    finally:
        spare.kill()
        survivor.close()


def kill_consumer(options: Options, transport: str) -> dict[str, Any]:
    """A decode engine is killed in the middle of its loads; the prefill engine goes on with the next one."""
    return _killed(options, transport, "decode")


def kill_producer(options: Options, transport: str) -> dict[str, Any]:
    """A prefill engine is killed while it is read; the decode engine goes on with its successor of the same name."""
    return _killed(options, transport, "prefill")


Fault = Callable[[Series, RemoteEngine, RemoteEngine, int], None]
"""What is done to a producer and a consumer in a round."""


def _survived(options: Options, transport: str, fault: Fault, *places: dict[str, Any]) -> dict[str, Any]:
    """The same two engines survive a fault again and again. `places`: where they are, by default on this host."""
    series = Series(options, transport, max(2, options.rounds // 10))
    setups: list[Setup] = []
    for name, place in zip(("prefill", "decode"), places or ({}, {}), strict=True):
        setups.append(series.setup(name, name == "prefill", **place))
    with engines(*setups) as (producer, consumer):

        def once(number: int) -> None:
            series.plain(producer, consumer)
            fault(series, producer, consumer, number + series.warm)

        return series.run([producer, consumer], once, lambda: series.plain(producer, consumer))


def freeze(options: Options, transport: str) -> dict[str, Any]:
    """One of the two engines stands still for longer than the lease, then goes on; in turns."""

    def fault(series: Series, producer: RemoteEngine, consumer: RemoteEngine, number: int) -> None:
        victim = (producer, consumer)[number % 2]
        burst = series.burst(producer, consumer)
        victim.freeze()
        time.sleep(LEASE_MS / 1000 * (1.2 + series.dice.random()))
        victim.thaw()
        settle(consumer, burst, series.tally)
        wait_unpinned(producer, series.tally)

    return _survived(options, transport, fault)


def restart_listener(options: Options, transport: str) -> dict[str, Any]:
    """The head's listener ends and comes back on another port while requests are under way."""

    def fault(series: Series, producer: RemoteEngine, consumer: RemoteEngine, number: int) -> None:
        wanted = series.requests.make(BURST)
        params = dict(producer.ask("prefill", wanted))
        burst = start_loads(consumer, wanted[: BURST // 2], params)
        series.moment()
        producer.ask("restart_listener")
        # These still name the former port, where nobody listens: they fail or use the connection that is there.
        burst |= start_loads(consumer, wanted[BURST // 2 :], params)
        settle(consumer, burst, series.tally)

    return _survived(options, transport, fault)


def sleep(options: Options, transport: str) -> dict[str, Any]:
    """One of the two engines gives its cache back in the middle of loads, and has it again, there or elsewhere.

    Requests that come while the decode engine sleeps wait for it.
    """

    def fault(series: Series, producer: RemoteEngine, consumer: RemoteEngine, number: int) -> None:
        victim, moves = (producer, consumer)[number % 2], number // 2 % 2 == 1
        waiting = series.requests.make(4) if victim is consumer else []
        params = dict(producer.ask("prefill", waiting))
        burst = series.burst(producer, consumer)
        victim.ask("fall_asleep")
        burst |= start_loads(consumer, waiting, params)
        time.sleep(LEASE_MS / 1000 * 1.5 * series.dice.random())
        victim.ask("wake", moves)
        settle(consumer, burst, series.tally)
        wait_unpinned(producer, series.tally)

    return _survived(options, transport, fault)


def cut(options: Options, transport: str) -> dict[str, Any]:
    """The network between two hosts drops everything for a while, short or long, then works again."""
    with Network() as network:
        hosts = (network.prefill, network.decode)

        def fault(series: Series, producer: RemoteEngine, consumer: RemoteEngine, number: int) -> None:
            burst = series.burst(producer, consumer)
            network.cut(hosts[number % 2])
            time.sleep(series.dice.choice((0.1, 0.5, 2.5)) * (0.5 + series.dice.random()))
            network.restore()
            settle(consumer, burst, series.tally)
            # Connections that died in the cut may fail a request more; none may be lost or wrong.
            until_good(producer, consumer, series.requests, series.tally, "a cut")

        return _survived(options, transport, fault, *({"host": host.address, "netns": host.netns} for host in hosts))
