"""Engines of several ranks in one process, of a model whose layers have different numbers of KV heads, or another.

The ranks are real workers, made by the connector's worker side, with vLLM's own cache views. No model is split over
them; they hold what vLLM's loaders would give them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import mini_memory
import numpy as np
import pytest
import torch
from kvferry.vllm import worker as worker_module
from kvferry.vllm.config import parse_options
from kvferry.vllm.geometry import TokenShare, transfer_groups
from kvferry.vllm.host_buffer import CopyList
from kvferry.vllm.metadata import KvferryConnectorMetadata
from kvferry.vllm.worker import WorkerSide
from mini_config import DEVICE, FULL_LAYERS, HEAD_SIZE, WINDOW_LAYERS, register_model, write_model
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

BLOCK, BLOCKS, WINDOW = 16, 16, 4096
LAYERS = (*FULL_LAYERS, *WINDOW_LAYERS)
HEADS = {**dict.fromkeys(FULL_LAYERS, 4), **dict.fromkeys(WINDOW_LAYERS, 8)}
"""What the model really has."""
THERE = ([3, 1, 4, 10, 9], [2, 12, 6, 13, 11])
HERE = ([2, 7, 1, 8, 5], [14, 3, 10, 15, 6])
"""Blocks of a prompt in the prefill and the decode engine, by group. The groups share memory, so no id is in both."""
SECONDS = 120.0
LEASE_MS = 24 * 3_600_000
"""None runs out: what nobody gives back is there until the end."""


def model(folder: Path, **more: Any) -> str:
    """A model's configuration whose main number of KV heads is that of the full layers."""
    path = write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 16 * HEAD_SIZE, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return path


