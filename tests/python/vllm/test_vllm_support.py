"""What is refused when an engine starts, and what the two sides say when they are used wrongly."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
import torch
from kvferry.vllm.config import parse_options
from kvferry.vllm.metadata import KvferryHandshakeMetadata, KvferryWorkerMetadata
from kvferry.vllm.scheduler import SchedulerSide
from kvferry.vllm.support import (
    NotServedError,
    align_interleave,
    check_multi_turn,
    check_served,
    compat_fields,
    has_host_buffer,
    writes_late,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
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
        cache_config=SimpleNamespace(enable_prefix_caching=changes.pop("prefix_caching", True)),
        kv_transfer_config=SimpleNamespace(
            engine_id="e",
            is_kv_producer=role == "kv_producer",
            is_kv_consumer=role == "kv_consumer",
            kv_load_failure_policy="fail",
            kv_buffer_device=changes.pop("buffer", "cpu"),
        ),
        device_config=SimpleNamespace(device_type=changes.pop("device", "cpu")),
        speculative_config=None,
        num_prefill_lookahead_tokens=changes.pop("lookahead", 0),
    )


@pytest.mark.release
def test_what_is_served() -> None:
    window = SlidingWindowSpec(**SHAPE, sliding_window=64)
    latent = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})
    check_served(engine(), groups(FullAttentionSpec(**SHAPE), window))
    check_served(engine(lookahead=1), groups(latent))
    # A draft model may keep its cache whole on every rank.
    draft = FullAttentionSpec(**SHAPE, dcp_sharded=False)
    check_served(engine(parallel={"decode_context_parallel_size": 2}), groups(latent, draft))


@pytest.mark.release
@pytest.mark.parametrize(
    ("config", "cache", "expected"),
    [
        (
            engine(parallel={"prefill_context_parallel_size": 4}),
            groups(FullAttentionSpec(**SHAPE)),
            "--prefill-context-parallel-size 4: set it to 1",
        ),
        (engine(lookahead=3), groups(FullAttentionSpec(**SHAPE)), "3 tokens ahead in the prefill"),
        (engine(), groups(FullAttentionSpec(**SHAPE), host_resident=True), "host pool"),
        (
            engine(),
            groups(FullAttentionSpec(**SHAPE), MambaSpec(block_size=16, shapes=((4,),) * 5, dtypes=(torch.half,) * 5)),
            "replayed from recent inputs (layer layer.1 keeps 5 tensors)",
        ),
        (engine(), groups(CrossAttentionSpec(**SHAPE)), "CrossAttentionSpec"),
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


@pytest.mark.release
def test_sleep_mode_is_served_where_vllm_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.vllm.support.TELLS_OF_SLEEP", True)
    check_served(engine(sleep=True), groups(FullAttentionSpec(**SHAPE)))
    monkeypatch.setattr("kvferry.vllm.support.TELLS_OF_SLEEP", False)
    with pytest.raises(NotServedError, match="--enable-sleep-mode"):
        check_served(engine(sleep=True), groups(FullAttentionSpec(**SHAPE)))


@pytest.mark.parametrize(
    ("role", "policy", "has_state", "expected"),
    [
        ("kv_both", "recompute", False, None),
        ("kv_consumer", "fail", False, None),
        ("kv_both", "fail", False, "kv_load_failure_policy recompute only, not fail"),
        ("kv_producer", "recompute", False, "Set kv_role to kv_both"),
        ("kv_both", "recompute", True, "recurrent states"),
    ],
)
def test_where_conversations_go_on(role: str, policy: str, has_state: bool, expected: str | None) -> None:
    config = engine()
    config.kv_transfer_config.is_kv_producer = role != "kv_consumer"
    config.kv_transfer_config.is_kv_consumer = role != "kv_producer"
    config.kv_transfer_config.kv_load_failure_policy = policy
    if expected is None:
        check_multi_turn(config, has_state)
    else:
        with pytest.raises(NotServedError, match=expected):
            check_multi_turn(config, has_state)


@pytest.mark.parametrize(
    ("device", "buffer", "expected"),
    [
        ("cpu", "cpu", False),
        ("cuda", "cuda", False),
        ("xpu", "xpu", False),
        ("cuda", "cpu", True),
        ("xpu", "cpu", True),
        ("cpu", "cuda", "kv_buffer_device cuda on device cpu: leave it out to transfer from the KV cache itself$"),
        ("cuda", "xpu", "kv_buffer_device xpu on device cuda.* or set it to cpu for a buffer in host memory"),
    ],
)
def test_where_blocks_go_through_a_host_buffer(device: str, buffer: str, expected: bool | str) -> None:
    config = engine(device=device, buffer=buffer)
    if isinstance(expected, bool):
        assert has_host_buffer(config) is expected
        check_served(config, groups(FullAttentionSpec(**SHAPE)))
    else:
        with pytest.raises(NotServedError, match=expected):
            check_served(config, groups(FullAttentionSpec(**SHAPE)))


def test_what_a_host_buffer_does_not_go_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.vllm.support.TELLS_OF_SLEEP", True)
    with pytest.raises(NotServedError, match="--enable-sleep-mode with kv_buffer_device cpu"):
        check_served(engine(device="cuda", sleep=True), groups(FullAttentionSpec(**SHAPE)))
    with pytest.raises(NotServedError, match=r"multi_turn .* with kv_buffer_device cpu"):
        check_multi_turn(engine("kv_consumer", device="cuda"), has_state=False)


def test_a_gpu_writes_drafts_and_states_late_and_a_host_buffer_gets_all_late() -> None:
    def late(device: str, has_state: bool, drafter: bool | None, buffer: str | None = None) -> bool:
        config = engine(device=device, buffer=buffer or device)
        config.speculative_config = None if drafter is None else SimpleNamespace(use_eagle=lambda: drafter)
        return writes_late(config, has_state)

    assert [late("cuda", *case) for case in [(False, None), (False, False), (True, None), (False, True)]] == [
        *(False, False, True, True)
    ]
    assert not late("cpu", True, True)
    assert late("cuda", False, None, "cpu")


def test_a_group_that_is_not_transferred_may_be_anything() -> None:
    spec = CrossAttentionSpec(**SHAPE)
    check_served(engine(), groups(spec, enable_kv_transfer=False))


def test_foreign_handshake_metadata_names_the_cure() -> None:
    class Foreign(KVConnectorHandshakeMetadata):
        pass

    options = parse_options({"host": "127.0.0.1", "port": 0})
    side = SchedulerSide(engine(), groups(FullAttentionSpec(**SHAPE)), options)
    try:
        with pytest.raises(TypeError, match=r"rank \(0, 1\) sent .* Foreign, .* put KvferryConnector first"):
            side.serve({(0, 1): Foreign()})
    finally:
        side.shutdown()
        side.shutdown()


@pytest.mark.release
def test_an_engine_that_only_receives_hands_its_ranks_on() -> None:
    side = SchedulerSide(engine("kv_consumer"), groups(FullAttentionSpec(**SHAPE)), parse_options({}))
    with pytest.raises(kvferry.CorruptError, match="set_engine"):
        side.serve({(0, 0): KvferryHandshakeMetadata(b"no metadata")})
    side.shutdown()


@pytest.mark.release
@pytest.mark.parametrize("prefix_caching", [True, False, None])
def test_what_the_scheduler_is_told(prefix_caching: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(kvferry, "Scheduler", lambda config: told.update(config))
    config = engine(
        "kv_consumer",
        prefix_caching=prefix_caching,
        parallel={"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    )
    SchedulerSide(config, groups(FullAttentionSpec(**SHAPE)), parse_options({}))
    share = {"token_ranks": 2, "token_rank": 0, "token_interleave": 1}
    assert told["groups"] == [{"kind": "full", "block_size": 16, **share}]
    assert (told["null_block"], told["reuses_blocks"]) == (0, bool(prefix_caching))
    assert (told["tp_size"], told["pp_size"], told["dcp_size"]) == (4, 1, 2)


@pytest.mark.parametrize(
    ("ranks", "found", "chosen", "expected"), [(2, 1, False, 16), (2, 4, True, 4), (2, 16, True, 16), (1, 1, False, 1)]
)
def test_dealt_tokens_are_dealt_by_blocks(ranks: int, found: int, chosen: bool, expected: int) -> None:
    parallel = {
        "decode_context_parallel_size": ranks,
        "cp_kv_cache_interleave_size": found,
        "_allow_auto_resolve_cp_interleave_size": not chosen,
    }
    config = engine(parallel=parallel)
    align_interleave(config, groups(FullAttentionSpec(**SHAPE), FullAttentionSpec(**{**SHAPE, "block_size": 32})))
    assert config.parallel_config.cp_kv_cache_interleave_size == expected


def test_what_engines_must_share_has_no_shape() -> None:
    model = SimpleNamespace(
        model="m",
        revision=None,
        dtype=torch.bfloat16,
        get_total_num_kv_heads=lambda: 8,
        get_head_size=lambda: 128,
        get_total_num_hidden_layers=lambda: 64,
    )

    def config(**shape: Any) -> Any:
        return SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=shape.pop("block_size")),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            parallel_config=SimpleNamespace(**shape),
            speculative_config=None,
        )

    one = config(block_size=16, tensor_parallel_size=1, pipeline_parallel_size=4)
    other = config(block_size=64, tensor_parallel_size=8, pipeline_parallel_size=1)
    # Blocks of 16 tokens get another instruction set on CPU, with the same order inside a block.
    fields = compat_fields(one, {"a": "CPU_ATTN/vec16"})
    assert fields == compat_fields(other, {"a": "CPU_ATTN/vec", "b": "CPU_ATTN/vec"})
    assert fields != compat_fields(other, {"a": "CPU_ATTN/amx"})
    names = {field[0] for field in fields}
    assert {field[0] for field in fields if field[2:] == [True]} == {"attention", "vllm"}
    assert {"model", "kv_heads", "attention"} < names
    assert not names & {"block_size", "tp_size", "pp_size", "dcp_size"}


def test_foreign_worker_metadata_is_refused() -> None:
    side = SchedulerSide(engine("kv_consumer"), groups(FullAttentionSpec(**SHAPE)), parse_options({}))
    output: Any = SimpleNamespace(kv_connector_worker_meta=7)
    with pytest.raises(TypeError, match="expected worker metadata of KvferryConnector, got int"):
        side.update(output)
    side.shutdown()


def test_reports_of_all_ranks_and_of_no_other_are_taken() -> None:
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    side = SchedulerSide(
        engine("kv_consumer", parallel=parallel), groups(FullAttentionSpec(**SHAPE)), parse_options({})
    )
    params = {
        **{"do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "p-r", "remote_host": "127.0.0.1"},
        **{"remote_port": 5000, "remote_block_ids": [[1]], "remote_num_tokens": 16},
    }
    scheduler = side._scheduler
    scheduler.allocated("r", params, [[3]], 16, 16)
    assert scheduler.finished("r", params, "aborted", [[3]], 16) == (True, None)

    def report(pp: int, tp: int) -> bytes:
        made: Any = {"rank": {"pp": pp, "tp": tp}, "finished_recving": ["r"]}
        return kvferry.encode_report(made)

    def update(*reports: bytes) -> int:
        metadata = KvferryWorkerMetadata(reports)
        output: Any = SimpleNamespace(kv_connector_worker_meta=metadata, finished_sending=None, finished_recving=None)
        side.update(output)
        return scheduler.stats()["receiving"]  # type: ignore[return-value]

    assert update(report(1, 1), report(0, 1)) == 1
    with pytest.raises(kvferry.InvalidArgumentError, match=r"pp 2, tp 0.*engine's 4"):
        update(report(2, 0))
    assert update(report(0, 1), report(1, 0)) == 1
    assert update(report(0, 0)) == 0
    side.shutdown()


def test_the_end_of_a_refused_load_is_none_of_the_librarys() -> None:
    side = SchedulerSide(engine("kv_consumer"), groups(FullAttentionSpec(**SHAPE)), parse_options({}))
    unusable = "r" * 600
    wanted: Any = {"do_remote_prefill": True}
    request: Any = SimpleNamespace(
        **{"request_id": unusable, "kv_transfer_params": wanted, "num_prompt_tokens": 16, "lora_request": None},
        **{"all_token_ids": [7] * 16, "cache_salt": None, "mm_features": []},
        **{"prompt_embeds": None, "abort_immediately": False},
    )
    blocks: Any = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: [[1]])
    side.arrived(request)
    side.allocated(request, blocks, 16)
    assert set(side.build_step().refused) == {unusable}
    output: Any = SimpleNamespace(kv_connector_worker_meta=None, finished_sending=None, finished_recving={unusable})
    side.update(output)
    record = side._requests.get(unusable)
    assert record is not None
    assert not record.unreported
    side.shutdown()


def test_nothing_is_remembered_of_a_request_of_both_roles_with_another_prompts_params() -> None:
    side = SchedulerSide(engine("kv_producer"), groups(FullAttentionSpec(**SHAPE)), parse_options({}))
    wanted = {"do_remote_prefill": True, "do_remote_decode": True, "remote_block_ids": [[1]]}
    request: Any = SimpleNamespace(
        **{"request_id": "r", "kv_transfer_params": {**wanted, "remote_prompt_digest": "another"}},
        **{"num_prompt_tokens": 16, "all_token_ids": [7] * 16, "lora_request": None, "cache_salt": None},
        **{"mm_features": [], "prompt_embeds": None, "abort_immediately": False},
    )
    side.arrived(request)
    assert [(record.vllm_id, record.other_prompt) for record in side._requests] == [("r", True)]
    assert side.finished(request, ([1],)) == (False, None)
    assert len(side._requests) == 0
    side.shutdown()


@pytest.mark.release
def test_a_step_without_work_is_empty() -> None:
    side = SchedulerSide(engine("kv_consumer"), groups(FullAttentionSpec(**SHAPE)), parse_options({}))
    assert not side.has_pending()
    step = side.build_step()
    assert step.step == b""
    assert step.refused == {}
    side.shutdown()


AMX = """
import ctypes
from kvferry.vllm.worker import ask_for_amx

ask_for_amx()
allowed = ctypes.c_uint64()
# arch_prctl(ARCH_GET_XCOMP_PERM): a bit for each state component, of which 18 is the tiles' data.
assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(allowed)) == 0
assert allowed.value >> 18 & 1, hex(allowed.value)
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="the processor has no AMX")
def test_a_decode_may_be_the_first_step_where_attention_uses_amx() -> None:
    subprocess.run([sys.executable, "-c", AMX], check=True)
