"""Cold: from first contact to the first bytes, with an engine of one rank and of many.

kvferry: a new worker asks the producer's listener once for all ranks, connects to them, and loads one block of every
layer from each. Timed from the step with the hold and the load until one rank's bytes are there, and until the load is
reported, which takes the bytes of all ranks and the producer's word that the lease still held. Every byte is compared.

The stock way, for the same ranks: one ZMQ query after the other, and for each rank NIXL's `add_remote_agent` and
`prep_xfer_dlist` for all of its blocks, as NixlConnector does before its first transfer. The transfer itself is not
counted, nor is what vLLM's own code adds. The producers' NIXL agents have no progress thread, so that the idle ones do
not take the processors from what is timed.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

from .. import Scheduler, Worker
from .engines.nixl import NIXL_THREADS, block_table, plain_agent
from .figures import Progress, Row, best, columns, number, percentile, row
from .remote import Remote

LAYERS = 64
_TOKENS, _CONTENT, _LIMIT_S = 16, 64, 120.0
_RUN = _TOKENS * _CONTENT
"""Bytes of a block's one head in one layer."""
GROUPS = [{"kind": "full", "block_size": _TOKENS}]
_BLOCK = 3
"""The block that is read."""
_LEASE_MS = 600_000


def _geometry(blocks: int, heads: int, first: int, total: int) -> dict[str, object]:
    area = {
        "part": "kv",
        "group": 0,
        "region": 0,
        "num_blocks": blocks,
        "block_stride": heads * _RUN,
        "heads": heads,
        "first_head": first,
        "total_heads": total,
        "head_stride": _RUN,
        "tokens": _TOKENS,
        "token_stride": _CONTENT,
        "content": _CONTENT,
    }
    step = blocks * heads * _RUN
    return {"groups": GROUPS, "areas": [{**area, "layer": f"layer.{i}", "offset": i * step} for i in range(LAYERS)]}


def _cache(blocks: int, heads: int) -> Any:
    """`[layer, block, head, byte]`, untouched: only what is read takes memory."""
    return np.frombuffer(mmap.mmap(-1, LAYERS * blocks * heads * _RUN), dtype=np.uint8).reshape(
        LAYERS, blocks, heads, _RUN
    )


def _expected() -> Any:
    words = np.arange(LAYERS * _RUN, dtype=np.uint64) * np.uint64(0x9E3779B1)
    return (words >> np.uint64(7)).astype(np.uint8).reshape(LAYERS, _RUN)


def _worker(engine: str, transport: str, rank: int, ranks: int) -> Worker:
    config = {"engine_id": engine, "transport": transport, "compat": [["model", "bench"]]}
    return Worker({**config, "tp_rank": rank, "tp_size": ranks})


def _scheduler(engine: str, ranks: int) -> Scheduler:
    where = {"host": "127.0.0.1", "port": 0, "advertise_local": True}
    more = {"groups": GROUPS, "null_block": None, "lease_ms": _LEASE_MS}
    return Scheduler({"engine_id": engine, "tp_size": ranks, **where, **more})


class _Producer:
    """An engine of `ranks` ranks, all in one process, over one cache."""

    def __init__(self, transport: str, ranks: int, blocks: int) -> None:
        self._cache = _cache(blocks, 1)
        self._cache[:, _BLOCK, 0] = _expected()
        self._workers = []
        for rank in range(ranks):
            worker = _worker("producer", transport, rank, ranks)
            worker.register(self._cache.ctypes.data, self._cache.nbytes)
            worker.set_geometry(_geometry(blocks, 1, rank, ranks))
            self._workers.append(worker)
        self._scheduler = _scheduler("producer", ranks)
        self._scheduler.serve({(0, rank): worker.metadata() for rank, worker in enumerate(self._workers)})

    def grant(self, request: str) -> dict[str, object]:
        keep, params = self._scheduler.finished(request, {"do_remote_decode": True}, "complete", [[_BLOCK]], _TOKENS)
        if not keep or params is None:
            raise RuntimeError("the producer's scheduler side granted no lease")
        step = self._scheduler.step()
        for worker in self._workers:
            worker.submit(step)
            # Nothing is done with what earlier requests have left.
            worker.poll()
        return params

    def close(self) -> None:
        self._scheduler.shutdown()
        for worker in self._workers:
            worker.shutdown()


class _Consumer:
    """An engine of one rank, made anew for every round."""

    def __init__(self, transport: str, ranks: int, blocks: int) -> None:
        self._transport, self._ranks, self._blocks = transport, ranks, blocks
        self._cache = _cache(blocks, ranks)

    def run(self, request: str, params: dict[str, object]) -> tuple[float, float]:
        """Seconds until the first bytes and until the report."""
        self._cache[:, _BLOCK] = 0
        with _worker("consumer", self._transport, 0, 1) as worker, _scheduler("consumer", 1) as scheduler:
            worker.register(self._cache.ctypes.data, self._cache.nbytes)
            worker.set_geometry(_geometry(self._blocks, self._ranks, 0, self._ranks))
            scheduler.set_engine({(0, 0): worker.metadata()})
            time.sleep(0.05)
            start = time.monotonic()
            scheduler.arrived(request, params)
            scheduler.allocated(request, params, [[_BLOCK]], _TOKENS, _TOKENS)
            while scheduler.has_pending():
                worker.submit(scheduler.step())
            while True:
                report = worker.wait(_LIMIT_S)
                took = time.monotonic() - start
                if report is None:
                    raise TimeoutError(f"{request} was not reported within {_LIMIT_S:.0f} s")
                for failure in report["failed_recving"]:
                    raise RuntimeError(f"{failure['cause']}: {failure['message']}")
                if request in report["finished_recving"]:
                    break
        if not (self._cache[:, _BLOCK] == _expected()[:, None, :]).all():
            raise RuntimeError("wrong bytes were read")
        (record,) = report["records"]
        after = record["transfer_us"] - record["first_us"] + record["confirm_us"]
        return took - after / 1e6, took

    def close(self) -> None:
        """There is nothing left."""


