"""Transfers between two hosts: `kvferry bench serve` on one, `kvferry bench transfer --peer` on the other.

The serving side looks like an engine of one rank: a handshake listener and a worker with memory. The measuring side
asks the listener and connects an agent to the worker's, so that keys, versions and addresses are the library's matter,
and reads or writes the memory itself. Its first half tells places, and is read; its second half is written, and read
back to be compared.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

from .. import Listener, Worker, _lib, _wire
from ..agent import Route, Segment
from .cache import GROUPS, area
from .child import Process, memory_of
from .engines import agent
from .engines.engine import AGENT, Setup, transport_of
from .errors import BenchError, UsageError
from .figures import Row, columns, number, percentile
from .memory import Memory
from .pair import Round
from .sizes import size_text
from .transfer import Plan, Samples, alternate, summary
from .work import Ids, Work

ENGINE = "kvferry-bench"
"""Asked for by name: nothing else may be written to."""
UNIT = 1 << 20
LATENCIES = 5
"""Rounds of a single block for each round of a request."""
_ANSWER_MS = 10_000
_WHOLE = [([0], [0])]


@contextmanager
def serving(
    port: int, size: int, memory: Literal["host", "cuda"], transport: str, config: dict[str, Any]
) -> Iterator[tuple[Memory, tuple[str, int]]]:
    """Serves `size` bytes to read and as many to write: the memory, and where others find it."""
    os.environ["KVFERRY_METRICS_FILE"] = ""
    # It has twice as many blocks as are moved.
    work = Work("strided", UNIT, size // UNIT)
    setup = Setup("server", AGENT, work, transport, memory=memory)
    # Before the memory is made, which takes a while.
    listener = Listener({"engine_id": ENGINE, "port": port})
    with listener, Worker({"engine_id": ENGINE, "transport": transport_of(setup), **config}) as worker:
        served = memory_of(setup, False)
        served.fill()
        worker.register(served.address, work.pool_bytes, served.kind, 0)
        worker.set_geometry({"groups": GROUPS, "areas": [area("0", work.pool_blocks, UNIT)]})
        listener.offer(worker.metadata())
        yield served, listener.address


def serve(port: int, size: int, memory: Literal["host", "cuda"], transport: str, config: dict[str, Any]) -> None:
    """As `serving`, until the process is interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with serving(port, size, memory, transport, config) as (_, (host, bound)):
        place = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        print(f"serving {size_text(size)} of {memory} memory at {place}; Ctrl-C ends it. On the other host:")
        print(f"  kvferry bench transfer --peer {place}", flush=True)
        while True:
            time.sleep(3600)


@dataclass
class Server:
    """A server that has answered: the metadata of its agent, bytes of either half of its memory, and its kind. `route`
    is which way bytes have gone there."""

    place: str
    metadata: bytes
    half: int
    memory: str
    route: Route | None = None


