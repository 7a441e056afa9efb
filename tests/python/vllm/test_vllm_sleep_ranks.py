"""Sleep mode in engines of several ranks: memory that is unmapped, one rank later than the other, what comes meanwhile,
and what is left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry.vllm import worker as worker_module
from lab.engines.resources import thread_count
from mini_ranks import SECONDS, Engine, ended, hand_over, load, model, over, prefilled
from test_vllm_states import HERE, THERE, Stateful

PLACES = ["same", "another"]
Taken = dict[str, int]


class Late:
    """A point in a device's work that it never comes past."""

    def query(self) -> bool:
        return False


@pytest.fixture(params=[(2, 1), (1, 2), (2, 2)], ids=lambda sizes: f"tp{sizes[0]}-to-tp{sizes[1]}")
def engines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Engine]]:
    path, holds = model(tmp_path), Stateful("GDN_ATTN")
    monkeypatch.setattr(worker_module, "device_recorder", lambda caches: Late)
    p, d = (Engine(name, path, size, monkeypatch, holds=holds) for name, size in zip("pd", request.param, strict=True))
    yield p, d
    d.close()
    p.close()


def settle(p: Engine, d: Engine) -> list[Any]:
    """Runs both until neither scheduler side knows of a request; all outcomes."""
    outcomes: list[Any] = []
    deadline = time.monotonic() + SECONDS
    while (p.scheduler.stats()["sending"], d.scheduler.stats()["receiving"]) != (0, 0):
        assert time.monotonic() < deadline, (p.scheduler.stats(), d.scheduler.stats())
        outcomes += p.step() + d.step()
        time.sleep(0.001)
    return outcomes


def forget(p: Engine, d: Engine, *requests: str) -> list[Any]:
    """Requests of a decode engine end, and what either side keeps of them."""
    for request in requests:
        d.scheduler.finished(request, {"do_remote_prefill": True}, "aborted", HERE, p.holds.tokens)
    return settle(p, d)


def handed_over(p: Engine, d: Engine) -> None:
    """A prompt, every byte of it."""
    d.wipe()
    assert d.wrong(HERE)
    assert hand_over(p, d, THERE, HERE) is None
    forget(p, d, "r")


def taken(*engines: Engine) -> Taken:
    """Threads and open files of this process, and what each rank has registered and is connected with."""
    # Only the decode engine, which comes last, reads.
    found: Taken = {"threads": thread_count(len(engines[-1].sides)), "files": len(os.listdir("/proc/self/fd"))}
    for side in (side for engine in engines for side in engine.sides):
        assert side._worker is not None
        totals: Any = side._worker.stats()["totals"]
        for name in ("registered_bytes", "peers", "endpoints", "leases"):
            found[name] = found.get(name, 0) + totals[name]
    return found


def nothing_more(most: Taken, *engines: Engine) -> None:
    """Waits until no more than `most` is taken. Some threads live for a moment only."""
    deadline = time.monotonic() + SECONDS
    while any(value > most[name] for name, value in taken(*engines).items()):
        assert time.monotonic() < deadline, (most, taken(*engines))
        time.sleep(0.01)


def begun(p: Engine, d: Engine, *names: str) -> tuple[Taken, dict[str, Any]]:
    """After a hand-over: what is taken, and prefills of these requests, which `p` keeps."""
    handed_over(p, d)
    most = taken(p, d)
    asked = {name: prefilled(p, name, THERE) for name in names}
    p.step()
    return most, asked


@pytest.mark.parametrize("mapped", PLACES)
def test_ranks_that_sleep_and_wake_up(engines: tuple[Engine, Engine], mapped: str) -> None:
    p, d = engines
    most: Taken = {}
    for turn in range(3):
        handed_over(p, d)
        for sleeper in (p, d) if turn % 2 else (d, p):
            sleeper.sleep()
            sleeper.wake_up(mapped)
            handed_over(p, d)
        if turn == 0:
            most = taken(p, d)
    nothing_more(most, p, d)


@pytest.mark.parametrize("mapped", PLACES)
def test_loads_from_ranks_that_sleep_one_after_the_other(engines: tuple[Engine, Engine], mapped: str) -> None:
    """All of the engine's prefills are gone with its first rank: none is taken for whole, whenever it is loaded."""
    p, d = engines
    most, asked = begun(p, d, "falling asleep", "asleep", "waking up", "awake")
    for name, params in asked.items():
        d.scheduler.arrived(name, params)
    d.step()
    d.wipe()

    def begins(name: str) -> None:
        load(d, name, asked[name], HERE)
        d.step()

    p.sleep(lambda: begins("falling asleep"))
    begins("asleep")
    p.wake_up(mapped, lambda: begins("waking up"))
    begins("awake")
    failed = {name: over(p, d, name) for name in asked}
    if p.tp_size == 1:
        # The only rank was awake then.
        del failed["falling asleep"]
    assert all(failure is not None for failure in failed.values()), failed
    forget(p, d, *asked)
    handed_over(p, d)
    nothing_more(most, p, d)


@pytest.mark.parametrize("mapped", PLACES)
def test_loads_of_ranks_that_sleep_one_after_the_other(engines: tuple[Engine, Engine], mapped: str) -> None:
    """A load that is under way ends on every rank; what arrives before or meanwhile is loaded when all are awake."""
    p, d = engines
    most, asked = begun(p, d, "under way", "waits", "falling asleep", "waking up")
    for name in ("under way", "waits"):
        d.scheduler.arrived(name, asked[name])
    load(d, "under way", asked["under way"], HERE)
    d.step()

    def arrives(name: str) -> None:
        p.step()
        d.scheduler.arrived(name, asked[name])

    d.sleep(lambda: arrives("falling asleep"))
    p.step()
    d.wake_up(mapped, lambda: arrives("waking up"))
    failed = over(p, d, "under way")
    assert failed is None or "shut_down" in failed, failed
    for name in ("waits", "falling asleep", "waking up"):
        d.wipe()
        assert d.wrong(HERE)
        load(d, name, asked[name], HERE)
        assert ended(p, d, name, HERE) is None
    # What has been cut off is given back too: no lease runs out here.
    forget(p, d, *asked)
    handed_over(p, d)
    nothing_more(most, p, d)


def test_steps_that_still_wait_for_the_device_when_the_engine_falls_asleep(engines: tuple[Engine, Engine]) -> None:
    """They come to the workers, which report all that is in them as over, each once."""
    p, d = engines
    handed_over(p, d)
    # A prefill that is granted, and a load behind another grant: of neither have the workers heard.
    asked = prefilled(p, "unread", THERE)
    assert not p.step(grants=True)
    d.scheduler.arrived("unloaded", asked)
    load(d, "unloaded", asked, HERE)
    assert not d.step(grants=True)
    for engine in (d, p):
        engine.sleep()
    # What comes while they sleep waits.
    later = {**asked, "remote_request_id": "later"}
    d.scheduler.arrived("later", later)
    assert d.scheduler.has_pending()
    outcomes = d.step()
    for engine in (d, p):
        engine.wake_up("another")
    outcomes += d.step()
    # A load that has ended is forgotten when its request has.
    d.scheduler.finished("later", later, "aborted", [[], []], 0)
    outcomes += forget(p, d, "unloaded")
    failed = [failure for outcome in outcomes for failure in outcome["failed_recving"]]
    assert [(failure["request"], failure["cause"]) for failure in failed] == [("unloaded", "shut_down")]
    assert sum("unloaded" in outcome["finished_recving"] for outcome in outcomes) == 1
    assert sum("unread" in outcome["finished_sending"] for outcome in outcomes) == 1
    handed_over(p, d)
