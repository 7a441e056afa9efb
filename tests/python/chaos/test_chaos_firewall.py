"""The series `firewall` must fail when the open engine's reads wait for the other one, however they end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from lab.engines.engine import Done, Setup
from lab.faults import firewall, series
from lab.faults.series import Options
from lab.network import Host

READ_S = 0.005


class World:
    """Three engines and a network in simulated time. Nothing but the fields changes what happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.shut = False
        # For how long the consumer's progress thread stands still after the first load from behind the firewall.
        self.freeze_s = 0.0
        # For how long the consumer's process does so in the same moment.
        self.blocked_s = 0.0
        # How reads from the open engine end while the firewall is shut.
        self.cause: str | None = None
        self.leases_s: dict[str, float] = {}
        self.frozen_until = 0.0
        self.ends: list[tuple[float, Done]] = []

    def begin(self, request: str, producer: str) -> None:
        """A load, and how it will end. A producer that hears nothing for a lease gives the blocks up."""
        if producer == "shut" and self.shut:
            if not any(done.cause for _, done in self.ends):
                self.frozen_until = self.now + self.freeze_s
                self.now += self.blocked_s
            self.ends.append((self.now + firewall.HANDSHAKE_MS / 1000, Done(request, "handshake_failed", 0, 3.0)))
            return
        end = max(self.now + READ_S, self.frozen_until)
        cause = self.cause if self.shut else None
        if end - self.now > self.leases_s[producer]:
            cause = "lease_expired"
        self.ends.append((end, Done(request, cause, 0, end - self.now)))

    def take(self, timeout: float) -> list[Done]:
        """What ends by then. It comes one by one."""
        due = min(self.ends, key=lambda entry: entry[0], default=None)
        if due is None or due[0] > self.now + timeout:
            self.now += timeout
            return []
        self.now = max(self.now, due[0])
        self.ends.remove(due)
        return [due[1]]


class FakeChild:
    """An engine of the world."""

    def __init__(self, world: World, setup: Setup) -> None:
        self.world, self.setup = world, setup
        world.leases_s[setup.name] = setup.lease_ms / 1000

    def ask(self, name: str, *arguments: Any) -> Any:
        self.world.now += 0.001
        if name == "prefill":
            return [(request, {"producer": self.setup.name}) for request, _, _ in arguments[0]]
        if name == "load":
            for request, _, _, params, _ in arguments[0]:
                self.world.begin(request, params["producer"])
            return []
        level = {"rss": 1, "heap": 1, "fds": 1, "threads": 1, "agent": {"peers": 1, "regions": 1}}
        return {**level, "held": 0}

    def take_done(self, timeout: float = 0.0) -> list[Done]:
        return self.world.take(timeout)

    def wait_up(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    def sleep(seconds: float) -> None:
        made.now += seconds

    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=sleep)

    @contextlib.contextmanager
    def network(hosts: Mapping[str, Sequence[str]]) -> Iterator[Any]:
        found = {name: Host(addresses[0], (), "eth0", name) for name, addresses in hosts.items()}
        yield SimpleNamespace(
            hosts=found,
            decode=found["decode"],
            swallow=lambda *_: set_shut(True),
            deliver=lambda *_: set_shut(False),
        )

    def set_shut(shut: bool) -> None:
        made.shut = shut

    monkeypatch.setattr(series, "time", clock)
    monkeypatch.setattr(firewall, "time", clock)
    monkeypatch.setattr(firewall, "Network", network)
    monkeypatch.setattr(firewall, "RemoteEngine", lambda setup: FakeChild(made, setup))
    return made


def run() -> dict[str, Any]:
    return firewall.firewall(Options("firewall tcp", rounds=2, seed=1), "tcp")


def test_reads_that_are_good_and_quick_pass(world: World) -> None:
    result = run()
    assert not any(result["zeros"].values()), result
    assert result["good_meanwhile"] > 100
    assert result["loads_behind_it"] == 4 * firewall.BURST


@pytest.mark.parametrize("freeze_s", [1.6, 3.0, 9.0])
def test_a_frozen_progress_thread_is_counted(world: World, freeze_s: float) -> None:
    world.freeze_s = freeze_s
    result = run()
    assert result["zeros"]["frozen_reads"] > 0, result
    assert result["slowest_meanwhile_ms"] == pytest.approx(freeze_s * 1000, rel=0.1)


def test_an_engine_that_stands_still_before_its_reads_begin_is_counted(world: World) -> None:
    world.blocked_s = 3.0
    result = run()
    assert result["zeros"]["frozen_reads"] > 0, result


@pytest.mark.parametrize("cause", ["lease_expired", "timeout", "transport_error", "peer_died"])
def test_no_read_from_the_open_engine_may_fail(world: World, cause: str) -> None:
    world.cause = cause
    result = run()
    assert result["zeros"]["unexpected"] > 0, result
