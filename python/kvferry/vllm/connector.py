"""`KvferryConnector`: vLLM's connector interface over the two sides. `docs/internals.md` has the order of calls."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .beside import check_children, children
from .config import parse_options
from .log import logger, route_library_log
from .metadata import KvferryConnectorMetadata
from .scheduler import SchedulerSide
from .stats import KvferryPromMetrics, KvferryStats
from .stock import translate, vain_variables
from .worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def _check_alone() -> None:
    """Raises `InvalidArgumentError` beside another P/D connector. A child of `MultiConnector` gets only its own
    configuration; the whole one is vLLM's current one while it makes a worker's connector."""
    whole = get_current_vllm_config_or_none()
    if whole is not None and (transfer := whole.kv_transfer_config) is not None:
        check_children(children(transfer.kv_connector, transfer.kv_connector_extra_config))


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves a prompt's KV cache from a prefill engine to a decode engine with kvferry.

    An instance has one of two roles: in the scheduler's process it decides what to load and send, in each worker it
    owns the registered KV cache and the progress thread. Every method returns without waiting for the network, except
    `register_kv_caches`, `unregister_kv_caches`, `restore_kv_caches`, the handshake metadata calls and `shutdown`.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_alone()
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_role == "kv_both":
            logger.warning_once("kv_role kv_both is deprecated by vLLM: use kv_producer or kv_consumer")
        options = parse_options(transfer.kv_connector_extra_config)
        _, taken, left_out = translate(transfer.kv_connector_extra_config)
        for note in taken:
            logger.info_once(note)
        for note in left_out + vain_variables(os.environ):
            logger.warning_once(note)
        route_library_log()
        self._worker_side: WorkerSide | None = None
        self._scheduler_side: SchedulerSide | None = None
        if role == KVConnectorRole.WORKER:
            self._worker_side = WorkerSide(vllm_config, kv_cache_config, options)
        else:
            self._scheduler_side = SchedulerSide(vllm_config, kv_cache_config, options)

    @property
    def _worker(self) -> WorkerSide:
        assert self._worker_side is not None, "a method of the worker role was called on the scheduler role"
        return self._worker_side

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "a method of the scheduler role was called on the worker role"
        return self._scheduler_side

    # --- class methods

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """`LBHNC`: a layer's block is then one run of bytes, with each head's part contiguous in it, so that a whole
        block is one operation and neighbouring blocks merge. With MLA there is one head and every order is the same.
        """
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Returns True. vLLM asks from 0.33 on, which announces that the KV cache is unmapped and mapped again."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Builds figures from the plain form in which processes send them."""
        return KvferryStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Builds the metrics `vllm:kvferry_*`."""
        return KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Starts the worker and registers the KV cache."""
        self._worker.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Takes the platform's copy of blocks, for an engine with a host buffer."""
        self._worker.set_copy_operation(copy_operation)

    def unregister_kv_caches(self) -> None:
        """Stops all use of the KV cache before the engine sleeps (from vLLM 0.33 on)."""
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Starts a new worker when the engine wakes up, before vLLM asks for `get_handshake_metadata` again."""
        self._worker.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns this rank's metadata for the scheduler side."""
        return self._worker.handshake_metadata

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Submits the step's work, where no block has to be zeroed. This call comes before the model runs,
        `start_load_kv` after it: a load submitted here does not wait for a forward pass that it has nothing to do with.
        Blocks given to a load are not written by a step in flight: vLLM defers freeing them where batches overlap
        (`defer_block_free`). But zeroing of new blocks, which only recurrent state and mixed precisions need, comes
        between the two calls."""
        if not self._kv_cache_config.needs_kv_cache_zeroing:
            self._submit(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submits the step's work, if `handle_preemptions` has not."""
        self._submit(self._get_connector_metadata())

    def _submit(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, KvferryConnectorMetadata)
        self._worker.submit(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request runs only once all of its cache is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Does nothing: the decode engine reads from the cache itself. A host buffer gets a prefill's blocks when its
        lease is granted."""

    def wait_for_save(self) -> None:
        """Does nothing, as `save_kv_layer`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the sends and receives that ended since the last call."""
        return self._worker.collect()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns what `get_transfer_results` does, without failures."""
        results = self._worker.collect()
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks of receives that the last `get_transfer_results` reported as failed. With several KV-cache
        groups there are none: vLLM takes failures by request there."""
        return self._worker.take_invalid_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns figures since the last call, None if there are none. vLLM adds up those of both roles."""
        if self._worker_side is not None:
            return self._worker_side.take_stats()
        return self._scheduler.take_stats()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns this step's reports for the scheduler side."""
        return self._worker.take_worker_metadata()

    # --- scheduler role

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Returns False: a load brings all that follows the tokens that every group has, its state too."""
        return False

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Does what `set_xfer_handshake_metadata_pp_aware` does, for one pipeline stage."""
        self._scheduler.serve({(0, tp_rank): entry for tp_rank, entry in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Takes all ranks' metadata and starts the handshake listener, which is bound when this returns."""
        self._scheduler.serve(metadata)

    def on_new_request(self, request: Request) -> None:
        """Contacts the producer of a request with a remote prefill before the request is scheduled."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of tokens to load from the prefill engine. Has no side effects."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Returns all transferable groups: a load brings the request's own blocks, not those of a store."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Starts the load, or releases the lease if nothing is to be loaded."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the work for the workers since the last call."""
        return self._scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes in the workers' reports."""
        self._scheduler.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Does what `request_finished_all_groups` does, for one group."""
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether to keep a finished request's blocks, and the params for the decode engine."""
        return self._scheduler.finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """Evicts the oldest conversation for a running request that needs blocks, which is better than to preempt
        another. Returns whether blocks of this or an earlier one will be free soon."""
        return self._scheduler.make_room()

    def reset_cache(self) -> bool | None:
        """Evicts all conversations that are kept for their next turns, as after an update of the weights."""
        self._scheduler.forget_histories()
        return None

    def engine_paused(self, paused: bool) -> None:
        """Notes that the engine pauses, falls asleep or shuts down (`pause.watch`), or goes on."""
        self._scheduler.pause(paused)

    def has_pending_push_work(self) -> bool:
        """Returns whether the engine must step once more to hand out a release, an abort or a lease."""
        return self._scheduler.has_pending()

    # --- both roles

    def shutdown(self) -> None:
        """Ends transfers and the handshake listener. May be called again."""
        if self._worker_side is not None:
            self._worker_side.shutdown()
        if self._scheduler_side is not None:
            self._scheduler_side.shutdown()
