"""vLLM's stock NixlConnector, observed, the same without its two costly settings, and both with the dump of
`cache_dump.py`.

`ObservedNixlConnector` behaves as the stock connector: it only writes down what NIXL's telemetry says of each
finished read, one JSON line per rank and request, into the file that KVFERRY_REQUEST_LOG names.

`QuietNixlConnector` additionally has NIXL's progress thread off and leaves the worker's CPU affinity alone. As
shipped the progress thread burns a core per worker even when idle, and every worker pins its main thread to the
machine's last core. Neither can be chosen by an option of the connector, so both are replaced while the worker is made.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from lab.probes.cache_dump import CacheDump

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

REQUEST_LOG = "KVFERRY_REQUEST_LOG"


class _Observer:
    """Writes a line for each request whose reads are done."""

    def __init__(self, worker: Any, path: str) -> None:
        self._worker = worker
        self._path = path
        self._telemetry: dict[int, Any] = {}
        self._pop_done = worker._pop_done_transfers
        self._get_telemetry = worker.nixl_wrapper.get_xfer_telemetry
        worker._pop_done_transfers = self._observed_pop_done
        worker.nixl_wrapper.get_xfer_telemetry = self._observed_telemetry
        self._sums: dict[str, list[float]] = {}

    def _observed_telemetry(self, handle: Any) -> Any:
        result = self._get_telemetry(handle)
        self._telemetry[id(handle) if not isinstance(handle, int) else handle] = result
        return result

    def _observed_pop_done(self, transfers: dict[str, list[Any]]) -> Any:
        if not transfers:
            return self._pop_done(transfers)
        before = {request: list(handles) for request, handles in transfers.items()}
        done, failed = self._pop_done(transfers)
        for request, handles in before.items():
            sums = self._sums.setdefault(request, [0.0, 0.0])
            for handle in handles:
                result = self._telemetry.pop(handle if isinstance(handle, int) else id(handle), None)
                if result is not None:
                    sums[0] += result.totalBytes
                    sums[1] = max(sums[1], result.xferDuration)
            if request in done:
                self._write(request, *self._sums.pop(request))
        return done, failed

    def _write(self, request: str, size: float, duration_us: float) -> None:
        meta = self._worker._recving_metadata.get(request)
        blocks = sum(len(group) for group in meta.local_block_ids) if meta is not None else 0
        # One write to a file opened for appending: lines of several ranks do not mix.
        with open(self._path, "a", encoding="utf-8") as log:
            log.write(json.dumps([request, blocks, int(size), duration_us]) + "\n")


class ObservedNixlConnector(NixlPullConnector):
    """The stock connector with a line per finished read."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        path = os.environ.get(REQUEST_LOG)
        if role == KVConnectorRole.WORKER and path:
            self._observer = _Observer(self.connector_worker, path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """While a worker is made: agent configurations without the progress thread, and no change of CPU affinity."""
    make_config = base_worker.nixl_agent_config
    affinity = os.sched_setaffinity

    def config_without_thread(**settings: Any) -> Any:
        return make_config(**{**settings, "enable_prog_thread": False, "num_threads": 0})

    base_worker.nixl_agent_config = config_without_thread
    os.sched_setaffinity = lambda _pid, _cores: None
    try:
        yield
    finally:
        base_worker.nixl_agent_config = make_config
        os.sched_setaffinity = affinity


class QuietNixlConnector(ObservedNixlConnector):
    """The stock connector with its progress thread and CPU pinning off."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        with _quiet():
            super().__init__(vllm_config, role, kv_cache_config)


class DumpedNixlConnector(CacheDump, ObservedNixlConnector):
    """`ObservedNixlConnector`, which also writes down what it sent and received."""


class DumpedQuietNixlConnector(CacheDump, QuietNixlConnector):
    """`QuietNixlConnector`, which also writes down what it sent and received."""