def ask(host: str, port: int) -> Server:
    """Asks the server who it is. Raises what `kvf_handshake_survey` fails with."""
    config = _wire.pack("config", {"engine": ENGINE, "timeout_ms": _ANSWER_MS})
    text = _lib.text("host", host)
    answer = _wire.unpack_map("a survey", _lib.aside(lambda: _lib.ask("kvf_handshake_survey", text, port, config)))
    (rank,), (metadata,) = answer["survey"]["ranks"], answer["agents"]
    return Server(f"{host} port {port}", metadata, rank["bytes"] // 2, " ".join(rank["memory"]))


class Starter(agent.Starter):
    """The side that measures. Where it writes, it has memory of its own to read back what came of it."""

    def __init__(self, setup: Setup, memory: Memory, other: int) -> None:
        super().__init__(setup, memory, other)
        self._memory = memory
        self._pids = (os.getpid(),)
        self._back = memory_of(setup, True) if setup.work.direction == "write" else None
        if self._back is not None:
            self._agent.register((self._back.address, setup.work.pool_bytes), kind=self._back.kind, device=0)

    def meet(self, hello: Server) -> None:
        super().meet(hello.metadata)
        self._server = hello
        base, step, size = hello.half if self._back else 0, self._memory.layer_bytes, self._memory.work.pool_bytes
        self._whole = Segment(0, len(self._segments), 0, 0, base, size, size, size)
        self._segments = [
            one._replace(remote_region=0, remote_offset=base + layer * step) for layer, one in enumerate(self._segments)
        ]

    def tell(self) -> None:
        """A server is not told. By now it is known which way bytes go."""
        self._server.route = self._agent.route(self._peer)

    def wipe(self, number: int) -> None:
        """Before a round that writes: as `Memory.wipe`, of the server's memory."""
        if self._back is not None:
            self._back.wipe(number)
            self._agent.write(self._peer, [self._whole], _WHOLE).wait(self._limit_s)

    def wrong_words(self, pairs: list[tuple[Ids, Ids]]) -> int:
        """As `Memory.wrong_words`, of the server's memory, where this side writes."""
        if self._back is None:
            return 0
        blank = self._back.blank
        self._back.wipe(0)
        self._agent.read(self._peer, [self._whole], _WHOLE).wait(self._limit_s)
        self._back.blank = blank
        return self._back.wrong_words(pairs)

    def close(self) -> None:
        self._agent.shutdown(1.0)


starter = Starter


class Far(AbstractContextManager["Far"]):
    """As `pair.Pair`, with the other side on another host and this one in this process."""

    def __init__(self, server: Server, setup: Setup) -> None:
        self._round = 0
        self._near = Process(setup, True, 0)
        try:
            self._near.meet(server)
        except BaseException:
            self._near.close()
            raise

    def round(self, watch: bool = False) -> Round:
        """Wipes, moves everything, and compares every byte."""
        self._round += 1
        near, side = self._near, self._near.side
        near.wipe(self._round)
        side.wipe(self._round)
        took = near.run(None, watch)
        wrong = near.check() + side.wrong_words(near.pairs)
        if wrong:
            raise BenchError(f"{wrong} words of 8 bytes are wrong after round {self._round}")
        return Round(took, None)

    def pause(self) -> None:
        """There is nobody else to make room for."""

    resume = pause

    def __exit__(self, *_: object) -> None:
        self._near.close()


def measure(plans: Sequence[Plan], server: Server) -> list[tuple[Plan, Samples, Samples]]:
    """Of each plan, the rounds of a single block and of the whole."""
    os.environ["KVFERRY_METRICS_FILE"] = ""
    for work in (plan.work for plan in plans):
        if work.pool_bytes > server.half:
            raise UsageError(
                f"{work.text} needs {size_text(work.pool_bytes)} there, and the server has {size_text(server.half)}: "
                "ask for fewer or smaller blocks, or start it with a larger --size"
            )
    make = partial(Far, server)
    found = []
    for plan in plans:
        work = plan.work
        # A link of 100 Mbit/s is not taken for a dead one.
        setup = replace(plan.setup, engine=".hosts", limit_s=20 + work.pool_bytes / 1e7)
        one = replace(setup, work=replace(work, blocks=1, layers=1, requests=1))
        (latency,) = alternate([one], LATENCIES * plan.rounds, one.work.text, make=make)
        (rate,) = alternate([setup], plan.rounds, work.text, make=make)
        found.append((plan, latency, rate))
    return found


def rows(found: Sequence[tuple[Plan, Samples, Samples]]) -> list[Row]:
    """The rows: those of transfers, with the time of a single block, and the rate of the whole in GB/s."""
    made = []
    for plan, latency, rate in found:
        one = summary(plan, rate)
        times = [ms * 1e3 for ms in latency.of("ms")]
        figures = {
            "block_bytes": plan.work.block_bytes,
            "bytes": plan.work.bytes,
            "latency_us": median(times),
            "latency_p99_us": percentile(times, 0.99),
            "gb_per_s": plan.work.bytes / one["ours_ms"] / 1e6,
        }
        made.append({**one, **figures})
    return made


def about(plan: Plan, server: Server) -> dict[str, object]:
    """What the figures are of."""
    facts: dict[str, object] = {"peer": server.place, "memory": plan.memory, "peer_memory": server.memory}
    if (route := server.route) is not None:
        kinds = {plan.memory, server.memory.partition(" ")[0]}
        path = route.mixed if len(kinds) > 1 else route.host if "host" in kinds else route.device
        facts |= {"path": path, "lanes": route.lanes}
    return facts


def table(plan: Plan, server: Server, made: Sequence[Row]) -> str:
    """All rows."""
    lines = []
    for row in made:
        rate = row["gb_per_s"]
        figures = ("latency_us", "latency_p99_us", "ours_ms", "ours_p99_ms")
        cells = [*(row[what] for what in figures), rate, 8 * rate, row["caller_us"], row["cpu_s_per_gb"]]
        lines.append((size_text(row["block_bytes"]), *map(number, cells), size_text(row["bytes"])))
    head = ("block", "one, us", "p99", "all, ms", "p99", "GB/s", "Gbit/s", "caller us", "CPU s/GB", "all")
    facts = about(plan, server)
    verb = "READ from" if plan.work.direction == "read" else "WRITE to"
    title = f"{verb} {server.place}, {server.memory} memory there, {plan.memory} memory here, {plan.rounds} rounds"
    return f"{title}\n{facts.get('path')}; {facts.get('lanes')}; every byte compared\n{columns(head, lines)}"
