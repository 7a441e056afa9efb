"""A vLLM engine without a model.

The scheduler, the KV-cache manager, the cache views and the output aggregator are vLLM's, and both roles of the
connector are there. In place of the model, `Engine._compute` writes bytes into the cache that follow from the engine,
the layer, the head, the token and its position. A state follows from all tokens so far.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mini_device
import mini_memory
import mini_runner
from mini_config import (
    FULL_LAYERS,
    HEAD_SIZE,
    HEADS,
    LIMIT,
    LONGEST,
    STATE_LAYERS,
    WINDOW,
    WINDOW_LAYERS,
    Settings,
    kv_cache_config,
    vllm_config,
)


class Engine:
    """Runs in the child process; the parent calls its public methods through `mini_remote.Remote`."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.worker.utils import allocate_kv_cache

        self.settings, self.salt, self.block = settings, settings.salt, settings.block
        self.config = config = vllm_config(settings)
        if settings.states:
            config.cache_config.mamba_cache_mode = settings.states
        self.kv_cache_config = kv_cache_config(settings)
        config.cache_config.num_gpu_blocks = settings.blocks
        with set_current_vllm_config(config):
            store = Path(settings.model) / f"group-{os.getpid()}"
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            self._add_layers(config)
            self.stream = mini_device.Stream(settings.host_buffer) if settings.host_buffer else None
            from vllm.v1.kv_cache_layout import KVCacheLayout

            self.views = allocate_kv_cache(self.kv_cache_config, torch.device("cpu"), KVCacheLayout[settings.layout])
            self.runner = mini_runner.make(settings.runner, config, self.kv_cache_config, self.views)
            worker = get_kv_transfer_group()
            # A state that is not cached lies in a single block of a request.
            longest = LONGEST if settings.states == "none" else self.block
            self.scheduler = Scheduler(
                config, self.kv_cache_config, StructuredOutputManager(config), longest, self.block, log_stats=True
            )
        self.worker = worker
        connector = self.scheduler.connector
        assert connector is not None
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        self.aggregator = KVOutputAggregator.from_connector(connector, 1)
        init_none_hash(sha256)
        self.hasher: Callable[..., Any] = get_request_block_hasher(self.block, sha256)
        self.free_at_start = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.sources: dict[str, list[int]] = {}
        self.wrong_bytes: dict[str, int] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.figures: dict[str, Any] = {}
        self.failed: dict[str, dict[str, Any]] = {}
        self.scribbling: threading.Event | None = None
        self.abandoned: list[Any] = []
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.withheld: Callable[[], bytes] | None = None

    def _add_layers(self, config: Any) -> None:
        """Attention layers, of which no more is there than what says how they order a block."""
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        class Layer(AttentionLayerBase):
            def get_attn_backend(self) -> Any:
                return TritonAttentionBackend

            def get_kv_cache_spec(self, vllm_config: Any) -> Any:
                return None

        for name in (*FULL_LAYERS, *WINDOW_LAYERS, *STATE_LAYERS):
            config.compilation_config.static_forward_context[name] = Layer()

    # --- the model's place

    def _cells(self, request: str, positions: range, salt: int) -> Any:
        """What layer `l` holds at each position, as (layer, position, head, byte): 8-bit, different in each."""
        import numpy as np

        layers = [*FULL_LAYERS, *WINDOW_LAYERS]
        tokens = np.array([self.scheduler.requests[request].all_token_ids[p] for p in positions], dtype=np.uint64)
        cell = (
            np.uint64(salt * 1_000_003)
            + np.arange(len(layers), dtype=np.uint64)[:, None, None, None] * np.uint64(7_919)
            + tokens[:, None, None] * np.uint64(104_729)
            + np.array(positions, dtype=np.uint64)[:, None, None] * np.uint64(15_485_863)
            + np.arange(HEADS, dtype=np.uint64)[:, None] * np.uint64(611_953)
            + np.arange(4 * HEAD_SIZE, dtype=np.uint64) * np.uint64(2_750_159)
        )
        return ((cell * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)).astype(np.uint8)

    def _places(self, request: str, positions: range) -> list[tuple[int, str, Any, Any, Any]]:
        """Where positions lie: index of the layer, its name, and which positions in which block and slot."""
        import numpy as np

        places = []
        block_ids = self.scheduler.kv_cache_manager.get_block_ids(request)
        for group, ids in zip(self.kv_cache_config.kv_cache_groups, block_ids, strict=True):
            if group.layer_names[0] in STATE_LAYERS:
                continue
            at = np.array(positions)
            blocks = np.array([ids[p // self.block] for p in positions])
            # Blocks that have left the window are null: nothing is there.
            kept = blocks != 0
            for name in group.layer_names:
                layer = [*FULL_LAYERS, *WINDOW_LAYERS].index(name)
                places.append((layer, name, np.flatnonzero(kept), blocks[kept], at[kept] % self.block))
        return places

    def _states(self, request: str, tokens: int, salt: int) -> list[tuple[Any, Any, Any]]:
        """For each layer with a state, the block where it is after `tokens` tokens of a request, which bytes of that
        count, and what they must be: they follow from all of these tokens."""
        import numpy as np
        import torch

        states = []
        block_ids = self.scheduler.kv_cache_manager.get_block_ids(request)
        for group, ids in zip(self.kv_cache_config.kv_cache_groups, block_ids, strict=True):
            for name in set(group.layer_names) & set(STATE_LAYERS):
                block = ids[(tokens - 1) // group.kv_cache_spec.block_size]
                # Without the inputs behind the first three, which speculation adds.
                place = self.views[name].view(torch.uint8).numpy()[block, 0, 0]
                which = np.r_[: 3 * 128, place.size - 4 * 8 * 8 * 4 : place.size]
                seed = [salt, STATE_LAYERS.index(name), *self.scheduler.requests[request].all_token_ids[:tokens]]
                content = np.random.default_rng(seed).integers(0, 256, which.shape, dtype=np.uint8)
                states.append((place, which, content))
        return states

    def _compute(self, request: str, positions: range) -> None:
        import torch

        for place, which, content in self._states(request, positions.stop, self.salt):
            self._write(place, which, content)
        cells = self._cells(request, positions, self.salt)
        for layer, name, which, blocks, slots in self._places(request, positions):
            view = self.views[name].view(torch.uint8).numpy()
            self._write(view, (blocks, slice(None), slots), cells[layer, which])

    def _write(self, view: Any, where: Any, content: Any) -> None:
        if self.stream is None:
            view[where] = content
        else:
            self.stream.enqueue(view, where, content)

    def _front(self, token: int) -> int:
        """The first token that `token` looks at in layers that do not look at all."""
        chunk = self.settings.chunk
        return token // chunk * chunk if chunk else max(0, token + 1 - WINDOW)

    def _count_wrong(self, request: str, positions: range, salt: int) -> tuple[int, int]:
        import torch

        if self.stream is not None:
            self.stream.synchronize()
        cells = self._cells(request, positions, salt)
        wrong = total = 0
        for layer, name, which, blocks, slots in self._places(request, positions):
            if name in WINDOW_LAYERS:
                # The next token to be computed looks at these.
                missing = set(range(self._front(positions.stop), positions.stop)) - set(which.tolist())
                wrong += cells[layer][sorted(missing)].size
            if name in WINDOW_LAYERS and not self.settings.prefix_caching:
                # Nobody reads what is in front of the last prompt token's window; blocks that serve other requests
                # must hold it all the same.
                read = which >= self._front(positions.stop)
                which, blocks, slots = which[read], blocks[read], slots[read]
            found = self.views[name].view(torch.uint8).numpy()[blocks, :, slots]
            wrong += int((found != cells[layer, which]).sum())
            total += found.size
        for place, which, content in self._states(request, positions.stop, salt):
            wrong += int((place[which] != content).sum())
            total += which.size
        return wrong, total

    def _in_full_layers(self, request: str, tokens: int) -> list[tuple[Any, Any]]:
        """What the layers with full attention hold of the first tokens of a request, and what they must hold."""
        import torch

        positions = range(tokens)
        assert self.expected_salt is not None
        cells = self._cells(request, positions, self.expected_salt)
        return [
            (self.views[name].view(torch.uint8).numpy()[blocks, :, slots], cells[layer, which])
            for layer, name, which, blocks, slots in self._places(request, positions)
            if name in FULL_LAYERS
        ]

    # --- what the parent calls

    def add(
        self,
        request: str,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """A request comes in. Its name must be new, so that nobody takes an older answer for its own."""
        assert request not in self.answers
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args=extra, prompt_logprobs=prompt_logprobs
        )
        self.scheduler.add_request(Request(request, prompt, sampling, None, block_hasher=self.hasher))

    def reject(self, request: str, params: dict[str, Any]) -> None:
        """As `AsyncLLM.notify_kv_transfer_request_rejected` and `EngineCore.add_request`: a request has failed, or has
        never come to the engine, and what was kept for it is to be given back."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        made = Request(request, [0], sampling, None, block_hasher=self.hasher, abort_immediately=True)
        self.scheduler.add_request(made)
        self.abort(request)

    def abort(self, request: str) -> None:
        """The client goes away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)

    def loaded_from(self, salt: int) -> None:
        """From now on, count wrong bytes of loaded prompts against what the engine with `salt` computes."""
        self.expected_salt = salt

    expected_salt: int | None = None

    def step(self) -> None:
        """One engine step, with the calls of vLLM's model runner in their order, and the outputs of earlier ones that
        are due."""
        self.in_flight.append(self._begin_step())
        idle = not self.in_flight[-1][0].total_num_scheduled_tokens
        while len(self.in_flight) > (0 if idle else self.settings.ahead):
            self._end_step(*self.in_flight.popleft())

    def _begin_step(self) -> tuple[Any, Any]:
        """What is scheduled, and what its model runner answers."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        assert scheduled.kv_connector_metadata is not None
        requests, tokens = list(scheduled.num_scheduled_tokens), []

        def forward() -> None:
            for request in requests:
                state = self.scheduler.requests[request]
                end = state.num_computed_tokens
                start = end - scheduled.num_scheduled_tokens[request]
                self.sources.setdefault(request, []).append(start)
                if start and len(self.sources[request]) == 1 and self.expected_salt is not None:
                    wrong, total = self._count_wrong(request, range(start), self.expected_salt)
                    assert total
                    self.wrong_bytes[request] = wrong
                self._compute(request, range(start, end))
                tokens.append([end % 500] if end >= state.num_tokens else [])

        output = self.runner.run(scheduled, forward)
        assert not self.worker.has_connector_metadata()
        if output is not None:
            self._note_failures(output)
            if (stats := output.kv_connector_stats) is not None:
                stats = stats.data.get("KvferryConnector", stats)
                self.figures = stats.aggregate(type(stats)(self.figures)).to_dict()
        indices = {request: index for index, request in enumerate(requests)}
        return scheduled, ModelRunnerOutput(requests, indices, tokens, kv_connector_output=output)

    def _end_step(self, scheduled: Any, ran: Any) -> None:
        merged = self.aggregator.aggregate([ran])
        assert merged is not None
        for outputs in self.scheduler.update_from_output(scheduled, merged).values():
            for each in outputs.outputs:
                answer = self.answers.setdefault(each.request_id, {"tokens": []})
                answer["tokens"] += each.new_token_ids
                if each.finish_reason is not None:
                    answer["reason"] = str(each.finish_reason)
                    answer["params"] = each.kv_transfer_params

    def _note_failures(self, output: Any) -> None:
        """What the worker says about each load that failed, and which blocks the request holds then."""
        import kvferry
        from kvferry.vllm.request_ids import library_id

        reports = getattr(output.kv_connector_worker_meta, "reports", ())
        causes = {each["request"]: each for raw in reports for each in kvferry.decode_report(raw)["failed_recving"]}
        for request in output.failed_recving or ():
            own = library_id(request)
            said: Any = causes.get(own, {})
            held = self.scheduler.kv_cache_manager.get_block_ids(request)
            others = {block for other in causes if other != own for block in causes[other]["invalid_blocks"]}
            self.failed[request] = {
                "cause": said.get("cause"),
                "message": said.get("message"),
                # By the library, over all groups; by the connector to vLLM, less what it tells of others that failed in
                # this step; and what there is.
                "blocks": sorted(said.get("invalid_blocks", ())),
                "told": sorted(output.invalid_block_ids - others),
                "held": sorted({block for group in held for block in group if block}),
            }

    def run_until(self, condition: str) -> None:
        """Steps until a Python expression over this engine (as `e`) holds, as long as `LIMIT`."""
        start = time.monotonic()
        while not eval(condition, {"e": self}):
            if (waited := time.monotonic() - start) > LIMIT:
                raise TimeoutError(f"{condition} did not come true: {self.state()}")
            self.step()
            # What waits for seconds, as for a lease to run out, leaves the processors to other tests.
            time.sleep(min(max(waited / 50, 0.001), 0.02))

    def run_while_needed(self) -> None:
        """Steps as long as vLLM's engine core would."""
        self.run_until("not e.scheduler.has_requests() and not e.in_flight")

    def fall_asleep(self, unmaps: bool = False) -> None:
        """What `EngineCoreProc.sleep` does: all requests are aborted, no new one starts, and when nothing is left to do
        the caches are dropped. `unmaps`: and nobody may touch their memory until the engine wakes up, as with
        `--enable-sleep-mode` of vLLM 0.33."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self.run_while_needed()
        if not self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("the caches could not be reset")
        if unmaps:
            self.unmap()

    def unmap(self) -> None:
        """As `sleep` of the worker: from here on nobody may touch the caches' memory."""
        self.worker.unregister_kv_caches()
        mini_memory.protect(self.views, mapped=False)

    def missing(self, request: str, tokens: int) -> int:
        """Bytes of a loaded request's first tokens that are not there (yet), of layers with full attention."""
        return sum(int((found != wanted).sum()) for found, wanted in self._in_full_layers(request, tokens))

    def untouched(self, request: str, tokens: int) -> int:
        """Of these, those that are as in a new cache."""
        return sum(int((found == 0).sum()) for found, wanted in self._in_full_layers(request, tokens))

    def is_followed(self, request: str) -> bool:
        """Whether a decode engine wants to know how far a prefill is."""
        side = self._own_connector()._scheduler
        return bool(side._scheduler.is_followed(side._requests.get(request).name))

    def keep_silent_of_preemptions(self) -> None:
        """A fault: what was told of blocks that are given away is not taken back."""
        chunks = self._own_connector()._scheduler._chunks
        report = chunks._report
        chunks._report = lambda record, written, tokens: tokens > 0 and report(record, written, tokens)

    def fill_free(self) -> None:
        """Others' bytes come into blocks that are free, as they would with a request that runs ahead of all others."""
        import torch

        free = self.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        for name in FULL_LAYERS:
            view = self.views[name].view(torch.uint8).numpy()
            for block in free:
                view[block.block_id] = 238

    def preempt(self) -> None:
        """As `/reset_prefix_cache?reset_running_requests=true`: all that runs begins again."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def withhold_steps(self, on: bool) -> None:
        """Keeps the connector's work from the workers, as where one step does not hold it, or lets it go."""
        scheduler = self._own_connector()._scheduler._scheduler
        if on:
            self.withheld, scheduler.step = scheduler.step, lambda: b""
        else:
            scheduler.step = self.withheld

    def filling(self) -> list[str]:
        """Requests whose blocks the host buffer is to copy to the device when their loads have ended."""
        worker = self.worker._connectors[0] if self.settings.child else self.worker
        host = worker._worker._host
        return [] if host is None else sorted(host._filling)

    def long_ids(self) -> list[str]:
        """Request ids that either side of the connector keeps because the library does not take them."""
        worker = self.worker._connectors[0] if self.settings.child else self.worker
        records = self._own_connector()._scheduler._requests
        return [*(record.id for record in records if record.id != record.vllm_id), *worker._worker._vllm_ids]

    def _own_connector(self) -> Any:
        connector: Any = self.scheduler.connector
        return connector._connectors[0] if self.settings.child else connector

    def reset_caches(self) -> None:
        """As `/reset_prefix_cache?reset_external=true`, which an operator repeats until it succeeds."""
        deadline = time.monotonic() + LIMIT
        while not self.scheduler.reset_prefix_cache(reset_connector=True):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the caches could not be reset: {self.state()}")
            self.step()

    def forget_prefixes(self) -> None:
        """What no request has is not in the prefix cache any more."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in list(pool.free_block_queue.get_all_free_blocks()):
            pool._maybe_evict_cached_block(block)

    def chunk(self, tokens: int) -> None:
        """Prompts are computed in parts of so many tokens; 0: whole."""
        self.scheduler.max_num_scheduled_tokens = tokens or LONGEST

    def pause(self, state: str = "PAUSED_NEW") -> None:
        """No new request starts, or, with "PAUSED_ALL", none goes on."""
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler.set_pause_state(PauseState[state])

    def drain(self) -> None:
        """What `EngineCoreProc.run_busy_loop` does after SIGTERM, with a `--shutdown-timeout`."""
        from types import SimpleNamespace

        from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

        core: Any = object.__new__(EngineCoreProc)
        core.shutdown_state = EngineShutdownState.REQUESTED
        core.vllm_config = SimpleNamespace(shutdown_timeout=60)
        core.scheduler, core.batch_queue, core.engines_running = self.scheduler, None, False
        deadline = time.monotonic() + LIMIT
        while core._handle_shutdown():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine does not drain: {self.state()}")
            self.step()

    def wake_up(self, mapped: str = "") -> None:
        """As `EngineCore.wake_up`. `mapped`: the caches' memory is there again, in the "same" place or in "another"."""
        from vllm.v1.core.sched.interface import PauseState

        if mapped:
            mini_memory.protect(self.views, mapped=True)
            if mapped == "another":
                self.abandoned += mini_memory.move(self.views)
            self.worker.restore_kv_caches()
            connector = self.scheduler.connector
            assert connector is not None
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def scribble(self, on: bool) -> None:
        """Changes every byte of the cache again and again, until told to stop."""
        import torch

        if self.scribbling is not None:
            self.scribbling.set()
            self.scribbling = None
        if on:
            stop = self.scribbling = threading.Event()
            views = [self.views[name].view(torch.uint8).numpy() for name in FULL_LAYERS]

            def run() -> None:
                value = 0
                while not stop.is_set():
                    value = value % 250 + 1
                    for view in views:
                        view.fill(value)

            threading.Thread(target=run, daemon=True).start()

    def state(self) -> dict[str, Any]:
        """For error messages and assertions."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "requests": {name: str(request.status) for name, request in self.scheduler.requests.items()},
            "leaked_blocks": self.free_at_start - pool.get_num_free_blocks(),
            "figures": self.figures,
            "starts": self.sources,
            "wrong_bytes": self.wrong_bytes,
            "failed": self.failed,
        }

    def answer(self, request: str) -> dict[str, Any]:
        """What the client got."""
        return self.answers[request]

    def close(self) -> None:
        """As at the end of vLLM's processes."""
        self.worker.shutdown()
        self.scheduler.shutdown()
