"""A prefill and a decode engine of real vLLM over an RDMA device: run by `scripts/rdma-test --vllm`.

Each engine is one process. The decode engine answers each prompt twice, by itself and with the prefill engine's cache,
and the tokens must be equal. With `--key`, both have a key. Exit status 0 if the tokens are equal and the cache came
over the device.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvferry.cli.key import write_key
from lab.process import Remote
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


class Engine:
    """An engine of real vLLM."""

    def __init__(self, role: str, model: str) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = KVTransferConfig(
            kv_connector="KvferryConnector", kv_role=role, kv_connector_extra_config={"port": 0, **LIMITS}
        )
        self._engine = LLM(
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

    def turn(self, called: bool) -> float:
        """As a server's loop does: the scheduler answers for the blocks that the other engine reads."""
        if not called:
            self._engine.llm_engine.step()
        return STEP_S

    def answer(self, prompt: list[int], length: int, params: Any) -> tuple[list[int], Any, int]:
        """Tokens, kv_transfer_params, and the prompt tokens so far that came from the other engine."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        (answer,) = self._engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids), answer.kv_transfer_params, external_hits(self._engine)

    def close(self) -> None:
        """The process ends."""


def check(prefill: Remote, decode: Remote) -> None:
    dice = random.Random(5)
    for number in range(PROMPTS):
        prompt = [dice.randrange(10, 500) for _ in range(PROMPT_TOKENS + number)]
        alone, _, hits = decode.ask("answer", prompt, ANSWER_TOKENS, None)
        _, params, _ = prefill.ask("answer", prompt, 1, {"do_remote_decode": True})
        before = sent_packets()
        together, _, now = decode.ask("answer", prompt, ANSWER_TOKENS, params)
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
    with ExitStack() as stack:
        engines = [Remote(Engine, role, model, name=role, environment=ENVIRONMENT, limit_s=1500) for role in BLOCKS]
        for engine in engines:
            stack.callback(engine.close)
        check(*engines)
    print("tokens equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
