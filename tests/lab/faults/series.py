"""What series have in common: the command line's settings, requests, what is counted, and rounds of a fault."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.engines.cache import TOKENS
from lab.engines.engine import Done, RemoteEngine, Setup, Wanted
from lab.process import GENEROUS

LONG = GENEROUS
"""Seconds that anything may take on a busy machine; more is a failure."""

LEASE_MS = 1000
UNPINNED_S = LEASE_MS / 1000 + 4.0
"""The lease, and what noticing, reporting and being asked may take on a busy machine."""

BURST = 16
"""Requests at once: about 25 MiB, which are under way for 5 ms (shared memory) to 50 ms (TCP)."""

QUICK: dict[str, object] = {
    "handshake_timeout_ms": 10_000,
    "transfer_timeout_ms": 10_000,
    "verdict_timeout_ms": 5_000,
    "early_message_ms": 5_000,
    "tombstone_ms": 5_000,
    "peer_ttl_ms": 10_000,
    "chunk_tokens": TOKENS,
}
"""Times for a fault to be over soon; what is told of each is that it ends, not when."""


@dataclass(frozen=True)
class Options:
    """The command line's settings for one series."""

    series: str
    rounds: int
    seed: int
    # Of the series `matrix`: which cases and connectors, all if there are none.
    cases: tuple[str, ...] = ()
    connectors: tuple[str, ...] = ()

    def progress(self, done: int, of: int) -> None:
        """Shows how far the series is, where somebody looks."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{self.series}: {done} of {of} " + ("\n" if done == of else ""))
            sys.stderr.flush()
        elif done == of or done % max(1, of // 4) == 0:
            sys.stderr.write(f"{self.series}: {done} of {of}\n")


def setup_of(
    name: str, serves: bool, transport: str = "tcp", worker: Mapping[str, object] | None = None, **more: Any
) -> Setup:
    """An engine of 256 MiB with a short lease, unless `more` says otherwise."""
    chosen = {"lease_ms": LEASE_MS, "blocks": 4096, "block_bytes": 16384, **more}
    return Setup(name, serves, transport, worker={**QUICK, **(worker or {})}, **chosen)


LOADS = ("wrong_bytes", "unreported", "pinned_after_lease", "unexpected")
"""What must not happen to loads."""


class Tally:
    """What a series counts. `zeros` has what must not happen, by name."""

    def __init__(self, *zeros: str) -> None:
        self.zeros = dict.fromkeys(zeros or LOADS, 0)
        self.good = 0
        self.causes: Counter[str] = Counter()
        self.figures: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.notes: list[str] = []

    def bad(self, key: str, text: str, count: int = 1) -> None:
        """Counts what must not happen, and keeps the first few texts."""
        self.zeros[key] += count
        if len(self.notes) < 20:
            self.notes.append(f"{key}: {text}")

    def take(self, done: Done, may_fail: bool = True) -> None:
        """Counts one load's end."""
        if done.cause is None:
            self.good += 1
            self.seconds.append(done.seconds)
            if done.wrong_bytes:
                self.bad("wrong_bytes", f"{done.request}: reported good with {done.wrong_bytes} wrong bytes")
            return
        self.causes[done.cause] += 1
        if not may_fail or done.cause == "reported twice":
            self.bad("unexpected", f"{done.request}: {done.cause}: {done.message}")


class Requests:
    """Makes requests of random sizes."""

    def __init__(self, seed: int, most: int = 48) -> None:
        self.random = random.Random(seed)
        self.most = most
        self.count = 0

    def make(self, number: int) -> list[Wanted]:
        """Sizes from 1 to `most` blocks, small ones more often."""
        made = []
        for _ in range(number):
            self.count += 1
            size = max(1, int(self.most ** self.random.random()))
            made.append((f"r{self.count}", self.count, size))
        return made


def start_loads(consumer: RemoteEngine, wanted: list[Wanted], params: dict[str, dict[str, Any] | None]) -> set[str]:
    """Starts to load what was prefilled; the requests whose loads were started."""
    loads = [(name, key, size, found, 0.0) for name, key, size in wanted if (found := params[name]) is not None]
    refused = set(consumer.ask("load", loads))
    return {name for name, *_ in loads} - refused


def hand_over(producer: RemoteEngine, consumer: RemoteEngine, wanted: list[Wanted]) -> set[str]:
    """Prefills and starts to load; the requests whose loads were started."""
    return start_loads(consumer, wanted, dict(producer.ask("prefill", wanted)))


def settle(
    consumer: RemoteEngine, waiting: set[str], tally: Tally, limit_s: float = LONG, may_fail: bool = True
) -> None:
    """Waits for the end of all loads; those that do not end are counted."""
    deadline = time.monotonic() + limit_s
    while waiting and time.monotonic() < deadline:
        for done in consumer.take_done(0.05):
            if done.request in waiting:
                waiting.discard(done.request)
                tally.take(done, may_fail)
            else:
                tally.bad("unexpected", f"{done.request}: an end that nobody waits for ({done.cause})")
    if waiting:
        tally.bad("unreported", f"no report within {limit_s:.0f} s: {sorted(waiting)[:5]}", len(waiting))
        waiting.clear()


