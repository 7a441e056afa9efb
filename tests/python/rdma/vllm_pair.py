"""A prefill and a decode engine of real vLLM over an RDMA device: run by `scripts/rdma-test --vllm`.

Each engine is one process. The decode engine answers each prompt twice, by itself and with the prefill engine's cache,
and the tokens must be equal. With `--key`, both have a key. Exit status 0 if the tokens are equal and the cache came
over the device.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvferry.cli.key import write_key
from lab.servers.model import make_model
from rdma_side import sent_packets

PROMPTS = 3
PROMPT_TOKENS = 200
ANSWER_TOKENS = 12
BLOCKS = {"kv_producer": 32, "kv_consumer": 64}
"""Tokens in a block, by role."""
STEP_S = 0.01
LIMITS = {
    "handshake_timeout_ms": 300_000,
    "transfer_timeout_ms": 600_000,
    "lease_ms": 300_000,
    "verdict_timeout_ms": 100_000,
}
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""For engines that find no network and share a small machine."""


def external_hits(engine: Any) -> int:
    """Prompt tokens that the engine has got from the other one, as vLLM counts them."""
    name = "vllm:external_prefix_cache_hits"
    return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == name)


def serve(role: str, model: str, pipe: Connection) -> None:
    """An engine: answers (prompt, answer's length, kv_transfer_params) with (tokens, kv_transfer_params, hits)."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="KvferryConnector", kv_role=role, kv_connector_extra_config={"port": 0, **LIMITS}
    )
    engine = LLM(
        model,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        kv_cache_memory_bytes=64 << 20,
        block_size=BLOCKS[role],
        kv_transfer_config=connector,
    )
    pipe.send("up")
    while True:
        # As a server's loop does: the scheduler answers for the blocks that the other engine reads.
        while not pipe.poll(STEP_S):
            engine.llm_engine.step()
        if (asked := pipe.recv()) is None:
            return
        prompt, length, params = asked
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        (answer,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        pipe.send((list(answer.outputs[0].token_ids), answer.kv_transfer_params, external_hits(engine)))


def check(prefill: Connection, decode: Connection) -> None:
    dice = random.Random(5)
    for number in range(PROMPTS):
        prompt = [dice.randrange(10, 500) for _ in range(PROMPT_TOKENS + number)]
        decode.send((prompt, ANSWER_TOKENS, None))
        alone, _, hits = decode.recv()
        prefill.send((prompt, 1, {"do_remote_decode": True}))
        _, params, _ = prefill.recv()
        before = sent_packets()
        decode.send((prompt, ANSWER_TOKENS, params))
        together, _, now = decode.recv()
        packets = {name: count - before[name] for name, count in sent_packets().items()}
        print(f"prompt of {len(prompt)} tokens: {now - hits} from the prefill engine, packets {packets}, {together}")
        assert together == alone, f"other tokens than the decode engine's own: {alone}"
        assert now - hits >= len(prompt) // BLOCKS["kv_consumer"] * BLOCKS["kv_consumer"], "computed here, not loaded"
        assert sum(packets.values()) > 0, "no packet went over a device"


def main() -> int:
    folder = Path(tempfile.mkdtemp())
    if "--key" in sys.argv:
        write_key(folder / "key")
        os.environ["KVFERRY_KEY_FILE"] = str(folder / "key")
    model = str(make_model("llama", folder))
    spawn = multiprocessing.get_context("spawn")
    pipes, engines = [], []
    for role in BLOCKS:
        ours, theirs = spawn.Pipe()
        engine = spawn.Process(target=serve, args=(role, model, theirs), daemon=True)
        engine.start()
        theirs.close()
        pipes.append(ours)
        engines.append(engine)
    for pipe in pipes:
        assert pipe.recv() == "up"
    check(*pipes)
    for pipe in pipes:
        pipe.send(None)
    for engine in engines:
        engine.join()
    print("tokens equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