def vllm_config(path: str, tp_size: int, engine: str, backends: Mapping[str, str], layers: tuple[str, ...]) -> Any:
    """vLLM's configuration, with layers of which no more is there than the name of their attention backend: TRITON_ATTN
    where `backends` has none."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Layer(AttentionLayerBase):
        def __init__(self, backend: str) -> None:
            self.backend = backend

        def get_attn_backend(self) -> Any:
            return SimpleNamespace(get_name=lambda: self.backend)

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return None

    register_model()
    transfer = KVTransferConfig(
        kv_connector="KvferryConnector",
        kv_connector_module_path="kvferry.vllm",
        kv_role="kv_producer" if engine == "p" else "kv_consumer",
        engine_id=engine,
    )
    config = EngineArgs(
        model=path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 24,
        kv_transfer_config=transfer,
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = tp_size
    for name in layers:
        config.compilation_config.static_forward_context[name] = Layer(backends.get(name, "TRITON_ATTN"))
    return config


def held(layer: str, rank: int, tp_size: int) -> list[int]:
    """The heads of a layer that vLLM's loaders give a rank (`QKVParallelLinear`)."""
    heads = HEADS[layer]
    if heads < tp_size:
        return [rank // (tp_size // heads)]
    count = heads // tp_size
    return list(range(rank * count, (rank + 1) * count))


def bytes_of(layer: str, heads: list[int], blocks: int) -> np.ndarray:
    """What the first blocks of the prompt hold: (block, head, token, byte), different in each."""
    index = np.indices((blocks, len(heads), BLOCK, 4 * HEAD_SIZE), dtype=np.uint64)
    word = np.uint64(7_919 * LAYERS.index(layer)) + index[0] * np.uint64(104_729)
    word += np.array(heads, dtype=np.uint64)[index[1]] * np.uint64(611_953)
    word += index[2] * np.uint64(15_485_863) + index[3] * np.uint64(2_750_159)
    return ((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)).astype(np.uint8)


class Mixed:
    """What the ranks of an engine hold of one prompt."""

    layers: tuple[str, ...] = LAYERS
    tokens = len(THERE[0]) * BLOCK
    """Of the prompt, all of which the prefill engine computes."""
    held_back = 0
    """Of its last tokens, those that the prefill engine does not compute."""

    def cache_config(self, rank: int, tp_size: int) -> KVCacheConfig:
        return cache_config(rank, tp_size)

    def blocks(self, layer: str, groups: tuple[list[int], ...]) -> list[int]:
        return groups[layer in WINDOW_LAYERS]

    def content(self, layer: str, rank: int, tp_size: int, blocks: int) -> np.ndarray:
        """The bytes of the first blocks, in the shape of the layer's view."""
        return bytes_of(layer, held(layer, rank, tp_size), blocks)


class Engine:
    """All ranks of an engine."""

    def __init__(
        self,
        name: str,
        path: str,
        tp_size: int,
        monkeypatch: pytest.MonkeyPatch,
        backends: Mapping[str, str] | None = None,
        holds: Mixed | None = None,
        host_buffer: bool = False,
    ) -> None:
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        self.tp_size = tp_size
        self.holds = holds or Mixed()
        config = vllm_config(path, tp_size, name, backends or {}, self.holds.layers)
        if host_buffer:
            config.device_config.device_type = DEVICE
        self.copies = CopyList() if host_buffer else None
        self.views: list[dict[str, torch.Tensor]] = []
        self.sides: list[WorkerSide] = []
        caches = []
        self.loads: dict[str, str | None] = {}
        """Of loads that have ended and nobody has asked for: why they failed, None if they did not."""
        self._failures: dict[str, str] = {}
        self._monkeypatch = monkeypatch
        self._abandoned: list[Any] = []
        for rank in range(tp_size):
            caches.append(cache := self.holds.cache_config(rank, tp_size))
            self._become(rank)
            side = WorkerSide(config, cache, parse_options({"verify": True, "warm_up": False}))
            self.views.append(allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout.LBHNC))
            side.register_kv_caches(self.views[-1])
            side.set_copy_operation(copy_blocks)
            self.sides.append(side)
        ranks = self._ranks()
        groups = transfer_groups(caches[0], TokenShare())
        config_of_scheduler = {"engine_id": name, "tp_size": tp_size, "groups": groups, "host": "127.0.0.1", "port": 0}
        self.scheduler = kvferry.Scheduler({**config_of_scheduler, "lease_ms": LEASE_MS})
        if name == "p":
            self.scheduler.serve(ranks)
        else:
            self.scheduler.set_engine(ranks)

    def _become(self, rank: int) -> None:
        """What vLLM says of its groups is said of this rank."""
        self._monkeypatch.setattr(worker_module, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))
        self._monkeypatch.setattr(worker_module, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))

    def _ranks(self) -> dict[tuple[int, int], bytes]:
        return {(0, rank): side.handshake_metadata.rank_metadata for rank, side in enumerate(self.sides)}  # type: ignore[union-attr]

    def sleep(self, before_the_last: Callable[[], None] = lambda: None) -> None:
        """As the sleep of vLLM 0.33's workers, of which the last one is later: then nobody may touch the caches' memory
        any more."""
        for rank, (side, views) in enumerate(zip(self.sides, self.views, strict=True)):
            if rank == self.tp_size - 1:
                before_the_last()
            side.unregister_kv_caches()
            mini_memory.protect(views, mapped=False)

    def wake_up(self, mapped: str, before_the_last: Callable[[], None] = lambda: None) -> None:
        """The memory is there again, in the "same" place or in "another"; of the last rank later."""
        for rank, (side, views) in enumerate(zip(self.sides, self.views, strict=True)):
            if rank == self.tp_size - 1:
                before_the_last()
            mini_memory.protect(views, mapped=True)
            if mapped == "another":
                self._abandoned += mini_memory.move(views)
            self._become(rank)
            side.restore_kv_caches()
        self.scheduler.renew(self._ranks())

    def wipe(self) -> None:
        """Takes away what the caches hold."""
        for views in self.views:
            for view in views.values():
                view.zero_()

    def step(self, grants: bool = False) -> list[Any]:
        """One engine step; an outcome for each report. `grants`: it grants leases, and waits for the device."""
        if self.scheduler.has_pending():
            copies = self.copies.take() if self.copies is not None else None
            step = KvferryConnectorMetadata(self.scheduler.step(), grants=grants, copies=copies)
            for side in self.sides:
                side.submit(step)
        outcomes: list[Any] = []
        for side in self.sides:
            side.collect()
            metadata = side.take_worker_metadata()
            outcomes.extend(self.scheduler.report(report) for report in (metadata.reports if metadata else ()))
        for outcome in outcomes:
            for failure in outcome["failed_recving"]:
                self._failures.setdefault(failure["request"], f"{failure['cause']}: {failure['message']}")
            for request in outcome["finished_recving"]:
                self.loads[request] = self._failures.pop(request, None)
        return outcomes

    def write(self, groups: tuple[list[int], ...]) -> None:
        """What the model computes for a prompt."""
        for rank, views in enumerate(self.views):
            for layer, view in views.items():
                blocks = self.holds.blocks(layer, groups)
                content = self.holds.content(layer, rank, self.tp_size, len(blocks))
                view.view(torch.uint8).numpy()[blocks] = content

    def wrong(self, groups: tuple[list[int], ...]) -> dict[int, int]:
        """Wrong bytes by rank."""
        wrong = {}
        for rank, views in enumerate(self.views):
            for layer, view in views.items():
                blocks = self.holds.blocks(layer, groups)
                content = self.holds.content(layer, rank, self.tp_size, len(blocks))
                differ = int((view.view(torch.uint8).numpy()[blocks] != content).sum())
                if differ:
                    wrong[rank] = wrong.get(rank, 0) + differ
        return wrong

    def save(self, groups: tuple[list[int], ...]) -> None:
        """As the connector's scheduler side does for a prefill that is kept."""
        if self.copies is not None:
            self.copies.save(groups)

    def fill(self, request: str, groups: tuple[list[int], ...]) -> None:
        """As it does for a load."""
        if self.copies is not None:
            self.copies.fill(request, groups)

    def close(self) -> None:
        for side in self.sides:
            side.shutdown()
        self.scheduler.shutdown()