def until_good(producer: RemoteEngine, consumer: RemoteEngine, requests: Requests, tally: Tally, fault: str) -> None:
    """Requests, one after the other, until one has arrived."""
    deadline, good = time.monotonic() + LONG, tally.good
    while tally.good == good:
        if time.monotonic() > deadline:
            tally.bad("unexpected", f"no request works within {LONG:.0f} s of {fault}")
            break
        settle(consumer, hand_over(producer, consumer, requests.make(1)), tally)


def wait_unpinned(producer: RemoteEngine, tally: Tally, limit_s: float = UNPINNED_S) -> None:
    """Waits until the producer holds no blocks; counts those that are pinned longer than `limit_s` seconds."""
    start = time.monotonic()
    while held := producer.ask("state")["held"]:
        if (took := time.monotonic() - start) > limit_s:
            tally.bad("pinned_after_lease", f"{held} requests' blocks are still held after {took:.1f} s", held)
            return
        time.sleep(0.05)


KEYS = ("fds", "threads", "peers", "regions", "rss")


def resources(engine: RemoteEngine) -> dict[str, int]:
    """File descriptors, threads, endpoints, registrations and memory of an engine."""
    state = engine.ask("state")
    own = {key: state[key] for key in ("fds", "threads", "rss", "heap")}
    return {**own, **{key: state["agent"][key] for key in ("peers", "regions")}}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """By how much each is above the start's level; memory within 1% counts as level."""
    over = {key: max(0, after[key] - before[key]) for key in KEYS}
    if over["rss"] * 100 <= before["rss"]:
        over["rss"] = 0
    return over


def wait_level(engine: RemoteEngine, before: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Waits until the engine's resources are back at the start's level; its last state and what is still above."""
    deadline = time.monotonic() + LONG
    while True:
        after = resources(engine)
        over = grown(before, after)
        if not any(over.values()) or time.monotonic() > deadline:
            return after, over
        time.sleep(0.5)


class Series:
    """Rounds of a fault on engines that must survive it, over one transport."""

    def __init__(self, options: Options, transport: str, warm: int, most: int = 128) -> None:
        """`warm`: how many rounds come before those that count."""
        self.options, self.transport, self.warm = options, transport, warm
        self.dice = random.Random(options.seed)
        self.requests, self.tally = Requests(options.seed, most), Tally()

    def setup(self, name: str, serves: bool, **more: Any) -> Setup:
        """An engine over this transport."""
        return setup_of(name, serves, self.transport, **more)

    def moment(self) -> None:
        """Waits for a random moment of a burst; in half of all cases an early one."""
        time.sleep(self.dice.uniform(0, 0.008) if self.dice.random() < 0.5 else self.dice.uniform(0, 0.06))

    def burst(self, producer: RemoteEngine, consumer: RemoteEngine) -> set[str]:
        """Starts many loads, and waits for a random moment of them."""
        started = hand_over(producer, consumer, self.requests.make(BURST))
        self.moment()
        return started

    def plain(self, producer: RemoteEngine, consumer: RemoteEngine, number: int = 3) -> None:
        """Requests that must arrive, after whatever went before.

        On a machine so busy that a lease runs out all the same, saying so is right; then others must arrive.
        """
        tally, deadline = self.tally, time.monotonic() + LONG
        wanted = tally.good + number
        while tally.good < wanted:
            if time.monotonic() > deadline:
                tally.bad("unexpected", f"no request works within {LONG:.0f} s of a fault")
                return
            before = tally.causes.total() - tally.causes["lease_expired"]
            settle(consumer, hand_over(producer, consumer, self.requests.make(wanted - tally.good)), tally)
            failed = tally.causes.total() - tally.causes["lease_expired"] - before
            if failed:
                tally.bad(
                    "unexpected", f"{failed} requests failed that nothing disturbed: {dict(tally.causes)}", failed
                )

    def run(
        self,
        survivors: Sequence[RemoteEngine],
        fault: Callable[[int], None],
        at_last: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """The rounds, and what came of them. `fault` gets the number of its round, which is negative before those that
        count. What the survivors hold must be at its level again when `at_last` is over."""
        producers = [engine for engine in survivors if engine.setup.serves]
        before: list[dict[str, int]] = []
        for number in range(-self.warm, self.options.rounds):
            if number == 0:
                self._unpinned(producers)
                before = [resources(engine) for engine in survivors]
            fault(number)
            self.options.progress(number + self.warm + 1, self.options.rounds + self.warm)
        at_last()
        self._unpinned(producers)
        found = [wait_level(engine, start) for engine, start in zip(survivors, before, strict=True)]
        return {
            "zeros": {
                **self.tally.zeros,
                **{f"grown_{key}": sum(over[key] for _, over in found) for key in KEYS},
            },
            "rounds": self.options.rounds,
            "good": self.tally.good,
            "failed_by_cause": dict(sorted(self.tally.causes.items())),
            **self.tally.figures,
            "notes": self.tally.notes,
            "resources": {
                engine.setup.name: {"start": start, "end": end}
                for engine, start, (end, _) in zip(survivors, before, found, strict=True)
            },
        }

    def _unpinned(self, producers: Sequence[RemoteEngine]) -> None:
        for producer in producers:
            wait_unpinned(producer, self.tally)
