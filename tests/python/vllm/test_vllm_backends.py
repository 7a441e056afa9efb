"""Engines whose layers have different attention backends: what has to be equal is asked layer by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from mini_engine import FULL_LAYERS, WINDOW_LAYERS
from mini_ranks import Engine, hand_over, model


def handed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, str], here: dict[str, str]
) -> str | None:
    path = model(folder, swa_num_key_value_heads=8)
    p = Engine("p", path, 8, monkeypatch, there)
    try:
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
