"""vLLM's API server in a process that is forked from one that has imported vLLM.

Importing vLLM is most of what the start of a server with a tiny model costs, once in the API server and once in its
engine core. So the fork server imports what it takes (`lab.process.preload`), and engine cores are forked from the API
servers: vLLM's CPU platform would spawn them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from lab.network import Host, enter

SERVER = "vllm.entrypoints.openai.api_server"
IMPORTED = (
    SERVER,
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
)


def serve(arguments: list[str], log: Path, host: Host) -> None:
    """An API server on a host, until it ends. Its output is appended to `log`."""
    if (threads := len(os.listdir(f"/proc/{os.getppid()}/task"))) != 1:
        raise RuntimeError(f"it is forked from a process with {threads} threads, and has lost all but one")
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if host.netns is not None:
        enter(host.netns, host.hosts_file)
    multiprocessing.set_start_method("fork", force=True)
    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = forking
    sys.argv = [SERVER, *arguments]
    status = 1
    try:
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without waiting for threads, of which vLLM leaves some.
        os._exit(status)
