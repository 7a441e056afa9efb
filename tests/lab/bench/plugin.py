"""kvferry's plug-in beside NIXL's UCX backend, through stock NIXL's own API: `scripts/bench-nixl`."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from typing import Any, NamedTuple

from kvferry.bench.engines.engine import cpu_of
from kvferry.bench.remote import Remote

from . import plugin_faults
from .plugin_side import BACKENDS, LAST, LIMIT, Owner, Side, pattern


class Case(NamedTuple):
    """Blocks of one length, read in random order, each time after `pause` seconds without a system call."""

    name: str
    blocks: int
    block: int
    pause: float = 0.0


CASES = (
    Case("2,048 x 16 KiB", 2048, 16 << 10),
    Case("8,192 x 4 KiB", 8192, 4 << 10),
    Case("512 x 64 KiB", 512, 64 << 10),
    Case("32 MiB in one", 1, 32 << 20),
    Case("one 4 KiB", 1, 4 << 10),
    Case("one 4 KiB in 2 ms", 1, 4 << 10, 0.002),
)
UCX_TLS = {"tcp": "tcp,self", "shm": "shm,tcp,self"}


NOTIFICATION = "notification"
SINGLE = ("one 4 KiB", "one 4 KiB in 2 ms", NOTIFICATION)
"""Cases of one small operation, which also run with agents that are polled."""
SINGLE_TIME = 0.05
"""Seconds a round that such operations are repeated for, since a median over a few milliseconds would be chance."""
PING = b"x" * 64
"""A notification that is sent back."""
POLLED = ", polled"
"""Follows a case's name where the agents have no progress thread of NIXL's and both processes poll."""


class Figures(NamedTuple):
    """One round's, in seconds."""

    posted: float
    done: float
    cpu: float


def wait(end: float) -> None:
    """Until then, with this processor."""
    while time.perf_counter() < end:
        pass


class Reader(Side):
    """The side that reads. `owner` is the pid of the other one."""

    def __init__(self, backend: str, version: str, size: int, threads: bool, owner: int) -> None:
        super().__init__("reader", backend, version, size, threads)
        self._pids = (os.getpid(), owner)

    def reads(self, case: Case, rounds: int, remote: int) -> list[Figures]:
        """The case's rounds. The first one is checked, and left out."""
        size = case.blocks * case.block
        order = random.Random(case.name)
        ours, theirs = list(range(case.blocks)), list(range(case.blocks))
        order.shuffle(ours)
        order.shuffle(theirs)
        handle = self.prepare(remote, case.block, ours, theirs)
        found: list[Figures] = []
        end = time.perf_counter() + rounds * SINGLE_TIME
        while len(found) <= rounds or (case.name in SINGLE and time.perf_counter() < end):
            self.memory[:size] = 0
            before = sum(map(cpu_of, self._pids))
            wait(time.perf_counter() + case.pause)
            start = time.perf_counter()
            state = self.agent.transfer(handle)
            posted = time.perf_counter() - start
            while state == "PROC" and time.perf_counter() - start < LIMIT:
                state = self.agent.check_xfer_state(handle)
            done = time.perf_counter() - start
            used = sum(map(cpu_of, self._pids)) - before
            if state != "DONE":
                raise RuntimeError(f"{case.name}: the transfer ended as {state}")
            if not found:
                source = pattern(size).reshape(case.blocks, case.block)
                if not (self.memory[:size].reshape(case.blocks, case.block)[ours] == source[theirs]).all():
                    raise RuntimeError(f"{case.name}: the bytes are wrong")
            found.append(Figures(posted, done, used))
        self.agent.release_xfer_handle(handle)
        return found[1:]

    def notifications(self, rounds: int) -> list[Figures]:
        """Half of the way of a notification of 64 bytes to the owner and back."""
        found: list[Figures] = []
        end = time.perf_counter() + rounds * SINGLE_TIME
        while len(found) < rounds + 5 or time.perf_counter() < end:
            start = time.perf_counter()
            self.agent.send_notif("owner", PING)
            posted = time.perf_counter() - start
            while not self.agent.get_new_notifs():
                if time.perf_counter() - start > LIMIT:
                    raise RuntimeError(f"no answer to a notification within {LIMIT:.0f} s")
            found.append(Figures(posted, (time.perf_counter() - start) / 2, 0.0))
        return found[5:]

    def end_echo(self) -> None:
        """The owner's `echo` returns."""
        self.agent.send_notif("owner", LAST)


