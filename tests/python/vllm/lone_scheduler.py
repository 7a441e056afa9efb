"""vLLM's scheduler with the connector's scheduler side, without workers: what they would report is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kvferry
import numpy as np
from mini_config import BLOCK, Settings, kv_cache_config, vllm_config
from mini_engine import Engine

PAGE = 64


class LoneScheduler(Engine):
    """One engine's scheduler. Steps compute nothing; `step` is told what the workers say."""

    def __init__(self, stack: ExitStack, role: str, model: Path) -> None:
        from kvferry.vllm.metadata import KvferryHandshakeMetadata
        from vllm.config import set_current_vllm_config
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        settings = Settings(role, str(model), 1, "fail", extra={"advertise_local": True})
        self.settings, self.block = settings, BLOCK
        config = vllm_config(settings)
        config.cache_config.num_gpu_blocks = settings.blocks
        self.kv_cache_config = kv_cache_config(settings)
        with set_current_vllm_config(config):
            self.scheduler = Scheduler(
                config, self.kv_cache_config, StructuredOutputManager(config), BLOCK, log_stats=True
            )
        stack.callback(self.scheduler.shutdown)
        connector: Any = self.scheduler.connector
        self.connector = connector
        # A rank that has the model's group, so that there is something to serve.
        memory = np.zeros(settings.blocks * BLOCK * PAGE, dtype=np.uint8)
        worker = stack.enter_context(kvferry.Worker({"engine_id": config.kv_transfer_config.engine_id}))
        area = {
            **{"layer": "l", "part": "kv", "group": 0, "region": worker.register(memory.ctypes.data, memory.nbytes)},
            **{"offset": 0, "num_blocks": settings.blocks, "block_stride": BLOCK * PAGE, "heads": 1, "first_head": 0},
            **{"total_heads": 1, "head_stride": BLOCK * PAGE, "tokens": BLOCK, "token_stride": PAGE, "content": PAGE},
        }
        worker.set_geometry({"groups": [{"kind": "full", "block_size": BLOCK}], "areas": [area]})
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KvferryHandshakeMetadata(worker.metadata())})
        init_none_hash(sha256)
        self.hasher: Callable[..., Any] = get_request_block_hasher(BLOCK, sha256)
        self.answers = {}
        pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = pool.get_num_free_blocks()

    def turn(
        self, sent: Iterable[str] = (), received: Iterable[str] = (), ids: bool = True, reports: bool = True
    ) -> Any:
        """One engine step, in which workers report these requests as over: by vLLM's ids, by their own reports, or
        both. Returns what the step had for the workers."""
        from kvferry.vllm.metadata import KvferryWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        requests, tokens = list(scheduled.num_scheduled_tokens), []
        for request in requests:
            state = self.scheduler.requests[request]
            tokens.append([7] if state.num_computed_tokens >= state.num_tokens else [])
        output = KVConnectorOutput()
        if ids:
            output.finished_sending, output.finished_recving = set(sent) or None, set(received) or None
        if reports and (sent or received):
            report: Any = {
                **{"rank": {"pp": 0, "tp": 0}, "finished_sending": list(sent), "finished_recving": list(received)},
                **{"failed_recving": [], "granted": [], "records": [], "stats": {}},
            }
            output.kv_connector_worker_meta = KvferryWorkerMetadata((kvferry.worker.encode_report(report),))
        indices = {request: index for index, request in enumerate(requests)}
        ran = ModelRunnerOutput(requests, indices, tokens, kv_connector_output=output)
        for outputs in self.scheduler.update_from_output(scheduled, ran).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.answers[each.request_id] = {"params": each.kv_transfer_params}
        return scheduled.kv_connector_metadata

    def until_answered(self, request: str) -> dict[str, Any]:
        """Steps until a request that needs nothing from workers has ended."""
        for _ in range(50):
            self.turn()
            if request in self.answers:
                return self.answers[request]
        raise AssertionError(f"{request} has not ended: {self.scheduler.requests}")

    def assert_whole(self) -> None:
        """No request and no block is left behind, neither in vLLM's books nor in the connector's."""
        assert dict(self.scheduler.requests) == {}
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.free_at_start
        stats = self.connector._scheduler._scheduler.stats()
        assert (stats["sending"], stats["receiving"]) == (0, 0)