class _NixlProducer:
    """As many NIXL agents over one memory, and a thread that answers one query per rank, as NixlConnector's does."""

    def __init__(self, transport: str, ranks: int, blocks: int) -> None:
        import msgpack
        import zmq

        self._cache = _cache(blocks, 1)
        self._agents = [plain_agent(transport, 0, progress=False) for _ in range(ranks)]
        self._answers = []
        for agent in self._agents:
            agent.register_memory(agent.get_reg_descs([(self._cache.ctypes.data, self._cache.nbytes, 0, "")], "DRAM"))
            body = {"agent_metadata": agent.get_agent_metadata(), "base": self._cache.ctypes.data, "blocks": blocks}
            self._answers.append(msgpack.packb({"compatibility_hash": "0" * 64, "agent_metadata_bytes": body}))
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        import msgpack

        while True:
            identity, _, query = self._socket.recv_multipart()
            _, _, rank = msgpack.unpackb(query)
            clock = msgpack.packb(time.perf_counter())
            self._socket.send_multipart((identity, b"", self._answers[rank], clock))

    def port(self) -> int:
        return int(self._port)

    def close(self) -> None:
        """The process's end gives everything back."""


class _NixlConsumer:
    """A NIXL agent, made anew for every round."""

    def __init__(self, transport: str, threads: int) -> None:
        self._transport, self._threads = transport, threads

    def run(self, port: int, ranks: int) -> float:
        import msgpack
        import zmq

        agent = plain_agent(self._transport, self._threads)
        handles = []
        time.sleep(0.05)
        start = time.monotonic()
        with zmq.Context() as context, context.socket(zmq.REQ) as query:
            query.connect(f"tcp://127.0.0.1:{port}")
            for rank in range(ranks):
                query.send(msgpack.packb(["get_meta_msg", 0, rank]))
                answer, _ = query.recv_multipart()
                body = msgpack.unpackb(answer)["agent_metadata_bytes"]
                name = agent.add_remote_agent(body["agent_metadata"])
                table = block_table(body["base"], body["blocks"] * _RUN, LAYERS, body["blocks"], _RUN)
                handles.append(agent.prep_xfer_dlist(name, agent.get_xfer_descs(table, "DRAM")))
        took = time.monotonic() - start
        for handle in handles:
            handle.release()
        return took

    def close(self) -> None:
        """The process's end gives everything back."""


REPORT = "kvferry, all reported"
"""Not what is compared: NIXL's time has no transfer in it."""
Times = dict[str, list[float]]


def measure(transport: str, ranks: int, total_blocks: int, rounds: int, peer: bool) -> Times:
    """Milliseconds by engine. `total_blocks` counts a rank's blocks of all layers."""
    blocks = total_blocks // LAYERS
    times: Times = {"kvferry": [], REPORT: []}
    with ExitStack() as stack:
        producer = stack.enter_context(Remote("producer", _Producer, transport, ranks, blocks))
        consumer = stack.enter_context(Remote("consumer", _Consumer, transport, ranks, blocks))
        theirs: dict[str, Remote] = {}
        port = 0
        if peer:
            stock = stack.enter_context(Remote("NIXL's producers", _NixlProducer, transport, ranks, blocks))
            port = stock.ask("port")
            for threads in NIXL_THREADS:
                name = f"NIXL, num_threads {threads}"
                theirs[name] = stack.enter_context(Remote(name, _NixlConsumer, transport, threads))
                times[name] = []
        progress = Progress(text(ranks, total_blocks), rounds + 1)
        stack.callback(progress.end)
        for index in range(rounds + 1):
            params = producer.ask("grant", f"request {index}")
            first, reported = consumer.ask("run", f"request {index}", params)
            took = {"kvferry": first, REPORT: reported}
            for name, one in theirs.items():
                one.resume()
                took[name] = one.ask("run", port, ranks)
                one.pause()
            if index:
                for name, seconds in took.items():
                    times[name].append(seconds * 1e3)
            progress.step()
    return times


def text(ranks: int, total_blocks: int) -> str:
    """The work in words."""
    return f"first contact to first byte, {ranks} rank{'' if ranks == 1 else 's'} of {total_blocks:,} blocks"


def summary(transport: str, ranks: int, total_blocks: int, times: Times) -> Row:
    """The row."""
    ours, _, *nixl = times.values()
    return row(
        text(ranks, total_blocks),
        transport,
        ours_ms=median(ours),
        peer_ms=best(nixl),
        ours_p99_ms=percentile(ours, 0.99),
        peer_p99_ms=min((percentile(one, 0.99) for one in nixl), default=None),
    )


def table(transport: str, ranks: int, total_blocks: int, times: Times) -> str:
    """All engines."""
    ours = median(times["kvferry"])
    lines: Sequence[tuple[str, ...]] = [
        (name, number(median(some)), number(percentile(some, 0.99)), number(ours / median(some)))
        for name, some in times.items()
    ]
    title = f"{text(ranks, total_blocks)}, {transport}, {len(times['kvferry'])} alternating rounds"
    return f"{title}\n{columns(('', 'median ms', 'p99 ms', 'kvferry / it'), lines)}"
