"""The connector's half in a worker process: registers the KV cache and passes steps and reports on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank, get_pp_group, get_tp_group

import kvferry

from .config import Options
from .geometry import Split, TokenShare, describe, transfer_layers
from .heads import KvHeads
from .host_buffer import CopyBlocks, HostBuffer
from .log import logger
from .metadata import KvferryConnectorMetadata, KvferryHandshakeMetadata, KvferryWorkerMetadata, RefusedLoad
from .stats import KvferryStats
from .step_queue import StepQueue, device_recorder
from .support import align_interleave, attention_kernels, check_served, compat_fields, has_host_buffer

SHUTDOWN_SECONDS = 10.0
"""The longest wait for transfers in flight when the worker process ends."""


def ask_for_amx() -> None:
    """Asks Linux for this process's use of AMX, where the processor has it.

    vLLM's attention on CPUs (0.32, `cpu_attention_with_kv_cache` in bfloat16) takes it without asking: in an engine
    that computes its prompts, a prefill's matrix products have asked before. Where prompts are loaded the first step
    may be a decode, which Linux ends by SIGILL.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning("Linux does not let this process use AMX, with which vLLM's attention in bfloat16 may end it")


class WorkerSide:
    """Does the work of `KvferryConnector` in a worker. All calls come from the model runner's thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        check_served(vllm_config, kv_cache_config)
        align_interleave(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        # Taken now: the model runner adds layers that share a cache to the groups later.
        self._layers = transfer_layers(kv_cache_config)
        # Block ids are unique within a group only, so that vLLM refuses flat ones where there are several groups
        # (and takes failed requests whole there).
        self._reports_blocks = len(kv_cache_config.kv_cache_groups) == 1
        self._worker: kvferry.Worker | None = None
        self._steps: StepQueue | None = None
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._has_host_buffer = has_host_buffer(vllm_config)
        self._host: HostBuffer | None = None
        self._metadata: KvferryHandshakeMetadata | None = None
        self._submitted: KvferryConnectorMetadata | None = None
        self._invalid_blocks: set[int] = set()
        self._stats = KvferryStats()
        self._reports: tuple[bytes, ...] = ()
        # The error of a worker that could not be ended before a sleep.
        self._not_ended: BaseException | None = None
        # Steps that came while the engine was asleep: its scheduler takes requests, and clients leave.
        self._asleep: list[tuple[bytes, bool]] = []
        # The last reports of workers that were ended before a sleep.
        self._last_reports: list[bytes] = []
        self._refused: dict[str, RefusedLoad] = {}
        # vLLM's request ids by the library's, where these differ.
        self._vllm_ids: dict[str, str] = {}
        # The mark of the step that runs, until its output has it.
        self._step_mark = 0

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Starts the worker and registers the memory behind `kv_caches`, each storage once."""
        if self._worker is not None or self._kv_caches:
            raise RuntimeError("the KV caches of this worker are registered already; they cannot be replaced")
        self._start(kv_caches)

    def set_copy_operation(self, copy_operation: CopyBlocks) -> None:
        """Takes vLLM's copy between device and host, after `register_kv_caches`. Without a host buffer, nothing needs
        it."""
        if self._host is not None:
            self._host.set_copy_operation(copy_operation)

    def unregister_kv_caches(self) -> None:
        """Ends the worker, so that nothing touches the memory any more. Peers see the connection closed."""
        self._check_ended()
        if self._worker is None or self._steps is None:
            return
        self._steps.flush()
        worker, self._worker, self._steps, self._metadata = self._worker, None, None, None
        try:
            last = worker.suspend(SHUTDOWN_SECONDS)
        except BaseException as error:
            self._not_ended = error
            raise
        if last is not None:
            self._last_reports.append(last)
        logger.info("The KV cache is released until the engine wakes up")

    def restore_kv_caches(self) -> None:
        """Starts a new worker for the same caches, wherever their memory is now. Its metadata is new."""
        self._check_ended()
        if self._worker is None and self._kv_caches:
            self._start(self._kv_caches)

    def _check_ended(self) -> None:
        # vLLM may try again.
        if self._not_ended is not None:
            raise RuntimeError(
                "the KV cache may still be read and written, because its worker could not be ended: restart the engine"
            ) from self._not_ended

    def _start(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        parallel = self._vllm_config.parallel_config
        kernels = attention_kernels(self._vllm_config)
        tp_rank, tp_size = get_tp_group().rank_in_group, parallel.tensor_parallel_size
        dcp_size, dcp_rank = get_dcp_world_size_and_rank(parallel.decode_context_parallel_size > 1)
        split = Split(tp_rank, tp_size, KvHeads(self._vllm_config), self._vllm_config.model_config)
        share = TokenShare(dcp_size, dcp_rank, parallel.cp_kv_cache_interleave_size)
        host = None
        if self._has_host_buffer:
            blocks, zeroed = self._kv_cache_config.num_blocks, self._kv_cache_config.needs_kv_cache_zeroing
            host = HostBuffer(kv_caches, self._layers, blocks, zeroed)
        caches = kv_caches if host is None else host.caches
        device = self._vllm_config.device_config.device_type
        if device == "cpu":
            ask_for_amx()
        layout = describe(self._kv_cache_config, self._layers, caches, kernels, split, share, device)
        engine_id, pp_rank = self._vllm_config.kv_transfer_config.engine_id, get_pp_group().rank_in_group
        worker = kvferry.Worker(
            {
                "engine_id": engine_id,
                "pp_rank": pp_rank,
                "tp_rank": tp_rank,
                "tp_size": tp_size,
                "pp_size": parallel.pipeline_parallel_size,
                "dcp_size": parallel.decode_context_parallel_size,
                "compat": compat_fields(self._vllm_config, kernels),
                "name": f"{engine_id} pp {pp_rank} tp {tp_rank}",
                **self._options.worker,
            }
        )
        try:
            for region in layout.regions:
                worker.register(region.addr, region.nbytes, region.kind, region.device, owner=caches)
            worker.set_geometry(layout.geometry)
            self._metadata = KvferryHandshakeMetadata(worker.metadata())
            # To the host buffer, what a step grants is copied before it is queued.
            steps = StepQueue(worker.submit, device_recorder(caches))
        except BaseException:
            worker.shutdown(SHUTDOWN_SECONDS)
            raise
        # The memory must outlive the registration.
        self._kv_caches, self._host = kv_caches, host
        self._worker, self._steps = worker, steps
        for step, grants in self._asleep:
            steps.add(step, grants)
        self._asleep = []
        logger.info(
            "Registered %s of %d layers: %d bytes in %d regions, %d blocks of %d groups",
            "the KV cache" if host is None else "a host buffer for the KV cache",
            len(self._layers),
            sum(region.nbytes for region in layout.regions),
            len(layout.regions),
            self._kv_cache_config.num_blocks,
            len(layout.geometry["groups"]),
        )

    @property
    def handshake_metadata(self) -> KvferryHandshakeMetadata | None:
        """This rank's metadata, once the KV caches are registered.

        Raises `RuntimeError` if nothing can be copied into the host buffer."""
        if self._host is not None:
            self._host.check()
        return self._metadata

    def submit(self, metadata: KvferryConnectorMetadata) -> None:
        """Hands over one engine step's work, once: a second call with the same step does nothing."""
        if metadata is self._submitted:
            return
        self._submitted = metadata
        self._refused.update(metadata.refused)
        for own, request in metadata.long_ids.items():
            if request is None:
                self._vllm_ids.pop(own, None)
            else:
                self._vllm_ids[own] = request
        self._step_mark = metadata.step_mark
        if metadata.copies is not None and self._host is not None:
            self._host.save_and_prepare(metadata.copies)
        if not metadata.step:
            return
        if self._steps is None and self._kv_caches:
            self._asleep.append((metadata.step, metadata.grants))
        else:
            self._running().add(metadata.step, metadata.grants)

    def collect(self) -> KVConnectorTransferResults:
        """Returns the transfers that ended since the last call. The `take_*` calls of the same step return the rest."""
        results = KVConnectorTransferResults()
        for request, refused in self._refused.items():
            results.finished_recving.add(request)
            self._failed(results, request, refused.blocks)
            if self._options.telemetry:
                self._stats = self._stats.aggregate(KvferryStats({"recv_failures": {"invalid_request": 1}}))
        self._refused = {}
        if self._steps is not None:
            self._steps.advance()
        reports, self._last_reports = self._last_reports, []
        if self._worker is not None and (encoded := self._worker.poll_encoded()) is not None:
            reports.append(encoded)
        for encoded in reports:
            report = kvferry.decode_report(encoded)
            received = [self._vllm_id(request) for request in report["finished_recving"]]
            results.finished_sending.update(map(self._vllm_id, report["finished_sending"]))
            results.finished_recving.update(received)
            for failure in report["failed_recving"]:
                self._failed(results, self._vllm_id(failure["request"]), failure["invalid_blocks"])
            if self._host is not None:
                self._host.finish_loads(received, results.failed_recving)
            self._stats = self._stats.aggregate(KvferryStats.from_report(report))
            self._reports += (encoded,)
        return results

    def _vllm_id(self, request: str) -> str:
        """Returns vLLM's id of a request by the library's."""
        return self._vllm_ids.get(request, request)

    def _failed(self, results: KVConnectorTransferResults, request: str, blocks: Iterable[int]) -> None:
        # The side that decided it has logged why.
        results.failed_recving.add(request)
        if self._reports_blocks:
            self._invalid_blocks.update(blocks)

    def take_invalid_blocks(self) -> set[int]:
        """Takes the blocks of failed receives since the last call; none where there are several KV-cache groups."""
        taken, self._invalid_blocks = self._invalid_blocks, set()
        return taken

    def take_stats(self) -> KvferryStats | None:
        """Takes the figures since the last call, None if there are none."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, KvferryStats()
        return taken

    def take_worker_metadata(self) -> KvferryWorkerMetadata | None:
        """Takes the reports for the scheduler side since the last call, None if there are none."""
        if not self._reports and not self._step_mark:
            return None
        taken = KvferryWorkerMetadata(self._reports, self._step_mark)
        self._reports, self._step_mark = (), 0
        return taken

    def shutdown(self) -> None:
        """Ends all transfers and releases the memory. May be called again."""
        worker, self._worker, self._steps = self._worker, None, None
        if worker is not None:
            worker.shutdown(SHUTDOWN_SECONDS)
        self._kv_caches, self._host = {}, None

    def _running(self) -> StepQueue:
        if self._steps is None:
            raise RuntimeError("a step with transfers came before the KV caches were registered or after the shutdown")
        return self._steps