def copy_blocks(source: Any, target: Any, there: list[int], here: list[int], direction: str) -> None:
    """As a platform's copy between a device and a host buffer."""
    for name in source:
        target[name][here] = source[name][there]


def cache_config(rank: int, tp_size: int) -> KVCacheConfig:
    specs: dict[str, Any] = {
        layer: (SlidingWindowSpec if layer in WINDOW_LAYERS else FullAttentionSpec)(
            block_size=BLOCK,
            num_kv_heads=len(held(layer, rank, tp_size)),
            head_size=HEAD_SIZE,
            dtype=torch.bfloat16,
            **({"sliding_window": WINDOW} if layer in WINDOW_LAYERS else {}),
        )
        for layer in LAYERS
    }
    groups, tensors = [], []
    for names in (FULL_LAYERS, WINDOW_LAYERS):
        spec = specs[names[0]]
        page = spec.page_size_bytes
        groups.append(KVCacheGroupSpec(list(names), spec))
        tensors.append(
            KVCacheTensor(
                layers=list(names), size=page * BLOCKS * len(names), layer_stride=page * BLOCKS, block_stride=page
            )
        )
    return KVCacheConfig(BLOCKS, tensors, groups)


def prefilled(p: Engine, name: str = "prompt", there: tuple[list[int], ...] = THERE) -> dict[str, Any]:
    """The params that a prefill engine answers with. The step that grants the lease comes next."""
    p.write(there)
    tokens = p.holds.tokens - p.holds.held_back
    _, params = p.scheduler.finished(name, {"do_remote_decode": True}, "complete", there, tokens)
    assert params is not None
    p.save(there)
    return {**params, "do_remote_prefill": True}


def load(d: Engine, name: str, params: Mapping[str, Any], here: tuple[list[int], ...] = HERE) -> None:
    """A request that has arrived gets its blocks. The step that loads them comes next."""
    matched, _ = d.scheduler.matched(name, params, d.holds.tokens, 0)
    d.scheduler.allocated(name, params, here, d.holds.tokens, matched)
    d.fill(name, here)


def over(p: Engine, d: Engine, name: str) -> str | None:
    """Runs both until a load has ended. Why it failed, None if it did not."""
    deadline = time.monotonic() + SECONDS
    while name not in d.loads:
        if time.monotonic() > deadline:
            raise TimeoutError("the load did not end")
        p.step()
        d.step()
        time.sleep(0.001)
    return d.loads.pop(name)


def ended(p: Engine, d: Engine, name: str, here: tuple[list[int], ...] = HERE) -> str | None:
    """As `over`; every byte is checked of a load that has not failed."""
    failed = over(p, d, name)
    assert failed or d.wrong(here) == {}
    return failed


def hand_over(
    p: Engine, d: Engine, there: tuple[list[int], ...] = THERE, here: tuple[list[int], ...] = HERE
) -> str | None:
    """One prompt from `p` to `d`, as request "r" there. Why it failed, None if it did not."""
    params = prefilled(p, there=there)
    p.step()
    d.scheduler.arrived("r", params)
    load(d, "r", params, here)
    return ended(p, d, "r", here)
