"""A miniature engine in a process of its own, of whichever release `PYTHONPATH` and `KVFERRY_LIBRARY` name.

`upgrade_engine.py FD` takes orders from the pipe FD: (method of `Engine`, arguments, keyword arguments). It uses only
what both releases have. Tests start it with `release`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvferry
import numpy as np
from kvferry import Aggregator, Scheduler, Worker
from kvferry.doctor import inside
from numpy.typing import NDArray

LAYERS, BLOCKS, TOKENS, HEADS, CONTENT = 2, 48, 16, 2, 2048
HEAD = TOKENS * CONTENT
GROUPS = [{"kind": "full", "block_size": TOKENS}]
GENEROUS = 120.0
"""Seconds that anything may take on a busy machine."""


def cache_of(tag: int, rank: int, tp: int) -> NDArray[np.uint8]:
    """A rank's cache, [layer, block, head, byte], with bytes that differ by engine, layer, block, head and offset."""
    words = np.arange(LAYERS * BLOCKS * HEADS * HEAD, dtype=np.uint64)
    mixed = (words + np.uint64(tag << 40)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    whole = (mixed >> np.uint64(56)).astype(np.uint8).reshape(LAYERS, BLOCKS, HEADS, HEAD)
    heads = HEADS // tp
    return np.ascontiguousarray(whole[:, :, rank * heads : (rank + 1) * heads])


def geometry(rank: int, tp: int) -> dict[str, object]:
    heads = HEADS // tp
    block = heads * HEAD
    area = {
        "part": "kv",
        "group": 0,
        "region": 0,
        "num_blocks": BLOCKS,
        "block_stride": block,
        "heads": heads,
        "first_head": rank * heads,
        "total_heads": HEADS,
        "head_stride": HEAD,
        "tokens": TOKENS,
        "token_stride": CONTENT,
        "content": CONTENT,
    }
    areas = [{**area, "layer": f"layer.{layer}", "offset": layer * BLOCKS * block} for layer in range(LAYERS)]
    return {"groups": GROUPS, "areas": areas}


class Engine:
    """All ranks of one engine and its scheduler side."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.workers: list[Worker] = []
        self.caches: list[NDArray[np.uint8]] = []
        self.outcomes: list[Any] = []
        self.arrived: set[str] = set()
        self.reasons: dict[str, tuple[str, str]] = {}

    def start(self, name: str, tag: int, tp: int, lease_ms: int, worker: dict[str, object]) -> tuple[str, int]:
        """Where it listens."""
        shape = {"engine_id": name, "tp_size": tp}
        key = {"key_file": worker["key_file"]} if "key_file" in worker else {}
        for rank in range(tp):
            cache = cache_of(tag, rank, tp)
            one = Worker({**shape, "tp_rank": rank, "compat": [["model", "tiny"]], **worker})
            self.stack.enter_context(one)
            one.register(cache.ctypes.data, cache.nbytes)
            one.set_geometry(geometry(rank, tp))
            self.workers.append(one)
            self.caches.append(cache)
        config = {**shape, **key, "groups": GROUPS, "host": "127.0.0.1", "port": 0, "lease_ms": lease_ms}
        self.scheduler = self.stack.enter_context(Scheduler(config))
        # The release before aggregates outside of the scheduler side.
        self.aggregator = None if hasattr(Scheduler, "over") else Aggregator([(0, rank) for rank in range(tp)])
        return self.scheduler.serve(self.metadata())

    def metadata(self) -> dict[tuple[int, int], bytes]:
        return {(0, rank): worker.metadata() for rank, worker in enumerate(self.workers)}

    def step(self) -> None:
        while self.scheduler.has_pending():
            step = self.scheduler.step()
            for worker in self.workers:
                worker.submit(step)

    def turn(self) -> None:
        """What an engine does between requests: takes in reports and passes on what follows from them."""
        for worker in self.workers:
            while (report := worker.poll_encoded()) is not None:
                outcome: Any
                if self.aggregator is None:
                    outcome = self.scheduler.report(report)
                else:
                    self.aggregator.add(report)
                    outcome = self.aggregator.take()
                    self.scheduler.report(outcome)
                for failure in outcome["failed_recving"]:
                    self.reasons[failure["request"]] = (failure["cause"], failure["message"])
                self.outcomes.append(outcome)
        self.step()

    def prefill(self, request: str, blocks: list[int], **more: object) -> Any:
        """A prefill ends; what a proxy is given."""
        params = {"do_remote_decode": True, **more}
        keep, answer = self.scheduler.finished(request, params, "complete", [blocks], len(blocks) * TOKENS)
        assert keep
        self.step()
        return json.loads(json.dumps(answer))

    def abort(self, request: str, transfer_id: str) -> None:
        """A prefill ends without anything to hand over."""
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        self.scheduler.finished(request, params, "aborted", [[0]], TOKENS)
        self.step()

    def arrive(self, request: str, params: dict[str, Any]) -> None:
        self.arrived.add(request)
        self.scheduler.arrived(request, params)
        self.step()

    def load(self, request: str, params: dict[str, Any], blocks: list[int]) -> None:
        tokens = len(blocks) * TOKENS
        if request not in self.arrived:
            self.arrive(request, params)
        assert self.scheduler.matched(request, params, tokens, 0) == (tokens, True)
        self.scheduler.allocated(request, params, [blocks], tokens, tokens)
        self.step()

    def is_over(self, side: str, request: str) -> bool:
        self.turn()
        return any(request in outcome[side] for outcome in self.outcomes)

    def failures(self) -> dict[str, tuple[str, str]]:
        return self.reasons

    def cache(self, rank: int) -> NDArray[np.uint8]:
        return self.caches[rank]

    def survey(self, host: str, port: int) -> dict[str, Any]:
        """What the handshake with another engine's listener tells."""
        survey: dict[str, Any] = inside.survey(host, port, {}, None)["survey"]
        return survey

    def where(self) -> tuple[str, str]:
        return str(Path(kvferry.__file__).resolve()), str(kvferry.library_path())

    def refusal(self, metadata: dict[tuple[int, int], bytes]) -> str:
        """What this engine's scheduler side says to these ranks."""
        try:
            self.scheduler.set_engine(metadata)
        except kvferry.KvferryError as error:
            return f"{error.name}: {error.message}"
        return ""

    def next_step(self) -> bytes:
        return self.scheduler.step()

    def refused_step(self, step: bytes) -> str:
        """What this engine's first worker says to a step."""
        try:
            self.workers[0].submit(step)
        except kvferry.KvferryError as error:
            return f"{error.name}: {error.message}"
        return ""


class Remote:
    """An engine in another process; each attribute is a method of `Engine`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object, **more: object) -> Any:
            self._pipe.send((name, arguments, more))
            if not self._pipe.poll(GENEROUS):
                raise AssertionError(f"{name} was not answered")
            fine, result = self._pipe.recv()
            if not fine:
                raise AssertionError(f"{name}: {result}")
            return result

        return call


@contextmanager
def release(previous: Path | None) -> Iterator[Remote]:
    """An engine of this tree's release, or of the one in the folder `previous` (see scripts/build-previous)."""
    environment = dict(os.environ)
    if previous is not None:
        path = [str(previous / "source/python"), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        environment["KVFERRY_LIBRARY"] = str(previous / "build/debug/libkvferry.so")
    ours, theirs = Pipe()
    with ours:
        command = [sys.executable, __file__, str(theirs.fileno())]
        child = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            yield Remote(ours)
            ours.close()
            assert child.wait(GENEROUS) == 0
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    with ExitStack() as stack:
        engine = Engine(stack)
        while True:
            if engine.workers and not pipe.poll(0.02):
                engine.turn()
                continue
            try:
                name, arguments, more = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((True, getattr(engine, name)(*arguments, **more)))
            except Exception as error:
                pipe.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
