"""Stock NIXL with the plug-in: what fails is told with its cause, once, and as text that a terminal can show."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hosts import (
    LARGE,
    SIZE,
    Failed,
    Process,
    acquaint,
    freeze_in_a_read,
    outcome,
    refuse_a_release,
    serve,
)
from nixl_host import GENEROUS

pytestmark = pytest.mark.slow

TRANSFERS = 20


def test_a_forked_process_is_told_that_the_agent_is_not_its_own(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a, Process(edge, plugin) as b:
        freeze_in_a_read(a, b)
        states = a.forked("x")
        assert all("BACKEND" in state or state == "ERR" for state in states), states
        assert a.said("its threads stayed there at the fork", 1) == 1, a.log
        b.child.send_signal(signal.SIGCONT)
        assert a.wait("x") == "DONE"
        np.testing.assert_array_equal(a.contents("cache"), b.contents("cache"))


def test_a_transfer_that_its_owner_cancels_is_no_failure(plugin: Path, edge: str, late: Path) -> None:
    # The release is refused after the transfer's end, so that somebody sees how it ended.
    env = {"KVFERRY_LIBRARY": str(late), "KVFERRY_TEST_LATE_WAIT": "1", "KVFERRY_TEST_LATE_AT_THE_END": "1"}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin) as b:
        refuse_a_release(a, b)
        a.look()
        a.release("x")
    assert not any("a transfer with agent b failed" in line for line in a.log), a.log


def test_many_transfers_that_fail_at_once_are_few_lines(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a, Process(edge, plugin) as b:
        address = acquaint(a, b, LARGE)
        for number in range(TRANSFERS):
            a.make(f"x{number}", "READ", [("cache", 0, LARGE)], [(address, LARGE, 0)], "b")
        b.freeze()
        for number in range(TRANSFERS):
            assert a.post(f"x{number}") == "PROC"
        b.kill()
        assert "REMOTE_DISCONNECT" in outcome(a, "x0")
        # Then NIXL 1.3 knows the peer no longer, and does not ask the plug-in.
        assert "DONE" not in [outcome(a, f"x{number}") for number in range(1, TRANSFERS)]
        a.look()
    # A line in ten seconds.
    assert 1 <= a.said("a transfer with agent b failed", 1) < TRANSFERS, a.log


def look_until_said(host: Process, text: str) -> None:
    """Lets the plug-in see what has happened until its log has `text`."""
    deadline = time.monotonic() + GENEROUS
    while not any(text in line for line in host.log):
        assert time.monotonic() < deadline, host.log
        host.look()


def test_what_others_name_cannot_write_to_a_terminal(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as a, Process(edge, plugin) as b:
        serve(a, "a", 1, SIZE)
        name = "b\n\x1b[2J\x7f\x9bé"
        address = serve(b, name, 2, SIZE)
        assert a.add(b.metadata()) == name
        a.make("x", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], name)
        assert a.run("x") == "DONE"
        b.kill()
        look_until_said(a, "the connection to agent b\\x0a\\x1b[2J\\x7f\\xc2\\x9bé broke")
    assert not any(control in line for line in a.log if "plug-in" in line for control in "\x1b\x7f\x9b"), a.log


def test_a_device_number_that_does_not_fit_is_refused(plugin: Path, edge: str) -> None:
    with Process(edge, plugin) as host:
        serve(host, "a", 1, SIZE)
        with pytest.raises(Failed):
            host.register_device("cache", 1 << 32)
        assert host.said("device 4294967296", 1) == 1, host.log


def test_a_connection_that_is_not_made_again_in_time_is_no_disconnection(plugin: Path, edge: str, late: Path) -> None:
    env = {"KVFERRY_LIBRARY": str(late), "KVFERRY_TEST_LATE_RECONNECT": "1"}
    with Process(edge, plugin, env=env) as a, Process(edge, plugin) as b:
        address = acquaint(a, b, SIZE)
        a.make("x", "READ", [("cache", 0, SIZE)], [(address, SIZE, 0)], "b")
        assert a.run("x") == "DONE"
        b.kill()
        look_until_said(a, "the connection to agent b broke")
        with pytest.raises(Failed, match="BACKEND"):
            a.notify("b", b"anyone there?")
        with pytest.raises(Failed, match="BACKEND"):
            a.post("x")
