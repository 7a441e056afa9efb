"""A vLLM engine without a model, in a process of its own."""

from __future__ import annotations

from lab import process
from mini_config import LIMIT, Settings
from mini_engine import Engine

# An engine imports vLLM for most of the time that it takes to start, so each is forked from a process that has done it.
process.preload(
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
)


class Remote(process.Remote):
    """An `Engine` in a process of its own; its methods are called by name."""

    call, start, result = process.Remote.ask, process.Remote.tell, process.Remote.answer

    def __init__(self, settings: Settings) -> None:
        super().__init__(Engine, settings, name="the engine", limit_s=2 * LIMIT)

    def wait_started(self) -> Remote:
        """Returns when the engine is ready."""
        self.wait_up()
        return self

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it runs."""
        return self.child.poll()

    def close(self) -> int | None:
        """The engine shuts down in good order; an engine that is gone already is no error."""
        if (status := self.child.poll()) is None:
            self.call("close")
            status = self.child.wait(LIMIT)
            self.kill()
            if status is None:
                raise TimeoutError("the engine did not end after its shutdown")
        return status
