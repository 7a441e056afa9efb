"""Engines whose layers have different attention backends, or that run different releases of vLLM: what has to be equal
is asked layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvferry.vllm import interior
from kvferry.vllm.interior import CPU_TOKENWISE, TOKENWISE
from mini_config import FULL_LAYERS, WINDOW_LAYERS
from mini_ranks import Engine, hand_over, model
from test_vllm_geometry import Cache, attention
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

RELEASES = ("0.32", "0.33")
"""That may be mixed where tokens can be told apart."""


def handed_over(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: dict[str, str],
    here: dict[str, str],
    releases: tuple[str, str] = (interior.RELEASE, interior.RELEASE),
) -> str | None:
    path = model(folder, swa_num_key_value_heads=8)
    monkeypatch.setattr(interior, "RELEASE", releases[0])
    p = Engine("p", path, 8, monkeypatch, there)
    try:
        monkeypatch.setattr(interior, "RELEASE", releases[1])
        d = Engine("d", path, 8, monkeypatch, here)
        try:
            return hand_over(p, d)
        finally:
            d.close()
    finally:
        p.close()


def test_backends_with_the_same_order_of_bytes_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {**dict.fromkeys(FULL_LAYERS, "FLASHINFER"), **dict.fromkeys(WINDOW_LAYERS, "TRITON_ATTN")}
    here = dict.fromkeys((*FULL_LAYERS, *WINDOW_LAYERS), "FLASH_ATTN")
    assert handed_over(tmp_path / "model", monkeypatch, there, here) is None


def test_an_order_of_the_backends_own_is_asked_of_its_layers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = WINDOW_LAYERS[1]
    own = {**dict.fromkeys(FULL_LAYERS, "FLASH_ATTN"), layer: "SOMEBODYS_OWN"}
    assert handed_over(tmp_path / "model", monkeypatch, own, {layer: "SOMEBODYS_OWN"}) is None
    failure = handed_over(tmp_path / "other", monkeypatch, own, {layer: "ANOTHERS"})
    assert failure is not None
    assert failure.startswith("incompatible: ")
    for part in (f'format of layer "{layer}"', "ANOTHERS of vLLM", "SOMEBODYS_OWN of vLLM", "attention backend"):
        assert part in failure


def latent(**changes: Any) -> MLAAttentionSpec:
    plain = {"block_size": 8, "num_kv_heads": 1, "head_size": 40, "dtype": torch.bfloat16, "max_tp_shards": 1}
    return MLAAttentionSpec(**{**plain, **changes})


def formats(spec: Any, kernel: str, release: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine of `release` states of a layer's parts."""
    monkeypatch.setattr(interior, "RELEASE", release)
    described = Cache(spec, KVCacheLayout.LBHNC, layers=1).describe(kernel)
    return [area["format"] for area in described.geometry["areas"]]


FP8 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}


@pytest.mark.parametrize("kernel", sorted(TOKENWISE | CPU_TOKENWISE))
@pytest.mark.parametrize("changes", [{}, FP8], ids=["plain", "fp8"])
def test_plain_tokens_have_one_format_in_both_releases(
    kernel: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = (latent if "MLA" in kernel else attention)(**changes)
    stated = [formats(spec, kernel, release, monkeypatch) for release in RELEASES]
    assert stated[0] == stated[1]
    assert not any("vLLM" in text for text in stated[0])


@pytest.mark.parametrize(
    ("spec", "kernel"),
    [
        (attention(), "CPU_ATTN/amx"),
        (attention(), "SOMEBODYS_OWN"),
        (
            attention(num_head_slots=8, state_content_bytes=16, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4),
            "FLASHINFER",
        ),
        (attention(dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), "TRITON_ATTN"),
        (latent(dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"), "FLASHMLA"),
        (latent(), "DEEPSEEK_V32_INDEXER"),
    ],
    ids=["amx", "own", "nvfp4", "int8-scales", "ds-mla", "indexer"],
)
def test_an_order_of_the_backends_own_differs_by_release(
    spec: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = [formats(spec, kernel, release, monkeypatch) for release in RELEASES]
    for ours, theirs in zip(*stated, strict=True):
        assert ours != theirs
        assert (ours.endswith("of vLLM 0.32"), theirs.endswith("of vLLM 0.33")) == (True, True)


@pytest.mark.parametrize("kernel", sorted(TOKENWISE | CPU_TOKENWISE))
def test_a_release_that_nobody_has_read_fits_itself_only(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = latent() if "MLA" in kernel else attention()
    unread = formats(spec, kernel, "0.99", monkeypatch)
    assert all(text.endswith("of vLLM 0.99") for text in unread)
    for release in RELEASES:
        assert not set(unread) & set(formats(spec, kernel, release, monkeypatch))


def test_two_releases_hand_over_what_is_token_wise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {**dict.fromkeys(FULL_LAYERS, "FLASHINFER"), **dict.fromkeys(WINDOW_LAYERS, "TRITON_ATTN")}
    here = dict.fromkeys((*FULL_LAYERS, *WINDOW_LAYERS), "FLASH_ATTN")
    assert handed_over(tmp_path / "model", monkeypatch, there, here, ("0.32", "0.33")) is None
    assert handed_over(tmp_path / "other", monkeypatch, here, there, ("0.33", "0.32")) is None


def test_two_releases_refuse_a_layer_with_an_order_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = WINDOW_LAYERS[1]
    own = {**dict.fromkeys(FULL_LAYERS, "FLASH_ATTN"), layer: "SOMEBODYS_OWN"}
    failure = handed_over(tmp_path / "model", monkeypatch, own, own, ("0.32", "0.33"))
    assert failure is not None
    assert failure.startswith("incompatible: ")
    for part in (f'format of layer "{layer}"', "SOMEBODYS_OWN of vLLM 0.32", "SOMEBODYS_OWN of vLLM 0.33"):
        assert part in failure
