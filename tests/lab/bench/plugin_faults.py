"""What each backend does when its peer is killed, frozen or restarted. Nothing is judged: the table says what happened.

Every fault has processes of its own: a backend may crash or hang.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

from kvferry.bench.errors import BenchError
from kvferry.bench.remote import Remote

from .plugin_side import BACKENDS, LIMIT, Owner, Side, pattern

SIZE = 256 << 20
"""Takes long enough to be in flight when the signal is sent."""
SMALL = 1 << 20
FROZEN_S = 10.0
ANSWER_S = 2 * LIMIT + FROZEN_S


class Reader(Side):
    """The process that reads."""

    def __init__(self, backend: str, version: str) -> None:
        super().__init__("reader", backend, version, SIZE, True)
        self.state = ""

    def post(self, size: int, remote: int) -> None:
        """Begins a read."""
        self.memory[:] = 0
        self.handle = self.prepare(remote, size, [0], [0])
        self.state = self.agent.transfer(self.handle)

    def wait(self, limit_s: float) -> tuple[str, str]:
        """Polls the read until it ends: its state, and what to say of it."""
        begin = time.monotonic()
        while self.state == "PROC" and time.monotonic() - begin < limit_s:
            try:
                self.state = self.agent.check_xfer_state(self.handle)
            except Exception as error:
                self.state = type(error).__name__
            time.sleep(0.001)
        return self.state, f"{self.state} after {time.monotonic() - begin:.1f} s"

    def bytes_of(self, size: int) -> str:
        """What to say of the bytes that were read."""
        return "bytes right" if (self.memory[:size] == pattern(SIZE)[:size]).all() else "BYTES WRONG"

    def read(self, size: int, remote: int) -> str:
        """A read from its beginning to its end. What to say of it."""
        self.post(size, remote)
        state, said = self.wait(LIMIT)
        return f"{said}, {self.bytes_of(size)}" if state == "DONE" else said

    def remove(self) -> None:
        """Forgets the owner."""
        self.agent.remove_remote_agent("owner")


class Pair:
    """A reader, and the owner that it reads from."""

    def __init__(self, stack: ExitStack, backend: str, version: str) -> None:
        self._stack, self._owner = stack, (backend, version, SIZE)
        self.reader = self._start("reader", Reader, backend, version)
        self.start()

    def _start(self, name: str, *arguments: object) -> Remote:
        made = Remote(name, *arguments, answer_s=lambda: ANSWER_S)  # type: ignore[arg-type]
        return self._stack.enter_context(made)

    def start(self) -> None:
        """A new owner, which the reader gets to know."""
        self.owner = self._start("owner", Owner, *self._owner)
        metadata, self.remote = self.owner.ask("hello")
        self.reader.ask("meet", metadata)
        self.owner.ask("meet", self.reader.ask("hello")[0])

    def kill(self) -> None:
        """The owner is gone."""
        os.kill(self.owner.pid, signal.SIGKILL)

    def read(self, size: int) -> str:
        """As the reader's."""
        return str(self.reader.ask("read", size, self.remote))


def killed(pair: Pair) -> str:
    """The owner is killed while it is read from."""
    pair.reader.ask("post", SIZE, pair.remote)
    pair.kill()
    return str(pair.reader.ask("wait", LIMIT)[1])


def frozen(pair: Pair) -> str:
    """The owner is stopped while it is read from, and continues."""
    pair.reader.ask("post", SIZE, pair.remote)
    pair.owner.pause()
    state, said = pair.reader.ask("wait", FROZEN_S)
    pair.owner.resume()
    if state == "PROC":
        state, more = pair.reader.ask("wait", LIMIT)
        said += f"; continued: {more}"
    if state == "DONE":
        said += f", {pair.reader.ask('bytes_of', SIZE)}"
    return f"{said}; next read: {pair.read(SMALL)}"


def removed(pair: Pair) -> str:
    """The owner is killed, and another one takes its name after the first was removed."""
    pair.kill()
    pair.reader.ask("remove")
    pair.start()
    return f"next read: {pair.read(SMALL)}"


def added(pair: Pair) -> str:
    """The owner is killed, and another one takes its name."""
    pair.kill()
    pair.start()
    return f"next read: {pair.read(SMALL)}"


FAULTS = {
    "killed in a transfer": killed,
    "frozen in a transfer": frozen,
    "restarted, removed": removed,
    "restarted, added": added,
}


def observe(version: str, backend: str, name: str) -> str:
    """What happened."""
    try:
        with ExitStack() as stack:
            pair = Pair(stack, backend, version)
            first = pair.read(SMALL)
            return FAULTS[name](pair) if first.startswith("DONE") else f"the first read: {first}"
    except BenchError as error:
        return str(error).strip().splitlines()[-1][:120]


def show(version: str, transport: str) -> None:
    """The table's lines for one transport."""
    for name in FAULTS:
        for backend in BACKENDS:
            print(f"{transport:4} | {name:20} | {backend:7} | {observe(version, backend, name)}", flush=True)
