"""Run as a program: imports vLLM once, and becomes one API server for each line on standard input.

Importing vLLM is most of what the start of a server with a tiny model costs, once in the API server and once in its
engine core. Servers are forked from this process, and engine cores from the servers: vLLM's CPU platform would spawn
those.

A line is JSON: the server's arguments, its environment, the file for its output, and the network namespace to live in
with the file that it sees as /etc/hosts, or null for both. The answer is a line with the process id. The parent of the
server is the process that started this one, if that has made itself a subreaper.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from typing import Any

from lab.network import enter

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
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def _fork_engine_cores() -> None:
    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = forking


def _enter(netns: str, hosts: str) -> None:
    """Moves this process into a network namespace, with a file of its own in the place of /etc/hosts."""
    enter(netns)
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"cannot put {hosts} in the place of /etc/hosts")

    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    check(libc.mount(hosts.encode(), b"/etc/hosts", None, ctypes.c_ulong(_MS_BIND), None))


def _serve(order: dict[str, Any], parent: int) -> None:
    """In the forked process: an API server, until it ends."""
    os.setpgrp()
    while os.getppid() == parent:
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    output = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if order["netns"] is not None:
        _enter(order["netns"], order["hosts"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = [SERVER, *order["arguments"]]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def _fork(order: dict[str, Any]) -> int:
    """A server's process id, when it has its final parent."""
    receive, send = os.pipe()
    first = os.fork()
    if first:
        os.close(send)
        pid = int(os.read(receive, 32))
        os.close(receive)
        os.waitpid(first, 0)
        return pid
    # The server's parent ends at once, so that the server gets another.
    between = os.getpid()
    second = os.fork()
    if second:
        os.write(send, str(second).encode())
        os._exit(0)
    status = 1
    try:
        os.close(receive)
        os.close(send)
        _serve(order, between)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> int:
    """Until standard input ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        print(f"error: {threads} threads after the imports: a fork would lose them", file=sys.stderr)
        return 1
    _fork_engine_cores()
    print("ready", flush=True)
    for line in iter(sys.stdin.buffer.readline, b""):
        order = json.loads(line)
        print(_fork(order), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
