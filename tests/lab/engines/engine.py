"""One engine of one rank as a process of its own: worker, scheduler side, and the steps between them.

It is told what to do over a pipe and answers over the same. A producer overwrites blocks the moment that they come
free, as another request's prefill would: what is read too late is wrong. A consumer checks every byte of what it is
told has arrived.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvferry import Scheduler, Worker, decode_report
from kvferry.scheduler import Outcome

from lab.engines import chunked as under_way
from lab.engines.cache import TOKENS, Cache
from lab.network import enter

TRANSPORTS = {name: {"transport": "auto", "ucx": {"TLS": f"{name},self"}} for name in ("rc", "ud")}
"""Settings for transports that kvferry has no name of its own for."""


@dataclass(frozen=True)
class Setup:
    """How an engine is started."""

    name: str
    serves: bool
    transport: str = "tcp"
    blocks: int = 512
    block_bytes: int = 8192
    lease_ms: int = 1000
    host: str = "127.0.0.1"
    # The network namespace to live in.
    netns: str | None = None
    # The key's file; empty for no key, None to inherit this program's environment.
    key_file: str | None = None
    worker: dict[str, object] = field(default_factory=dict)
    # Of prompts that are computed in parts, see `UnderWay`.
    silent: bool = False
    aborts: int = 0


@dataclass
class Done:
    """How a load ended. `cause` is None where it is reported good."""

    request: str
    cause: str | None
    wrong_bytes: int
    seconds: float
    message: str = ""


@dataclass
class _Held:
    key: int
    blocks: list[int]
    since: float
    params: dict[str, Any] = field(default_factory=dict)


def resident_bytes() -> int:
    """This process's resident memory, after the allocator has given back what it does not use."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def thread_count(workers: int) -> int:
    """This process's threads, with the copy thread of each of its workers that read.

    A worker makes its copy thread for the first transfer that takes long or has memory that may not be there yet, and
    keeps it. Which transfer that is depends on time, so it counts from the beginning: only more than that is growth.
    """
    copiers = others = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:
            continue  # it has ended
        if name == "kvf-copy\n":
            copiers += 1
        else:
            others += 1
    return others + max(copiers, workers)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def heap_bytes() -> int:
    """Bytes that are allocated from glibc's heap: what a leak would add to, without what fragments it."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)


class Engine:
    """See the module's text. Commands are methods; each one's answer is sent as `(name, value)`."""

    def __init__(self, pipe: Connection, setup: Setup) -> None:
        self.pipe = pipe
        self.setup = setup
        self.cache = Cache(setup.blocks, setup.block_bytes)
        self.worker, self.asleep = self._worker(), False
        self.metadata = {(0, 0): self.worker.metadata()}
        self.place: dict[str, Any] = {}
        self.scheduler = self._scheduler()
        self.under_way = under_way.UnderWay(self, os.getpid(), setup.silent, setup.aborts)
        self.free = list(range(1, setup.blocks))
        self.held: dict[str, _Held] = {}
        self.loads: dict[str, _Held] = {}
        self.garbage = 0
        # Blocks that came free, with when: for the parent, which knows what should have been when.
        self.freed: deque[tuple[str, float]] = deque(maxlen=2000)
        # Loads whose second half comes later: (when, request, params).
        self.later: list[tuple[float, str, dict[str, Any]]] = []
        self.ended = False

    def _worker(self) -> Worker:
        setup = self.setup
        worker = Worker(
            {
                "engine_id": setup.name,
                **TRANSPORTS.get(setup.transport, {"transport": setup.transport}),
                "compat": [["model", "chaos"], ["dtype", "uint8"]],
                # Times for a fault to be over soon; what is told of each is that it ends, not when.
                "handshake_timeout_ms": 10_000,
                "transfer_timeout_ms": 10_000,
                "verdict_timeout_ms": 5_000,
                "early_message_ms": 5_000,
                "tombstone_ms": 5_000,
                "peer_ttl_ms": 10_000,
                "portion_tokens": TOKENS,
                **setup.worker,
            }
        )
        worker.register(self.cache.words.ctypes.data, self.cache.words.nbytes)
        worker.set_geometry(self.cache.geometry())
        return worker

    def _scheduler(self) -> Scheduler:
        scheduler = Scheduler(
            {
                "engine_id": self.setup.name,
                "groups": [{"kind": "full", "block_size": TOKENS}],
                "host": self.setup.host,
                "port": 0,
                "lease_ms": self.setup.lease_ms,
                "advertise_local": True,
            }
        )
        if self.setup.serves:
            host, port = scheduler.serve(self.metadata)
            self.place = {"remote_engine_id": self.setup.name, "remote_host": host, "remote_port": port}
        else:
            scheduler.set_engine(self.metadata)
        return scheduler

    def take(self, count: int) -> list[int] | None:
        """So many free blocks, if there are."""
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Blocks come free, and get other bytes at once, as the next prefill would give them."""
        self.spoil(blocks)
        self.free += blocks

    def spoil(self, blocks: list[int]) -> None:
        """Blocks get bytes that are nobody's."""
        self.garbage += 1
        self.cache.fill(0x80000000 + self.garbage, blocks)

    def keep(self, request: str, key: int, blocks: list[int]) -> None:
        """A prefill's blocks stay for the consumer."""
        self.held[request] = _Held(key, blocks, time.monotonic())

    # What the parent asks for.

    def prefill(self, wanted: list[tuple[str, int, int]]) -> list[tuple[str, dict[str, Any] | None]]:
        """Prefills `(request, key, blocks)`; the params for the consumer, None while there are not enough blocks."""
        answers: list[tuple[str, dict[str, Any] | None]] = []
        for request, key, count in wanted:
            if under_way.chosen():
                self.under_way.begin(request, key, count)
                asked = {"do_remote_prefill": True, "transfer_id": f"x-{request}", **self.place}
                answers.append((request, asked))
                continue
            blocks = self.take(count)
            if blocks is None:
                answers.append((request, None))
                continue
            self.cache.fill(key, blocks)
            keep, params = self.scheduler.finished(
                request, {"do_remote_decode": True}, "complete", [blocks], count * TOKENS
            )
            assert keep, request
            self.keep(request, key, blocks)
            answers.append((request, params))
        self._step()
        return answers

    def load(self, wanted: list[tuple[str, int, int, dict[str, Any], float]]) -> list[str]:
        """Loads `(request, key, blocks, params, delay)`; the requests for which there were not enough blocks.

        `delay` is between the request's arrival, when the lease is first renewed, and the load, in seconds.
        """
        refused = []
        for request, key, count, params, delay in wanted:
            blocks = self.take(count)
            if blocks is None:
                refused.append(request)
                continue
            self.loads[request] = _Held(key, blocks, time.monotonic(), params)
            self.scheduler.arrived(request, params)
            if delay > 0 or self.asleep:
                self.later.append((time.monotonic() + delay, request, params))
            else:
                self._allocated(request, params)
        self._step()
        return refused

    def _allocated(self, request: str, params: dict[str, Any]) -> None:
        load = self.loads[request]
        load.since = time.monotonic()
        tokens = len(load.blocks) * TOKENS
        self.scheduler.allocated(request, params, [load.blocks], tokens, tokens)

    def rank_metadata(self) -> bytes:
        """What other engines learn of this one."""
        return self.metadata[(0, 0)]

    def address(self) -> tuple[str, int]:
        """Where the listener is. Binds it where it is not."""
        return self.scheduler.serve(self.metadata)

    def restart_listener(self) -> tuple[str, int]:
        """The head's scheduler side ends, and another one begins, on another port."""
        self.scheduler.shutdown()
        self.scheduler = self._scheduler()
        return ("", 0)

    def fall_asleep(self) -> bool:
        """As vLLM's sleep mode: the worker ends, and the cache's memory is gone."""
        self._step()
        last = self.worker.suspend()
        self.asleep = True
        if last is not None:
            self._take(last)
        self.cache.give_up()
        return True

    def wake(self, moves: bool) -> bool:
        """The cache's memory is there again, `moves`: in another place, and a new worker begins."""
        if moves:
            self.cache = Cache(self.setup.blocks, self.setup.block_bytes)
        else:
            self.cache.take_back()
        self.worker, self.asleep = self._worker(), False
        self.metadata = {(0, 0): self.worker.metadata()}
        self.scheduler.renew(self.metadata)
        return True

    def overwrite(self) -> bool:
        """Gives other bytes to the blocks of all requests that are kept, one request at a time."""
        for held in list(self.held.values()):
            self.garbage += 1
            self.cache.fill(0x80000000 + self.garbage, held.blocks)
        return True

    def state(self) -> dict[str, Any]:
        """Resources and what is under way."""
        stats = self.worker.stats()
        freed = list(self.freed)
        self.freed.clear()
        return {
            "rss": resident_bytes(),
            "heap": heap_bytes(),
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": thread_count(1),
            "held": len(self.held) + len(self.under_way.prompts),
            "preempted": self.under_way.preempted,
            "aborted": self.under_way.aborted,
            "loads": len(self.loads),
            "free": len(self.free),
            "agent": stats["agent"],
            "gauges": stats["gauges"],
            "totals": stats["totals"],
            "freed": freed,
        }

    def end(self) -> bool:
        """Shuts down in order."""
        self.ended = True
        return True

    # The engine's own work.

    def _step(self) -> None:
        while not self.asleep and self.scheduler.has_pending():
            self.worker.submit(self.scheduler.step())

    def _report(self, timeout: float) -> bool:
        encoded = None if self.asleep else self.worker.wait_encoded(timeout)
        if encoded is None:
            return False
        self._take(encoded)
        return True

    def _take(self, encoded: bytes) -> None:
        self.scheduler.note(encoded)
        # The rank's own words: the scheduler side would hide that it says something twice.
        report = decode_report(encoded)
        for request in report["finished_sending"]:
            held = self.held.pop(request, None)
            if held is not None:
                self.give_back(held.blocks)
                self.freed.append((request, time.monotonic()))
        failures = {failure["request"]: failure for failure in report["failed_recving"]}
        ends = []
        for request in report["finished_recving"]:
            load = self.loads.pop(request, None)
            if load is None:
                ends.append(Done(request, "reported twice", 0, 0.0))
                continue
            failure = failures.get(request)
            wrong = self.cache.wrong_bytes(load.key, load.blocks)
            cause, text = (None, "") if failure is None else (failure["cause"], failure["message"])
            ends.append(Done(request, cause, wrong, time.monotonic() - load.since, text))
            tokens = len(load.blocks) * TOKENS
            outcome: Outcome = "complete" if failure is None else "aborted"
            self.scheduler.finished(request, load.params, outcome, [load.blocks], tokens)
            self.cache.words[:, load.blocks] = 0
            self.free += load.blocks
        if ends:
            self.pipe.send(("done", ends))

    def run(self) -> None:
        """Until the parent says end, or is gone."""
        while not self.ended:
            now = time.monotonic()
            due = [] if self.asleep else [entry for entry in self.later if entry[0] <= now]
            if due:
                self.later = [entry for entry in self.later if entry[0] > now]
                for _, request, params in due:
                    self._allocated(request, params)
            self.under_way.step()
            self._step()
            busy = bool(self.loads or self.held or self.under_way.prompts)
            while self._report(0.001 if busy and not self.pipe.poll(0) else 0):
                self._step()
            while self.pipe.poll(0 if not self.asleep and (busy or self.later) else 0.02):
                name, arguments = self.pipe.recv()
                self.pipe.send((name, getattr(self, name)(*arguments)))
                if self.ended:
                    break
        self.scheduler.shutdown()
        self.worker.shutdown()


def main(pipe: Connection, setup: Setup) -> None:
    """The process's own function."""
    if setup.key_file is not None:
        # Both sides of the engine take it from there.
        os.environ["KVFERRY_KEY_FILE"] = setup.key_file
    if setup.netns is not None:
        enter(setup.netns)
    try:
        engine = Engine(pipe, setup)
        pipe.send(("up", os.getpid()))
        engine.run()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # The parent is gone, or gives up.
        return
