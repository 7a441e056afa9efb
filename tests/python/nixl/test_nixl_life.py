"""Stock NIXL with the plug-in: memory registered twice, peers loaded anew, and what does not end in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hosts import (
    ENOUGH,
    LARGE,
    SIZE,
    Failed,
    Process,
    acquaint,
    freeze_in_a_read,
    outcome,
    read,
    refuse_a_release,
    serve,
)
from nixl_host import GENEROUS, digest, pattern

pytestmark = pytest.mark.slow

MAX_NOTIFICATIONS = 65_536
NOT_FOUND = -2


def test_memory_that_is_registered_twice_is_one_region(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a, Process(edge, plugin) as b:
        address = acquaint(a, b, SIZE)
        b.register("again", [("cache", 0, SIZE)])
        assert a.add(b.metadata()) == "b"
        read(a, address)
        b.deregister("cache")
        read(a, address)
        # All of it deregistered, and registered anew: a region of its own.
        b.deregister("again")
        b.register("cache", [("cache", 0, SIZE)])
        with pytest.raises(Failed, match="NOT_ALLOWED"):
            a.add(b.metadata())
        if edge.startswith("1.5"):
            a.remove("b")
        assert a.add(b.metadata()) == "b"
        read(a, address)


def test_settings_of_ucx_are_given_as_json(plugin: Path, edge: str) -> None:
    env = {"KVFERRY_TRANSPORT": "auto", "KVFERRY_LOG": "info"}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        with pytest.raises(Failed, match="NIXL_ERR_BACKEND"):
            a.start("a", ["KVFERRY"], {"ucx": '{"TLS": tcp}'})
        assert a.said("its JSON as a text, which is damaged", 1) == 1, a.log
        for host, name, seed in ((a, "a", 1), (b, "b", 2)):
            assert host.start(name, ["KVFERRY"], {"ucx": '{"TLS": "tcp"}'}) == ["KVFERRY"]
            address = int(host.buffer("cache", seed, SIZE))
            host.register("cache", [("cache", 0, SIZE)])
        a.add(b.metadata())
        read(a, address)
        # No copies by CMA, which `auto` takes on one host.
        assert a.said("connected to agent b", 1) == 1, a.log
        assert not any("cma/" in line for line in a.log), a.log


def test_a_read_in_flight_outlasts_a_peer_that_is_loaded_anew(plugin: Path, edge: str) -> None:
    # Where each operation needs what is known of the region.
    env = {"KVFERRY_TRANSPORT": "shm"}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        address = acquaint(a, b, LARGE)
        b.buffer("other", 3, SIZE)
        b.register("other", [("other", 0, SIZE)])
        # Not of the region that is read.
        metadata = b.partial("other", True)
        a.make("x", "READ", [("cache", 0, LARGE)], [(address, LARGE, 0)], "b", b"read")
        # Until one post returns before the read's end.
        posts = 1
        while a.post("x", b"read") != "PROC":
            posts += 1
        a.remove("b")
        a.add(metadata)
        # NIXL 1.5 does not look at a transfer with a peer that was removed. The notification follows its last byte.
        assert b.notified(posts) == [("a", b"read")] * posts
        assert a.digest("cache") == b.digest("cache") == digest(pattern(2, LARGE))


def test_a_region_that_is_unloaded_cannot_be_read_until_it_is_loaded_again(
    plugin: Path, edge: str, late: Path, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    env = {"KVFERRY_LIBRARY": str(late), "KVFERRY_TEST_REMOVED": str(told)}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin) as b:
        address = acquaint(a, b, SIZE)
        b.buffer("other", 3, SIZE)
        b.register("other", [("other", 0, SIZE)])
        unread = []
        for key, region in (("cache", 0), ("other", 1), ("cache", 0)):
            assert a.add(b.partial(key, True)) == "b"
            if key == "cache":
                read(a, address)
            a.remove("b")
            unread.append(f"{region} {NOT_FOUND}")
            assert told.read_text().splitlines() == unread, a.log
        a.add(b.metadata())
        read(a, address)


def test_a_read_from_a_frozen_peer_goes_on_when_the_peer_does(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a, Process(edge, plugin) as b:
        freeze_in_a_read(a, b)
        b.child.send_signal(signal.SIGCONT)
        assert a.wait("x") == "DONE"
        np.testing.assert_array_equal(a.contents("cache"), pattern(2, ENOUGH))


def test_a_peer_that_is_killed_in_a_read_is_an_error(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a, Process(edge, plugin) as b:
        freeze_in_a_read(a, b)
        b.kill()
        assert "REMOTE_DISCONNECT" in outcome(a, "x")


def test_a_peer_that_is_killed_while_its_memory_is_copied(plugin: Path, edge: str) -> None:
    env = {"KVFERRY_TRANSPORT": "shm"}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        address = acquaint(a, b, LARGE)
        a.make("first", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b")
        assert a.run("first") == "DONE"
        a.make("x", "READ", [("cache", 0, LARGE)], [(address, LARGE, 0)], "b")
        assert a.post("x") in ("PROC", "DONE")
        b.kill()
        # The copy does not wait for the peer and may have ended before. Either way it ends, and what is done is right.
        ended = outcome(a, "x")
        assert ended == "DONE" or "REMOTE_DISCONNECT" in ended
        if ended == "DONE":
            assert a.digest("cache") == digest(pattern(2, LARGE))


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_a_dead_peer_costs_no_descriptors(plugin: Path, edge: str, transport: str) -> None:
    env = {"KVFERRY_TRANSPORT": transport}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin, env=env) as b:
        serve(a, "a", 1, SIZE)
        without = a.sockets()
        address = serve(b, "b", 2, SIZE)
        a.add(b.metadata())
        read(a, address)
        a.make("x", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b")
        b.kill()
        for _ in range(20):
            # NIXL 1.3 and 1.4 forget the peer at the first.
            with pytest.raises(Failed, match=r"REMOTE_DISCONNECT|NOT_FOUND"):
                a.run("x")
            with pytest.raises(Failed, match=r"REMOTE_DISCONNECT|NOT_FOUND"):
                a.notify("b", b"x")
        assert settled(a.sockets, without) == without, a.log


def settled(measure: Callable[[], int], expected: int) -> int:
    """What is measured, as soon as it is what is expected."""
    deadline = time.monotonic() + GENEROUS
    while (seen := measure()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize(
    ("waits", "said", "times"),
    [
        ("3", "releasing a transfer with agent b", 3),
        ("4", "giving up releasing a transfer with agent b: its memory must stay allocated", 1),
    ],
    ids=["waits", "is-given-up"],
)
def test_a_release_that_was_refused(plugin: Path, edge: str, late: Path, waits: str, said: str, times: int) -> None:
    """The second release waits, and gives up a transfer that never ends."""
    env = {"KVFERRY_LIBRARY": str(late), "KVFERRY_TEST_LATE_WAIT": waits}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin) as b:
        address = refuse_a_release(a, b)
        # NIXL does not look at what this one returns.
        a.release("x")
        assert a.said(said, times) == times, a.log
        # Its end is still taken, and what comes after it works.
        a.make("x", "READ", [("cache", 0, LARGE)], [(address, LARGE, 0)], "b")
        assert a.run("x") == "DONE"
        assert a.digest("cache") == digest(pattern(2, LARGE))


def test_a_deregistration_that_is_late_is_tried_again(plugin: Path, edge: str, late: Path) -> None:
    env = {"KVFERRY_LIBRARY": str(late), "KVFERRY_TEST_LATE_DEREGISTER": "2"}
    with Process(edge, plugin, env=env) as a:
        serve(a, "a", 1, SIZE)
        a.deregister("cache")
        assert a.said("deregistering memory, which is tried again", 2) == 2, a.log


@pytest.mark.parametrize("late_shutdowns", [0, 1])
def test_an_agent_that_ends_too_late_is_not_freed(
    plugin: Path, edge: str, late: Path, tmp_path: Path, late_shutdowns: int
) -> None:
    freed = tmp_path / "freed"
    env = {"KVFERRY_TEST_LATE_SHUTDOWN": str(late_shutdowns), "KVFERRY_TEST_FREED": str(freed)}
    with Process(edge, plugin, env={"KVFERRY_LIBRARY": str(late), **env}) as a:
        serve(a, "a", 1, SIZE)
        a.end()
        said = "memory that was registered with it must stay allocated"
        assert (a.said(said, late_shutdowns), freed.exists()) == (late_shutdowns, not late_shutdowns), a.log


def test_a_deregistration_that_never_ends_is_given_up(plugin: Path, edge: str, late: Path) -> None:
    env = {"KVFERRY_LIBRARY": str(late), "KVFERRY_TEST_LATE_DEREGISTER": "1000"}
    with Process(edge, plugin, env=env) as a:
        serve(a, "a", 1, SIZE)
        a.deregister("cache")
        assert a.said("giving up deregistering memory", 1) == 1, a.log
        assert a.said("It stays registered, and must stay allocated", 1) == 1, a.log
        # NIXL's lock is free: the agent goes on.
        a.buffer("other", 2, SIZE)
        a.register("other", [("other", 0, SIZE)])


def test_notifications_that_nobody_takes_are_bounded(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a:
        serve(a, "a", 1, SIZE)
        assert a.notify_many("a", b"m", MAX_NOTIFICATIONS + 10) == 10
        assert a.said("a notification of agent a was dropped", 1) == 1, a.log
        assert a.notified(MAX_NOTIFICATIONS) == [("a", b"m")] * MAX_NOTIFICATIONS
        a.notify("a", b"again")
        assert a.notified(1) == [("a", b"again")]
