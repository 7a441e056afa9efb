"""Runs the cases and prints the table. `scripts/bench-nixl --help` tells the options."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from . import faults
from .side import BACKENDS, Side, pattern, spawn

LIMIT = 60.0
"""Seconds that a transfer may take."""


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
PING, LAST = b"x" * 64, b"y" * 64
"""Notifications: one that is sent back, and one after which there are no more."""
POLLED = ", polled"
"""Follows a case's name where the agents have no progress thread of NIXL's and both processes poll."""


class Reader(NamedTuple):
    """The side that reads, with the pipe to the owner and where the owner's memory is."""

    side: Side
    pipe: Connection
    remote: int

    def ask(self, question: object) -> float:
        """What the owner answers."""
        self.pipe.send(question)
        return float(self.pipe.recv())


class Figures(NamedTuple):
    """One round's, in seconds."""

    posted: float
    done: float
    cpu: float


def cpu() -> float:
    """Seconds of processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def wait(end: float) -> None:
    """Until then, with this processor."""
    while time.perf_counter() < end:
        pass


def processor_time(reader: Reader, case: Case) -> float:
    """Seconds that both processes have used. Not for single operations: asking through the pipe before each one wakes
    threads, and the operation would start with cold caches."""
    return 0.0 if case.name in SINGLE else cpu() + reader.ask("cpu")


def reads(reader: Reader, case: Case, rounds: int) -> list[Figures]:
    """The case's rounds. The first one is checked, and left out."""
    side, size = reader.side, case.blocks * case.block
    order = random.Random(case.name)
    ours, theirs = list(range(case.blocks)), list(range(case.blocks))
    order.shuffle(ours)
    order.shuffle(theirs)
    handle = side.prepare(reader.remote, case.block, ours, theirs)
    found: list[Figures] = []
    end = time.perf_counter() + rounds * SINGLE_TIME
    while len(found) <= rounds or (case.name in SINGLE and time.perf_counter() < end):
        side.memory[:size] = 0
        before = processor_time(reader, case)
        wait(time.perf_counter() + case.pause)
        start = time.perf_counter()
        state = side.agent.transfer(handle)
        posted = time.perf_counter() - start
        while state == "PROC" and time.perf_counter() - start < LIMIT:
            state = side.agent.check_xfer_state(handle)
        done = time.perf_counter() - start
        used = processor_time(reader, case) - before
        if state != "DONE":
            raise RuntimeError(f"{case.name}: the transfer ended as {state}")
        if not found:
            source = pattern(size).reshape(case.blocks, case.block)
            if not (side.memory[:size].reshape(case.blocks, case.block)[ours] == source[theirs]).all():
                raise RuntimeError(f"{case.name}: the bytes are wrong")
        found.append(Figures(posted, done, used))
    side.agent.release_xfer_handle(handle)
    return found[1:]


def notifications(reader: Reader, rounds: int) -> list[Figures]:
    """Half of the way of a notification of 64 bytes to the owner and back."""
    found: list[Figures] = []
    reader.pipe.send("echo")
    end = time.perf_counter() + rounds * SINGLE_TIME
    while len(found) < rounds + 5 or time.perf_counter() < end:
        start = time.perf_counter()
        reader.side.agent.send_notif("owner", PING)
        posted = time.perf_counter() - start
        while not reader.side.agent.get_new_notifs():
            if time.perf_counter() - start > LIMIT:
                raise RuntimeError(f"no answer to a notification within {LIMIT:.0f} s")
        done = (time.perf_counter() - start) / 2
        found.append(Figures(posted, done, 0.0))
    reader.side.agent.send_notif("owner", LAST)
    reader.pipe.recv()
    return found[5:]


def read(pipe: Connection, backend: str, version: str, threads: bool, rounds: int, wanted: list[str]) -> None:
    """The process that reads: every case, in processes of its own, so that no other backend's threads run beside it."""
    largest = max(case.blocks * case.block for case in CASES)
    theirs, child = spawn("--owner", backend, version, str(largest), str(int(threads)))
    metadata, remote = theirs.recv()
    side = Side("reader", backend, version, largest, threads)
    side.agent.add_remote_agent(metadata)
    reader = Reader(side, theirs, remote)
    reader.ask(side.metadata())
    found = {}
    for case in CASES:
        if is_wanted(case.name, threads, wanted):
            found[named(case.name, threads)] = reads(reader, case, rounds)
    if is_wanted(NOTIFICATION, threads, wanted):
        found[named(NOTIFICATION, threads)] = notifications(reader, rounds)
    pipe.send(found)
    theirs.send(None)
    child.wait()


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


