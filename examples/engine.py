"""Two small engines that are not vLLM: one hands a finished prefill's KV cache over, the other one fetches it.

    python examples/engine.py prefill | python examples/engine.py decode

The pipe stands for whatever carries a request's kv_transfer_params in practice: a proxy, an HTTP answer, a file. The
cache itself goes past it, from the one's memory into the other's. See docs/c-abi.md for the order of calls.
"""

import json
import sys
import time
from collections.abc import Iterator

import kvferry
import numpy as np
from kvferry import Scheduler, Worker
from numpy.typing import NDArray

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, CONTENT = 4, 32, 16, 2, 64  # CONTENT: bytes per token and head
HEAD_BYTES = BLOCK_TOKENS * CONTENT
GROUPS = [{"kind": "full", "block_size": BLOCK_TOKENS}]
PROMPT_TOKENS, SECONDS = 5 * BLOCK_TOKENS, 60


def prompt_cache(prompt: str) -> NDArray[np.uint8]:
    """What a model would compute for a prompt: [layer, block of the prompt, byte]. Both engines can tell it here."""
    shape = (LAYERS, PROMPT_TOKENS // BLOCK_TOKENS, HEADS * HEAD_BYTES)
    return np.random.default_rng(list(prompt.encode())).integers(0, 256, shape, dtype=np.uint8)


class Engine:
    """An engine of one rank: its cache, the worker side that owns it, and the scheduler side that decides.

    Engines of several ranks have a `Worker` in each rank's process and one `Scheduler`; metadata, steps and reports
    travel between them as bytes.
    """

    def __init__(self, name: str) -> None:
        self.cache = np.zeros((LAYERS, BLOCKS, HEADS * HEAD_BYTES), dtype=np.uint8)
        # `compat` names what both engines must share; a difference ends in a failed request that names it.
        compat = [["model", "example"], ["dtype", "uint8"]]
        self.worker = Worker({"engine_id": name, "compat": compat, "verdict_timeout_ms": 8000})
        region = self.worker.register(self.cache)
        area = {
            **{"part": "kv", "group": 0, "region": region, "num_blocks": BLOCKS, "block_stride": HEADS * HEAD_BYTES},
            **{"heads": HEADS, "first_head": 0, "total_heads": HEADS, "head_stride": HEAD_BYTES},
            **{"tokens": BLOCK_TOKENS, "token_stride": CONTENT, "content": CONTENT},
        }
        layer_bytes = BLOCKS * HEADS * HEAD_BYTES
        areas = [{**area, "layer": f"layer.{layer}", "offset": layer * layer_bytes} for layer in range(LAYERS)]
        self.worker.set_geometry({"groups": GROUPS, "areas": areas})
        # Between hosts, leave the host out to have an address found.
        self.scheduler = Scheduler({"engine_id": name, "groups": GROUPS, "host": "127.0.0.1", "port": 0})
        self.scheduler.serve({(0, 0): self.worker.metadata()})

    def step(self) -> kvferry.Outcome | None:
        """What an engine does between two runs of its model. Nothing here waits for the network.

        Returns what has become known, None if nothing has. With several ranks every rank's report goes to
        `Scheduler.report`, which says when all are done.
        """
        if self.scheduler.has_pending():
            self.worker.submit(self.scheduler.step())
        report = self.worker.poll_encoded()
        return None if report is None else self.scheduler.report(report)

    def outcomes(self) -> Iterator[kvferry.Outcome]:
        """Steps until the caller has seen enough."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            outcome = self.step()
            if outcome is not None:
                yield outcome
            time.sleep(0.001)  # in practice the model runs here
        sys.exit("error: the other engine did not do its part in time")

    def close(self) -> None:
        """The worker first: it uses the cache's memory."""
        self.worker.shutdown()
        self.scheduler.shutdown()


def prefill() -> None:
    """Computes two prompts, hands them over, and keeps their blocks until nobody needs them any more."""
    engine = Engine("prefill")
    kept = set()
    for prompt, blocks in {"one": [3, 9, 27, 17, 19], "two": [4, 8, 16, 31, 2]}.items():
        engine.cache[:, blocks] = prompt_cache(prompt)
        # A finished request that asked for a remote decode: its blocks must stay until `finished_sending`.
        keep, params = engine.scheduler.finished(
            prompt, {"do_remote_decode": True}, "complete", [blocks], PROMPT_TOKENS
        )
        assert keep
        kept.add(prompt)
        print(json.dumps({"prompt": prompt, "kv_transfer_params": params}), flush=True)
    for outcome in engine.outcomes():
        for prompt in outcome["finished_sending"]:
            print(f"prefill: the blocks of {prompt!r} are free again", file=sys.stderr)
            kept.remove(prompt)
        if not kept:
            break
    engine.close()


def load(engine: Engine, request: str, params: dict[str, object], blocks: list[int]) -> str | None:
    """Fetches a prompt into `blocks`. Returns None, or why it failed; the prompt is then to be computed here."""
    engine.scheduler.arrived(request, params)
    # Up to here the request only waits; the handshake goes on meanwhile, and heartbeats keep the prefill's lease.
    tokens, _ = engine.scheduler.matched(request, params, PROMPT_TOKENS, 0)
    engine.scheduler.allocated(request, params, [blocks], PROMPT_TOKENS, tokens)
    for outcome in engine.outcomes():
        for failure in outcome["failed_recving"]:
            if failure["request"] == request:
                return f"{failure['cause']}: {failure['message']}"
        if request in outcome["finished_recving"]:
            break
    return None


def decode() -> None:
    """Fetches one prompt, checks every byte, fails to fetch an unknown one, and gives the other one back unread."""
    engine = Engine("decode")
    one, two = (json.loads(sys.stdin.readline()) for _ in range(2))
    blocks = [11, 12, 5, 30, 1]

    cause = load(engine, "request 1", one["kv_transfer_params"], blocks)
    assert cause is None, cause
    assert np.array_equal(engine.cache[:, blocks], prompt_cache(one["prompt"]))
    print(f"decode: {prompt_cache('one').nbytes} bytes of {one['prompt']!r} are here, every byte right")

    unknown = {**one["kv_transfer_params"], "remote_request_id": "nobody's"}
    cause = load(engine, "request 2", unknown, [7, 8, 9, 10, 13])
    assert cause is not None
    print(f"decode: an unknown request fails by itself: {cause}")

    # A request that ends before it was loaded: the prefill engine's blocks are given back at once.
    engine.scheduler.arrived("request 3", two["kv_transfer_params"])
    engine.scheduler.finished("request 3", two["kv_transfer_params"], "aborted", [[]], 0)
    engine.step()
    sys.stdin.read()  # until the prefill engine has ended
    engine.close()


if __name__ == "__main__":
    roles = {"prefill": prefill, "decode": decode}
    if len(sys.argv) != 2 or sys.argv[1] not in roles:
        sys.exit("usage: engine.py prefill | engine.py decode")
    roles[sys.argv[1]]()
