"""The one engine without vLLM: its workers, its scheduler side, and the steps between them.

A producer overwrites blocks the moment that they come free, as another request's prefill would: what is read too late
is wrong. A consumer checks every byte of what it is told has arrived. `RemoteEngine` runs it in a process of its own.

It runs with the package and the library of the previous release too, as far as that has what is called.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry import Aggregator, Scheduler, Worker, decode_report

from lab.engines import chunked
from lab.engines.cache import TOKENS, Cache
from lab.engines.resources import heap_bytes, resident_bytes, thread_count
from lab.network import enter
from lab.process import Remote

if TYPE_CHECKING:
    from kvferry.scheduler import Outcome

TRANSPORTS = {name: {"transport": "auto", "ucx": {"TLS": f"{name},self"}} for name in ("rc", "ud")}
"""Settings for transports that kvferry has no name of its own for."""

Wanted = tuple[str, int, int]
"""A request: its name, its key, from which its bytes follow, and how many blocks it has."""


@dataclass(frozen=True)
class Setup:
    """How an engine is started."""

    name: str
    serves: bool
    transport: str = "tcp"
    blocks: int = 512
    # Bytes of a block in each layer, of all ranks together.
    block_bytes: int = 8192
    lease_ms: int = 1000
    host: str = "127.0.0.1"
    # Ranks, and heads of all of them together.
    tp: int = 1
    heads: int = 1
    # Whether requests get blocks from anywhere, and not those that lie beside each other as long as there are some.
    scattered: bool = False
    # The network namespace to live in.
    netns: str | None = None
    # The key's file; empty for no key, None to inherit this program's environment.
    key_file: str | None = None
    # Further settings of the workers.
    worker: Mapping[str, object] = field(default_factory=dict)
    # Of prompts that are computed in parts, see `chunked.Prompts`.
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
    # Ranks that have not reported its end.
    left: set[int]
    params: dict[str, Any] = field(default_factory=dict)
    # Why it failed, if it did: cause and text.
    failure: tuple[str | None, str] = (None, "")


class Engine:
    """See the module's text. It works by itself in `turn`; the other public methods are called from outside."""

    def __init__(self, setup: Setup) -> None:
        if setup.netns is not None:
            enter(setup.netns)
        self.setup = setup
        self.ranks = range(setup.tp)
        self.caches = self._caches()
        self.workers, self.asleep = self._workers(), False
        self.place: dict[str, Any] = {}
        self.scheduler = self._scheduler()
        # The release before aggregates outside of the scheduler side.
        self.aggregator = None if hasattr(Scheduler, "note") else Aggregator([(0, rank) for rank in self.ranks])
        self.prompts = chunked.Prompts(self, os.getpid(), setup.silent, setup.aborts)
        self.free = list(range(1, setup.blocks))
        if setup.scattered:
            random.Random(setup.name).shuffle(self.free)
        self.held: dict[str, _Held] = {}
        self.loads: dict[str, _Held] = {}
        self.early: set[str] = set()
        self.garbage = 0
        # Blocks that came free, with when: for the parent, which knows what should have been when.
        self.freed: deque[tuple[str, float]] = deque(maxlen=2000)
        # Loads whose second half comes later: (when, request, params).
        self.later: list[tuple[float, str, dict[str, Any]]] = []
        # Loads that have ended.
        self.events: list[Done] = []

    def _caches(self) -> list[Cache]:
        setup = self.setup
        return [Cache(setup.blocks, setup.block_bytes, setup.heads, setup.tp, rank) for rank in self.ranks]

    def _workers(self) -> list[Worker]:
        setup, workers = self.setup, []
        for rank, cache in zip(self.ranks, self.caches, strict=True):
            shape = {"engine_id": setup.name, "tp_size": setup.tp, "tp_rank": rank}
            transport = TRANSPORTS.get(setup.transport, {"transport": setup.transport})
            worker = Worker({**shape, "compat": [["model", "lab"], ["dtype", "uint8"]], **transport, **setup.worker})
            worker.register(cache.words.ctypes.data, cache.words.nbytes)
            worker.set_geometry(cache.geometry())
            workers.append(worker)
        self.metadata = {(0, rank): worker.metadata() for rank, worker in zip(self.ranks, workers, strict=True)}
        return workers

    def _scheduler(self) -> Scheduler:
        setup = self.setup
        scheduler = Scheduler(
            {
                "engine_id": setup.name,
                "tp_size": setup.tp,
                "groups": [{"kind": "full", "block_size": TOKENS}],
                "host": setup.host,
                "port": 0,
                "lease_ms": setup.lease_ms,
                "advertise_local": True,
            }
        )
        if setup.serves:
            host, port = scheduler.serve(self.metadata)
            self.place = {"remote_engine_id": setup.name, "remote_host": host, "remote_port": port}
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
        self.fill(0x80000000 + self.garbage, blocks)

    def fill(self, key: int, blocks: list[int], first: int = 0) -> None:
        """Blocks get the bytes of request `key`, from its block `first` on."""
        for cache in self.caches:
            cache.fill(key, blocks, first)

    def keep(self, request: str, key: int, blocks: list[int]) -> None:
        """A prefill's blocks stay for the consumer."""
        self.held[request] = _Held(key, blocks, time.monotonic(), set(self.ranks))

    def name_of(self, request: str) -> str:
        """By which a consumer awaits a prefill."""
        return f"x-{request}"

    # What the parent asks for.

    def prefill(self, wanted: list[Wanted], awaited: bool = False) -> list[tuple[str, dict[str, Any] | None]]:
        """Prefills; the params for the consumer, None while there are not enough blocks. `awaited`: by its name."""
        answers: list[tuple[str, dict[str, Any] | None]] = []
        for request, key, count in wanted:
            if chunked.chosen():
                self.prompts.begin(request, key, count)
                answers.append((request, self.awaited(request)))
                continue
            blocks = self.take(count)
            if blocks is None:
                answers.append((request, None))
                continue
            self.fill(key, blocks)
            asked = {"do_remote_decode": True, **({"transfer_id": self.name_of(request)} if awaited else {})}
            keep, params = self.scheduler.finished(request, asked, "complete", [blocks], count * TOKENS)
            assert keep, request
            self.keep(request, key, blocks)
            answers.append((request, params))
        self._step()
        return answers

    def awaited(self, request: str) -> dict[str, Any]:
        """The params of a consumer that asks for a prefill before it is over."""
        return {"do_remote_prefill": True, "transfer_id": self.name_of(request), **self.place}

    def abort(self, request: str) -> None:
        """A prefill that may be awaited ends without anything to hand over."""
        asked = {"do_remote_decode": True, "transfer_id": self.name_of(request)}
        self.scheduler.finished(request, asked, "aborted", [[0]], TOKENS)
        self._step()

    def arrive(self, request: str, count: int, params: dict[str, Any]) -> bool:
        """A request of `count` blocks comes in, and is loaded later. Whether all of it can be."""
        self.early.add(request)
        self.scheduler.arrived(request, params)
        self._step()
        return self.scheduler.matched(request, params, count * TOKENS, 0) == (count * TOKENS, True)

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
            self.loads[request] = _Held(key, blocks, time.monotonic(), set(self.ranks), params)
            if request not in self.early:
                self.scheduler.arrived(request, params)
            self.early.discard(request)
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

    def rank_metadata(self) -> dict[tuple[int, int], bytes]:
        """What other engines learn of this one."""
        return self.metadata

    def address(self) -> tuple[str, int]:
        """Where the listener is. Binds it where it is not."""
        return self.scheduler.serve(self.metadata)

    def restart_listener(self) -> None:
        """The head's scheduler side ends, and another one begins, on another port."""
        self.scheduler.shutdown()
        self.scheduler = self._scheduler()

    def fall_asleep(self) -> None:
        """As vLLM's sleep mode: the workers end, and the cache's memory is gone."""
        self._step()
        for rank, worker in zip(self.ranks, self.workers, strict=True):
            if (last := worker.suspend()) is not None:
                self._take(rank, last)
        self.asleep = True
        for cache in self.caches:
            cache.give_up()

    def wake(self, moves: bool) -> None:
        """The cache's memory is there again, `moves`: in another place, and new workers begin."""
        if moves:
            self.caches = self._caches()
        else:
            for cache in self.caches:
                cache.take_back()
        self.workers, self.asleep = self._workers(), False
        self.scheduler.renew(self.metadata)

    def overwrite(self) -> None:
        """Gives other bytes to the blocks of all requests that are kept, one request at a time."""
        for held in list(self.held.values()):
            self.spoil(held.blocks)

    def strays(self) -> int:
        """Words of free blocks that are neither as in a new cache nor as a load leaves them."""
        return sum(int((cache.words[:, self.free] > 1).sum()) for cache in self.caches)

    def state(self) -> dict[str, Any]:
        """Resources and what is under way."""
        stats = self.workers[0].stats()
        freed = list(self.freed)
        self.freed.clear()
        return {
            "rss": resident_bytes(),
            "heap": heap_bytes(),
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": thread_count(len(self.workers)),
            "held": len(self.held) + len(self.prompts.running),
            "preempted": self.prompts.preempted,
            "aborted": self.prompts.aborted,
            "agent": stats["agent"],
            "freed": freed,
        }

    def close(self) -> None:
        """Shuts down in order."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    # The engine's own work.

    def _step(self) -> None:
        while not self.asleep and self.scheduler.has_pending():
            step = self.scheduler.step()
            for worker in self.workers:
                worker.submit(step)

    def _report(self, timeout: float) -> bool:
        """Takes a report of each worker that has one; waits for the first worker's."""
        found = False
        for rank, worker in zip(self.ranks, () if self.asleep else self.workers, strict=False):
            encoded = worker.wait_encoded(0 if rank else timeout)
            if encoded is not None:
                self._take(rank, encoded)
                found = True
        return found

    def _note(self, encoded: bytes) -> None:
        if self.aggregator is None:
            self.scheduler.note(encoded)
        else:
            self.aggregator.add(encoded)
            self.scheduler.report(self.aggregator.take())  # type: ignore[arg-type]

    def _take(self, rank: int, encoded: bytes) -> None:
        self._note(encoded)
        # The rank's own words: the scheduler side would hide that it says something twice.
        report = decode_report(encoded)
        for request in report["finished_sending"]:
            held = self.held.get(request)
            if held is not None and _is_last(held, rank):
                del self.held[request]
                self.give_back(held.blocks)
                self.freed.append((request, time.monotonic()))
        failures = {failure["request"]: (failure["cause"], failure["message"]) for failure in report["failed_recving"]}
        for request in report["finished_recving"]:
            load = self.loads.get(request)
            if load is None or rank not in load.left:
                self.events.append(Done(request, "reported twice", 0, 0.0))
                continue
            load.failure = failures.get(request, load.failure)
            if _is_last(load, rank):
                self._end(request, self.loads.pop(request))

    def _end(self, request: str, load: _Held) -> None:
        wrong = sum(cache.wrong_bytes(load.key, load.blocks) for cache in self.caches)
        cause, text = load.failure
        self.events.append(Done(request, cause, wrong, time.monotonic() - load.since, text))
        outcome: Outcome = "complete" if cause is None else "aborted"
        self.scheduler.finished(request, load.params, outcome, [load.blocks], len(load.blocks) * TOKENS)
        for cache in self.caches:
            cache.words[:, load.blocks] = 0
        self.free += load.blocks

    def turn(self, called: bool) -> float:
        """What it does between calls; for how many seconds there is nothing to do. `called`: somebody waits."""
        now = time.monotonic()
        due = [] if self.asleep else [entry for entry in self.later if entry[0] <= now]
        if due:
            self.later = [entry for entry in self.later if entry[0] > now]
            for _, request, params in due:
                self._allocated(request, params)
        self.prompts.step()
        self._step()
        busy = bool(self.loads or self.held or self.prompts.running)
        while self._report(0.001 if busy and not called else 0):
            self._step()
        return 0 if not self.asleep and (busy or self.later) else 0.02


def _is_last(held: _Held, rank: int) -> bool:
    """Notes a rank's report; whether it was the last one that was missing."""
    held.left.discard(rank)
    return not held.left


class RemoteEngine(Remote):
    """An engine in a process of its own."""

    def __init__(self, setup: Setup, make: type[Engine] = Engine, **more: Any) -> None:
        if setup.key_file is not None:
            # Both sides of the engine take it from there.
            more["environment"] = {**more.get("environment", {}), "KVFERRY_KEY_FILE": setup.key_file}
        super().__init__(make, setup, name=f"engine {setup.name}", **more)
        self.setup = setup

    def take_done(self, timeout_s: float = 0.0) -> list[Done]:
        """Loads that ended since the last call, waiting up to `timeout_s` seconds for one."""
        if not self.events:
            self.take(timeout_s)
        while self.pipe.poll():
            self.take(0)
        done, self.events = self.events, []
        return done


@contextmanager
def engines(*setups: Setup) -> Iterator[list[RemoteEngine]]:
    """Engines until the end of the block."""
    made: list[RemoteEngine] = []
    try:
        for setup in setups:
            made.append(RemoteEngine(setup))
        yield made
    finally:
        for engine in made:
            engine.close()