def asked(pipe: Connection, side: Side, threads: bool) -> object:
    """The next question. Until it comes, an agent without a progress thread is polled."""
    while not threads and not pipe.poll():
        # Asking the pipe is a system call; one in 32 polls keeps it out of what is measured.
        for _ in range(32):
            side.agent.update_notifs()
    return pipe.recv()


def notification(side: Side) -> bytes:
    """The next notification from the reader."""
    end = time.perf_counter() + LIMIT
    # asked() may have taken it from NIXL already.
    while not side.agent.update_notifs():
        if time.perf_counter() > end:
            raise RuntimeError(f"no notification within {LIMIT:.0f} s")
    message = bytes(side.agent.notifs["reader"][0])
    side.agent.notifs.clear()
    return message


def owner(pipe: Connection, backend: str, version: str, size: int, threads: bool) -> None:
    """The process that is read from."""
    side = Side("owner", backend, version, size, threads)
    side.memory[:] = pattern(size)
    pipe.send((side.metadata(), side.address))
    while (question := asked(pipe, side, threads)) is not None:
        if question == "cpu":
            pipe.send(cpu())
        elif question == "echo":
            while (message := notification(side)) != LAST:
                side.agent.send_notif("reader", message)
            pipe.send(0.0)
        else:
            side.agent.add_remote_agent(question)
            pipe.send(0.0)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="scripts/bench-nixl")
    parser.add_argument("--version", default="1.5.1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transport", action="append", choices=sorted(UCX_TLS))
    parser.add_argument("--case", action="append", default=[], help="a part of a case's name, such as notification")
    parser.add_argument("--faults", action="store_true", help="instead: what happens when a peer dies or is frozen")
    options = parser.parse_args()
    if options.faults:
        for transport in options.transport or ("tcp", "shm"):
            os.environ["KVFERRY_TRANSPORT"], os.environ["UCX_TLS"] = transport, UCX_TLS[transport]
            faults.show(options.version, transport)
        return
    print(f"{'':31}|       KVFERRY, us           |           UCX, us           |")
    print(f"{'':31}|  transfer      done CPU s/GB|  transfer      done CPU s/GB| ratio")
    sizes = {**{case.name: case.blocks * case.block for case in CASES}, NOTIFICATION: 64}
    modes = [threads for threads in (True, False) if any(is_wanted(name, threads, options.case) for name in sizes)]
    for transport in options.transport or ("tcp", "shm"):
        os.environ["KVFERRY_TRANSPORT"], os.environ["UCX_TLS"] = transport, UCX_TLS[transport]
        found: dict[str, dict[str, list[Figures]]] = {}
        for backend, threads in list(itertools.product(BACKENDS, modes)) * options.repeats:
            arguments = [backend, options.version, str(int(threads)), str(options.rounds)]
            pipe, child = spawn("--reader", *arguments, *options.case)
            for name, figures in pipe.recv().items():
                found.setdefault(name, {}).setdefault(backend, []).extend(figures)
            child.wait()
        for name, size in sizes.items():
            rows = {row: found[row] for row in (name, name + POLLED) if row in found}
            for row, both in rows.items():
                show(transport, row, size, both, min(median(other, "UCX") for other in rows.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--owner"]:
        owner(Connection(int(sys.argv[2])), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6] == "1")
    elif sys.argv[1:2] == ["--reader"]:
        threads, rounds = sys.argv[5] == "1", int(sys.argv[6])
        read(Connection(int(sys.argv[2])), sys.argv[3], sys.argv[4], threads, rounds, sys.argv[7:])
    elif sys.argv[1:2] == ["--fault"]:
        faults.fault(Connection(int(sys.argv[2])), *sys.argv[3:6])
    else:
        main()
