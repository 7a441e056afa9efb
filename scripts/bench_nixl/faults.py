"""What each backend does when its peer is killed, frozen or restarted. Nothing is judged: the table says what happened.

Every fault has a reading process of its own, which is ended when it does not answer: a backend may crash or hang.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing.connection import Connection

from .side import BACKENDS, Side, pattern, spawn

SIZE = 256 << 20
"""Takes long enough to be in flight when the signal is sent."""
SMALL = 1 << 20
FROZEN_S = 10.0
LIMIT = 60.0
"""Seconds that a transfer may take to end."""
ANSWER_S = 2 * LIMIT + FROZEN_S
FAULTS = ("killed in a transfer", "frozen in a transfer", "restarted, removed", "restarted, added")


class Reader:
    """A reading agent and the owner it reads from."""

    def __init__(self, backend: str, version: str) -> None:
        self.backend, self.version = backend, version
        self.side = Side("reader", backend, version, SIZE, True)
        self.owner: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """A new owner, which this side gets to know."""
        self.pipe, self.owner = spawn("--owner", self.backend, self.version, str(SIZE), "1")
        metadata, self.remote = self.pipe.recv()
        self.side.agent.add_remote_agent(metadata)
        self.pipe.send(self.side.metadata())
        self.pipe.recv()

    def post(self, size: int) -> None:
        """Begins a read."""
        self.side.memory[:] = 0
        self.handle = self.side.prepare(self.remote, size, [0], [0])
        self.begin = time.monotonic()
        self.state = self.side.agent.transfer(self.handle)

    def wait(self, limit_s: float) -> str:
        """Polls the read until it ends. What to say of it."""
        begin = time.monotonic()
        while self.state == "PROC" and time.monotonic() - begin < limit_s:
            try:
                self.state = self.side.agent.check_xfer_state(self.handle)
            except Exception as error:
                self.state = type(error).__name__
            time.sleep(0.001)
        return f"{self.state} after {time.monotonic() - begin:.1f} s"

    def bytes_of(self, size: int) -> str:
        """What to say of the bytes that were read."""
        return "bytes right" if (self.side.memory[:size] == pattern(SIZE)[:size]).all() else "BYTES WRONG"

    def read(self, size: int) -> str:
        """A read from its beginning to its end. What to say of it."""
        self.post(size)
        said = self.wait(LIMIT)
        return f"{said}, {self.bytes_of(size)}" if self.state == "DONE" else said


def fault(pipe: Connection, backend: str, version: str, name: str) -> None:
    """The process that reads, for one fault."""
    reader = Reader(backend, version)
    first = reader.read(SMALL)
    if not first.startswith("DONE"):
        pipe.send(f"the first read: {first}")
        os._exit(1)
    try:
        pipe.send(FAULT[name](reader))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error)[:120]}")
    reader.owner.kill()
    reader.owner.wait()
    # What a backend does on its way out is not asked.
    os._exit(0)


def killed(reader: Reader) -> str:
    """The owner is killed while it is read from."""
    reader.post(SIZE)
    reader.owner.kill()
    return reader.wait(LIMIT)


def frozen(reader: Reader) -> str:
    """The owner is stopped while it is read from, and continues."""
    reader.post(SIZE)
    reader.owner.send_signal(signal.SIGSTOP)
    meanwhile = reader.wait(FROZEN_S)
    reader.owner.send_signal(signal.SIGCONT)
    if reader.state == "PROC":
        meanwhile += f"; continued: {reader.wait(LIMIT)}"
    if reader.state == "DONE":
        meanwhile += f", {reader.bytes_of(SIZE)}"
    return f"{meanwhile}; next read: {reader.read(SMALL)}"


def removed(reader: Reader) -> str:
    """The owner is killed, and another one takes its name after the first was removed."""
    reader.owner.kill()
    reader.owner.wait()
    reader.side.agent.remove_remote_agent("owner")
    return added(reader)


def added(reader: Reader) -> str:
    """The owner is killed, and another one takes its name."""
    reader.owner.kill()
    reader.owner.wait()
    reader.start()
    return f"next read: {reader.read(SMALL)}"


FAULT = dict(zip(FAULTS, (killed, frozen, removed, added), strict=True))


def observe(version: str, backend: str, name: str) -> str:
    """What happened."""
    pipe, child = spawn("--fault", backend, version, name, session=True)
    try:
        if not pipe.poll(ANSWER_S):
            return f"no answer within {ANSWER_S:.0f} s"
        return str(pipe.recv())
    except EOFError:
        return f"the reading process ended with {child.wait()}"
    finally:
        try:
            # The owner too, which may be stopped.
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()


def show(version: str, transport: str) -> None:
    """The table's lines for one transport."""
    for name in FAULTS:
        for backend in BACKENDS:
            print(f"{transport:4} | {name:20} | {backend:7} | {observe(version, backend, name)}", flush=True)
