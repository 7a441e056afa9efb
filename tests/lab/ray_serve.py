"""Ray Serve LLM's application of a prefill and a decode deployment, with kvferry: `scripts/ray-serve`."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm
from kvferry import trace

from lab.common import DEPS, ROOT, free_port, make_folder, say
from lab.demo.options import parse_options
from lab.servers.client import SERVED_NAME, ask
from lab.servers.model import make_model
from lab.servers.proxy import open_session
from lab.servers.server import RUN_TAG, ServerFailed, ServerGroup
from lab.servers.specs import KV_CACHE_BYTES, MAX_MODEL_LEN, baseline_spec, server_environment

START_LIMIT_S = 600.0
PROMPT_TOKENS = (40, 300, 500, 900)
ANSWER_TOKENS = 24
PROCESSORS = 8
"""That Ray is told of: each replica and Serve's own actors ask for one, or for none."""

ENGINE = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "kv_cache_memory_bytes": KV_CACHE_BYTES,
    "enforce_eager": True,
}


def deployment(role: str, model: Path, folder: Path) -> dict[str, Any]:
    """Ray's configuration of one of the two deployments."""
    transfer = {
        "kv_connector": "KvferryConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"trace": str(folder / f"{role}-%p.trace")},
    }
    return {
        "model_loading_config": {"model_id": SERVED_NAME, "model_source": str(model)},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"num_replicas": 1},
        "log_engine_metrics": False,
        "engine_kwargs": {**ENGINE, "kv_transfer_config": transfer},
    }


async def answers(url: str, prompts: list[list[int]]) -> list[list[int] | str]:
    """What is said to each prompt, or why nothing is."""
    said: list[list[int] | str] = []
    async with open_session() as session:
        for prompt in prompts:
            try:
                said.append(await ask(session, url, prompt, ANSWER_TOKENS))
            except ServerFailed as error:
                said.append(str(error)[:300])
    return said


async def alone(group: ServerGroup, model: Path, prompts: list[list[int]]) -> list[list[int] | str]:
    """The answers of a single server without a connector."""
    server = group.start(baseline_spec(model, parse_options([])))
    async with open_session() as session:
        await group.wait_ready([server], session, START_LIMIT_S)
    return await answers(server.url, prompts)


def deployed(group: ServerGroup, model: Path, folder: Path, prompts: list[list[int]]) -> list[list[int] | str]:
    """The application's answers. All of Ray's processes have ended when this returns."""
    import ray
    from kvferry.ray import build_pd_openai_app
    from ray import serve

    # Its processes get this program's environment, and are known by it. A path of a socket has 107 bytes.
    os.environ[RUN_TAG] = group.tag
    sessions = tempfile.mkdtemp(prefix="kvf-ray-")
    try:
        ray.init(num_cpus=PROCESSORS, include_dashboard=False, object_store_memory=200 * 2**20, _temp_dir=sessions)
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        configs = {
            "prefill_config": deployment("kv_producer", model, folder),
            "decode_config": deployment("kv_consumer", model, folder),
        }
        serve.run(build_pd_openai_app({**configs, "ingress_deployment_config": {"num_replicas": 1}}))
        found = asyncio.run(answers(f"http://127.0.0.1:{port}", prompts))
        serve.shutdown()
        return found
    finally:
        ray.shutdown()
        group.stop()
        shutil.rmtree(sessions, ignore_errors=True)


def main() -> int:
    """Runs it and prints what was found; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = make_folder("ray-serve")
    os.environ.update(server_environment())
    # Ray's limits are for processors that do nothing else.
    ray_limits = dict.fromkeys(("RAY_gcs_server_port_wait_time_s", "RAY_gcs_server_request_timeout_seconds"), "180")
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", **ray_limits}.items():
        os.environ.setdefault(name, value)
    model = make_model("llama", DEPS / "models")
    dice = random.Random("ray-serve")
    prompts = [[dice.randrange(10, 500) for _ in range(tokens)] for tokens in PROMPT_TOKENS]
    group = ServerGroup(folder)
    try:
        say("a single server")
        expected = asyncio.run(alone(group, model, prompts))
        group.stop()
        say("Ray Serve LLM")
        found = deployed(group, model, folder, prompts)
    finally:
        group.stop()
    import ray

    equal = sum(one == other and isinstance(one, list) for one, other in zip(found, expected, strict=True))
    lives = trace.read(folder.glob("*.trace"))
    received = [receive for receive in lives.receives if receive.outcome == "received" and receive.bytes]
    print(f"Ray {ray.__version__}, vLLM {vllm.__version__}; logs and traces in {folder.relative_to(ROOT)}")
    print(f"{equal} of {len(prompts)} answers equal a single server's")
    print(f"the decode deployment received {len(received)} prompts, {sum(each.bytes for each in received)} bytes")
    for one, other in zip(found, expected, strict=True):
        if one != other or isinstance(one, str):
            print(f"  {one} is not {other}")
    return 0 if equal == len(prompts) == len(received) else 1


if __name__ == "__main__":
    sys.exit(main())
