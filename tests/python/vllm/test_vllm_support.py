"""What is refused when an engine starts, and what the two sides say when they are used wrongly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry.vllm.config import parse_options
from kvferry.vllm.scheduler import SchedulerSide
from kvferry.vllm.support import NotServedError, check_served
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}


def groups(*specs: Any, **changes: Any) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer.{i}"], spec, **changes) for i, spec in enumerate(specs)])


def engine(role: str = "kv_producer", **changes: Any) -> Any:
    """The parts of vLLM's configuration that are read before a connector is made."""
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_index": 0,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **changes.pop("parallel", {})}),
        model_config=SimpleNamespace(enable_sleep_mode=changes.pop("sleep", False)),
        kv_transfer_config=SimpleNamespace(
            engine_id="e",
            is_kv_producer=role == "kv_producer",
            is_kv_consumer=role == "kv_consumer",
            kv_load_failure_policy="fail",
        ),
        num_prefill_lookahead_tokens=changes.pop("lookahead", 0),
    )


def test_what_is_served() -> None:
    window = SlidingWindowSpec(**SHAPE, sliding_window=64)
    latent = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})
    check_served(engine(), groups(FullAttentionSpec(**SHAPE), window))
    check_served(engine(lookahead=1), groups(latent))


@pytest.mark.parametrize(
    ("config", "cache", "expected"),
    [
        (
            engine(parallel={"decode_context_parallel_size": 2}),
            groups(FullAttentionSpec(**SHAPE)),
            "--decode-context-parallel-size 2: set it to 1",
        ),
        (
            engine(parallel={"prefill_context_parallel_size": 4}),
            groups(FullAttentionSpec(**SHAPE)),
            "--prefill-context-parallel-size 4: set it to 1",
        ),
        (engine(lookahead=3), groups(FullAttentionSpec(**SHAPE)), "3 tokens ahead in the prefill"),
        (engine(sleep=True), groups(FullAttentionSpec(**SHAPE)), "--enable-sleep-mode"),
        (engine(), groups(FullAttentionSpec(**SHAPE), host_resident=True), "host pool"),
        (
            engine(),
            groups(FullAttentionSpec(**SHAPE), MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))),
            "kind MambaSpec (layer layer.1); it serves FullAttentionSpec, MLAAttentionSpec",
        ),
        (engine(), groups(ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32)), "ChunkedLocalAttentionSpec"),
        (
            engine(),
            groups(MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1}, tokens_per_state=4)),
            "compressed caches (4 tokens per state, layer layer.0)",
        ),
    ],
)
def test_what_is_refused_by_name(config: Any, cache: KVCacheConfig, expected: str) -> None:
    with pytest.raises(NotServedError) as caught:
        check_served(config, cache)
    assert expected in str(caught.value)


def test_a_group_that_is_not_transferred_may_be_anything() -> None:
    spec = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32)
    check_served(engine(), groups(spec, enable_kv_transfer=False))


def test_foreign_handshake_metadata_names_the_cure() -> None:
    class Foreign(KVConnectorHandshakeMetadata):
        pass

    options = parse_options({"host": "127.0.0.1", "port": 0}, {})
    side = SchedulerSide(engine(), groups(FullAttentionSpec(**SHAPE)), options)
    try:
        with pytest.raises(TypeError, match=r"rank \(0, 1\) sent .* Foreign, .* put KvferryConnector first"):
            side.serve({(0, 1): Foreign()})
    finally:
        side.shutdown()
        side.shutdown()


def test_foreign_worker_metadata_is_refused() -> None:
    side = SchedulerSide(engine("kv_consumer"), groups(FullAttentionSpec(**SHAPE)), parse_options({}, {}))
    output: Any = SimpleNamespace(kv_connector_worker_meta=7)
    with pytest.raises(TypeError, match="expected worker metadata of KvferryConnector, got int"):
        side.update(output)
    side.shutdown()


def test_a_step_without_work_is_empty() -> None:
    side = SchedulerSide(engine("kv_consumer"), groups(FullAttentionSpec(**SHAPE)), parse_options({}, {}))
    assert not side.has_pending()
    step = side.build_step()
    assert step.step == b""
    assert step.refused == {}
    side.shutdown()
