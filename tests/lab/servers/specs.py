"""vLLM's command line and environment for the demo's engines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lab.common import DEPS, TESTS
from lab.demo.options import Options, Shape
from lab.servers import ray_on_cpu
from lab.servers.client import SERVED_NAME
from lab.servers.connectors import Connector
from lab.servers.server import ServerSpec

MAX_MODEL_LEN = 2048
# Enough for every prompt of a run at once, so that nothing is preempted.
KV_CACHE_BYTES = 256 * 2**20
# Resident memory of an engine on a CPU, measured: with one rank, and for each rank more.
GIB_FIRST_RANK = 3.1
GIB_NEXT_RANK = 1.4


@dataclass(frozen=True)
class Outputs:
    """Where the engines of one run write: a line per finished receive, and the cache of each request."""

    receives: Path
    dump: Path


def memory_gib(shape: Shape) -> float:
    """About how much memory an engine takes."""
    return GIB_FIRST_RANK + GIB_NEXT_RANK * (shape.ranks - 1)


def server_environment() -> dict[str, str]:
    """The environment of a server on this machine: no hub, no network but loopback, one thread for each model."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = _own_path()
    environment.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_CACHE_ROOT=str(DEPS / "vllm-cache"),
    )
    return environment


def _own_path() -> str:
    """Where the server finds the demo's own modules, before what this program was given itself."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(TESTS), *(entry for entry in given if entry and Path(entry).resolve() != TESTS)])


def _python_path(options: Options) -> str:
    """Where the server finds the demo's own modules and plug-ins."""
    if options.executor != "ray":
        return _own_path()
    return f"{_own_path()}:{ray_on_cpu.write_plugin(DEPS / 'demo-plugins' / 'ray')}"


def base_arguments(
    model: Path, dtype: str = "float32", longest: int = MAX_MODEL_LEN, cache_bytes: int = KV_CACHE_BYTES
) -> list[str]:
    """Of every server: its model, and how much it takes."""
    arguments = ["--model", str(model), "--served-model-name", SERVED_NAME, "--dtype", dtype]
    arguments += ["--max-model-len", str(longest), "--kv-cache-memory-bytes", str(cache_bytes)]
    return [*arguments, "--disable-uvicorn-access-log"]


def _arguments(model: Path, shape: Shape, options: Options, cache_bytes: int = KV_CACHE_BYTES) -> list[str]:
    # vLLM's CPU kernel for gated delta nets takes nothing else.
    dtype = "bfloat16" if options.model == "gdn" else "float32"
    arguments = base_arguments(model, dtype, cache_bytes=cache_bytes)
    if shape.block is not None:
        arguments += ["--block-size", str(shape.block)]
    if options.model == "mla":
        # Where the processor has AMX vLLM takes a backend that wants another dtype and other blocks.
        arguments += ["--attention-backend", "CPU_MLA"]
    if options.model in ("mamba2", "states"):
        # With prefix caching, vLLM's CPU kernel for Mamba2 does not give the states at block ends that are asked of it.
        arguments += ["--no-enable-prefix-caching"]
    if shape.pp > 1:
        # On a CPU vLLM's eager mode fails with pipeline stages; these settings compile nothing either.
        arguments += ["-cc.mode=DYNAMO_TRACE_ONCE", "-cc.backend=eager"]
    else:
        arguments += ["--enforce-eager"]
    arguments += ["--tensor-parallel-size", str(shape.tp), "--pipeline-parallel-size", str(shape.pp)]
    return arguments


def baseline_spec(model: Path, options: Options) -> ServerSpec:
    """A single server without a connector, which says what the tokens should be. Its blocks are the decode engine's."""
    return ServerSpec("baseline", _arguments(model, Shape(block=options.decode.block), options), server_environment())


def engine_spec(
    role: str,
    model: Path,
    options: Options,
    connector: Connector,
    outputs: Outputs,
    cache_bytes: int = KV_CACHE_BYTES,
) -> ServerSpec:
    """The prefill (kv_producer) or decode (kv_consumer) server."""
    producer = role == "kv_producer"
    shape = options.prefill if producer else options.decode
    arguments = _arguments(model, shape, options, cache_bytes)
    if options.executor == "ray" or shape.ranks > 1:
        arguments += ["--distributed-executor-backend", options.executor]
    larger = (shape.block or 0) > (options.prefill.block or shape.block or 0)
    if not producer and options.model in ("hybrid", "chunked") and larger:
        # The first block in a window then holds tokens that the prefill engine has dropped, so it must not be reused
        # for another prompt; kvferry refuses such a request otherwise.
        arguments += ["--no-enable-prefix-caching"]
    arguments += connector.arguments(role, options)
    environment = server_environment()
    environment.update(connector.environment(role, options, outputs.receives, outputs.dump))
    environment["PYTHONPATH"] = _python_path(options)
    if options.executor == "ray":
        environment.update(ray_on_cpu.environment(shape.ranks))
    return ServerSpec("prefill" if producer else "decode", arguments, environment)
