"""A vLLM engine without a model, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from mini_config import LIMIT, Settings
from mini_engine import Engine
from peer import freeze


def _serve(pipe: Connection, environment: dict[str, str], settings: Settings) -> None:
    try:
        # The server that this was forked from has the environment of an earlier test.
        os.environ.clear()
        os.environ.update(environment)
        engine = Engine(settings)
        pipe.send(("ok", None))
        while (call := pipe.recv()) is not None:
            try:
                pipe.send(("ok", getattr(engine, call[0])(*call[1:])))
            except Exception:
                pipe.send(("error", traceback.format_exc()))
        engine.shutdown()
        pipe.send(("ok", None))
    except EOFError:
        pass
    except Exception:
        pipe.send(("error", traceback.format_exc()))


# An engine imports vLLM for most of the time that it takes to start, so each is forked from a process that has done it.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "vllm.config",
        "vllm.distributed.kv_transfer.kv_connector.utils",
        "vllm.engine.arg_utils",
        "vllm.model_executor.layers.attention_layer_base",
        "vllm.model_executor.models.llama",
        "vllm.v1.attention.backends.triton_attn",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.structured_output",
        "vllm.v1.worker.kv_connector_model_runner_mixin",
        "vllm.v1.worker.utils",
    ]
)


class Remote:
    """An `Engine` in a process of its own; its methods are called by name."""

    def __init__(self, settings: Settings) -> None:
        self._pipe, other = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(other, dict(os.environ), settings), daemon=True)
        self._process.start()
        other.close()

    def wait_started(self) -> Remote:
        """Returns when the engine is ready."""
        self._answer("start")
        return self

    def call(self, method: str, *arguments: Any) -> Any:
        """`method(*arguments)` in the engine."""
        self.start(method, *arguments)
        return self.result(method)

    def start(self, method: str, *arguments: Any) -> None:
        """Begins `method(*arguments)` in the engine; `result` waits for its end."""
        self._pipe.send((method, *arguments))

    def result(self, method: str) -> Any:
        """What the method that was started returned."""
        return self._answer(method)

    def _answer(self, method: str) -> Any:
        if not self._pipe.poll(2 * LIMIT):
            raise TimeoutError(f"the engine did not answer {method}")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(f"{method} failed in the engine:\n{value}")
        return value

    def freeze(self) -> None:
        """The engine does nothing, and is not gone."""
        freeze(self._pid)

    def thaw(self) -> None:
        """The engine goes on."""
        os.kill(self._pid, signal.SIGCONT)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """The engine dies at once."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """The engine shuts down in good order; an engine that is gone already is no error."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._answer("shutdown")
            self._process.join(LIMIT)
            if self._process.is_alive():
                self.kill()
                raise TimeoutError("the engine did not end after its shutdown")