def measure(backend: str, version: str, threads: bool, rounds: int, wanted: list[str]) -> dict[str, list[Figures]]:
    """Every case, in processes of its own, so that no other backend's threads run beside it."""
    size = max(case.blocks * case.block for case in CASES)
    found = {}
    with (
        Remote(f"{backend}, owner", Owner, backend, version, size, threads) as owner,
        Remote(f"{backend}, reader", Reader, backend, version, size, threads, owner.pid) as reader,
    ):
        metadata, remote = owner.ask("hello")
        reader.ask("meet", metadata)
        owner.ask("meet", reader.ask("hello")[0])
        asked: dict[str, tuple[Any, ...]] = {case.name: ("reads", case, rounds, remote) for case in CASES}
        for name, question in {**asked, NOTIFICATION: ("notifications", rounds)}.items():
            if not is_wanted(name, threads, wanted):
                continue
            echoes = not threads or name == NOTIFICATION
            if echoes:
                owner.tell("echo")
            found[named(name, threads)] = reader.ask(*question)
            if echoes:
                reader.ask("end_echo")
                owner.answer("echo")
    return found


def named(name: str, threads: bool) -> str:
    """A case's name in the table."""
    return name if threads else name + POLLED


def is_wanted(name: str, threads: bool, wanted: list[str]) -> bool:
    """Whether a case was asked for and runs with such agents."""
    return (threads or name in SINGLE) and (not wanted or any(part in named(name, threads) for part in wanted))


def median(found: dict[str, list[Figures]], backend: str) -> float:
    """Seconds until a backend's transfers were done, p50."""
    return statistics.median(row.done for row in found[backend])


def show(transport: str, name: str, size: int, found: dict[str, list[Figures]], theirs: float) -> None:
    """One line of the table. `theirs` is what the ratio is against: UCX's better way to run."""
    cells = []
    for backend in BACKENDS:
        posted, done, used = (statistics.median(column) for column in zip(*found[backend], strict=True))
        per_gb = f"{used / (size / 1e9):7.2f}" if size >= 1 << 20 else "      -"
        cells.append(f"{posted * 1e6:9.0f} {done * 1e6:9.0f} {per_gb}")
    ratio = median(found, "KVFERRY") / theirs
    print(f"{transport:4} {name:25} | {cells[0]} | {cells[1]} | {ratio:5.2f}", flush=True)


def main(arguments: list[str]) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="scripts/bench-nixl")
    parser.add_argument("--version", default="1.5.1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transport", action="append", choices=sorted(UCX_TLS))
    parser.add_argument("--case", action="append", default=[], help="a part of a case's name, such as notification")
    parser.add_argument("--faults", action="store_true", help="instead: what happens when a peer dies or is frozen")
    options = parser.parse_args(arguments)
    if options.faults:
        for transport in options.transport or ("tcp", "shm"):
            os.environ["KVFERRY_TRANSPORT"], os.environ["UCX_TLS"] = transport, UCX_TLS[transport]
            plugin_faults.show(options.version, transport)
        return
    print(f"{'':31}|       KVFERRY, us           |           UCX, us           |")
    print(f"{'':31}|  transfer      done CPU s/GB|  transfer      done CPU s/GB| ratio")
    sizes = {**{case.name: case.blocks * case.block for case in CASES}, NOTIFICATION: 64}
    modes = [threads for threads in (True, False) if any(is_wanted(name, threads, options.case) for name in sizes)]
    for transport in options.transport or ("tcp", "shm"):
        os.environ["KVFERRY_TRANSPORT"], os.environ["UCX_TLS"] = transport, UCX_TLS[transport]
        found: dict[str, dict[str, list[Figures]]] = {}
        for backend, threads in list(itertools.product(BACKENDS, modes)) * options.repeats:
            for name, figures in measure(backend, options.version, threads, options.rounds, options.case).items():
                found.setdefault(name, {}).setdefault(backend, []).extend(figures)
        for name, size in sizes.items():
            rows = {row: found[row] for row in (name, name + POLLED) if row in found}
            for row, both in rows.items():
                show(transport, row, size, both, min(median(other, "UCX") for other in rows.values()))
