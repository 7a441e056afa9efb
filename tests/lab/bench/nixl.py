"""NIXL's part of `kvferry bench handshake` and `kvferry bench idle`.

First contact as NixlConnector makes it: one ZMQ query per rank after the other, and for each rank NIXL's
`add_remote_agent` and `prep_xfer_dlist` for all of its blocks. The transfer itself is not counted, nor is what vLLM's
own code adds. The producers' NIXL agents have no progress thread, so that the idle ones do not take the processors from
what is timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from kvferry.bench.handshake import LAYERS, RUN, cache
from kvferry.bench.idle import cost
from kvferry.bench.remote import Remote

from .engines.nixl import NIXL_THREADS, block_table, plain_agent

_BYTES = 1 << 20


class Producer:
    """As many NIXL agents over one memory, and a thread that answers one query per rank, as NixlConnector's does."""

    def __init__(self, transport: str, ranks: int, blocks: int) -> None:
        import msgpack
        import zmq

        self._cache = cache(blocks, 1)
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


class Consumer:
    """A NIXL agent, made anew for every round."""

    def __init__(self, transport: str, threads: int, port: int, ranks: int) -> None:
        self._transport, self._threads, self._port, self._ranks = transport, threads, port, ranks

    def run(self) -> float:
        """Seconds until all ranks are known and prepared."""
        import msgpack
        import zmq

        agent = plain_agent(self._transport, self._threads)
        handles = []
        time.sleep(0.05)
        start = time.monotonic()
        with zmq.Context() as context, context.socket(zmq.REQ) as query:
            query.connect(f"tcp://127.0.0.1:{self._port}")
            for rank in range(self._ranks):
                query.send(msgpack.packb(["get_meta_msg", 0, rank]))
                answer, _ = query.recv_multipart()
                body = msgpack.unpackb(answer)["agent_metadata_bytes"]
                name = agent.add_remote_agent(body["agent_metadata"])
                table = block_table(body["base"], body["blocks"] * RUN, LAYERS, body["blocks"], RUN)
                handles.append(agent.prep_xfer_dlist(name, agent.get_xfer_descs(table, "DRAM")))
        took = time.monotonic() - start
        for handle in handles:
            handle.release()
        return took

    def close(self) -> None:
        """The process's end gives everything back."""


@contextmanager
def consumers(transport: str, ranks: int, total_blocks: int) -> Iterator[dict[str, Remote]]:
    """Processes whose method `run` makes a first contact, by name; for `kvferry.bench.handshake.measure`."""
    with ExitStack() as stack:
        producer = stack.enter_context(Remote("NIXL's producers", Producer, transport, ranks, total_blocks // LAYERS))
        port, made = producer.ask("port"), {}
        for threads in NIXL_THREADS:
            name = f"NIXL, num_threads {threads}"
            made[name] = stack.enter_context(Remote(name, Consumer, transport, threads, port, ranks))
        yield made


class _Idle:
    """A NIXL agent as vLLM makes it, with registered memory; `meet` connects it to another."""

    def __init__(self, transport: str, threads: int) -> None:
        self._memory = np.zeros(_BYTES, dtype=np.uint8)
        self._agent = plain_agent(transport, threads)
        self._agent.register_memory(self._agent.get_reg_descs([(self._memory.ctypes.data, _BYTES, 0, "")], "DRAM"))

    def metadata(self) -> Any:
        return self._agent.get_agent_metadata()

    def connect(self, metadata: Any) -> None:
        self._agent.add_remote_agent(metadata)

    def close(self) -> None:
        """The process's end gives everything back."""


def idle(transport: str, seconds: float) -> dict[str, float]:
    """Processor seconds of a process with one connected peer, by `num_threads`."""
    costs = {}
    for threads in NIXL_THREADS:
        name = f"NIXL, num_threads {threads}, 1 peer"
        with ExitStack() as stack:
            first, second = (stack.enter_context(Remote(name, _Idle, transport, threads)) for _ in range(2))
            first.ask("connect", second.ask("metadata"))
            second.pause()
            costs[name] = cost(first.pid, seconds)
    return costs
