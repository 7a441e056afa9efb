"""The two ways in which vLLM's model runners call a connector's worker side, with vLLM's own code.

They are the mixin of the older runner (`vllm/v1/worker/gpu_model_runner.py`), which its CPU build uses, and
`ActiveKVConnector` of the newer one, which GPUs use by default (`vllm/v1/worker/gpu/model_runner.py`). Both need a GPU
for the model only, and there is none here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

RunnerName = Literal["mixin", "active"]


def make(name: RunnerName, config: Any, kv_cache_config: Any, views: dict[str, Any]) -> Any:
    """Makes the connector's worker side as vLLM's worker does, with the caches registered, and its runner."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_initialized

    ensure_kv_transfer_initialized(config, kv_cache_config)
    if name == "active":
        return Active(config, views)
    connector = get_kv_transfer_group()
    connector.register_kv_caches(views)
    connector.set_host_xfer_buffer_ops(copy_kv_blocks)
    return Mixin(config)


class Mixin:
    """As `GPUModelRunner.execute_model` of the older runner."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def run(self, scheduled: Any, compute: Callable[[], None]) -> Any:
        """One step with `compute` as the forward pass; the connector's output, None if it had nothing to say."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        get_kv_transfer_group().handle_preemptions(scheduled.kv_connector_metadata)
        if not scheduled.total_num_scheduled_tokens:
            ran = KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self._config)
            return ran.kv_connector_output
        with (
            set_forward_context(None, self._config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as output,
        ):
            compute()
        return output


class Active:
    """As `GPUModelRunner.execute_model` and `sample_tokens` of the newer runner."""

    def __init__(self, config: Any, views: dict[str, Any]) -> None:
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector

        self._config = config
        self._connector = get_kv_connector(config, views)
        assert isinstance(self._connector, ActiveKVConnector)

    def run(self, scheduled: Any, compute: Callable[[], None]) -> Any:
        """As `Mixin.run`. The output is taken when tokens are sampled, after the forward pass and its context."""
        from vllm.forward_context import set_forward_context

        if not scheduled.total_num_scheduled_tokens:
            return self._connector.no_forward(scheduled).kv_connector_output
        requests = list(scheduled.num_scheduled_tokens)
        batch: Any = SimpleNamespace(
            req_ids=requests, num_tokens=scheduled.total_num_scheduled_tokens, idx_mapping=list(range(len(requests)))
        )
        with set_forward_context(None, self._config):
            self._connector.pre_forward(scheduled, batch)
            compute()
        self._connector.finish_forward()
        return self._connector.post_forward(scheduled.finished_req_ids)
