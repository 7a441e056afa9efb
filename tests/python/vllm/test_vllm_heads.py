"""KV heads that differ from layer to layer, over tensor-parallel sizes at which ranks hold copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry.vllm.heads import KvHeads
from mini_config import FULL_LAYERS
from mini_ranks import Engine, hand_over, model


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(p_size: int, d_size: int, **more: Any) -> tuple[Engine, Engine]:
            path = model(tmp_path / "model", **more)
            made = []
            for name, size in (("p", p_size), ("d", d_size)):
                made.append(engine := Engine(name, path, size, monkeypatch))
                stack.callback(engine.close)
            return made[0], made[1]

        yield make


@pytest.mark.parametrize(("p_size", "d_size"), [(16, 8), (8, 16), (16, 16)])
def test_layers_with_heads_of_their_own(engines: Any, p_size: int, d_size: int) -> None:
    p, d = engines(p_size, d_size, swa_num_key_value_heads=8)
    assert hand_over(p, d) is None


def test_heads_that_nobody_states_need_equal_tensor_parallel_sizes(engines: Any) -> None:
    p, d = engines(16, 8, num_window_kv_heads=8)
    failure = hand_over(p, d)
    assert failure is not None
    assert failure.startswith("incompatible: ")
    for word in (f'layer "{FULL_LAYERS[0]}"', "--tensor-parallel-size", "16", "8"):
        assert word in failure
    assert not any(view.any() for views in d.views for view in views.values())


def test_heads_that_nobody_states_travel_between_equal_sizes(engines: Any) -> None:
    p, d = engines(8, 8, num_window_kv_heads=8)
    assert hand_over(p, d) is None


def stated(layers: int = 4, heads: int = 4, overrides: list[dict[str, int]] | None = None, **config: Any) -> Any:
    """A model's configuration as far as it tells KV heads."""

    class Arch:
        per_layer_overrides = overrides

        def __getitem__(self, index: int) -> Any:
            return SimpleNamespace(**{"total_num_kv_heads": heads, **(overrides or [])[index]})

    return SimpleNamespace(
        hf_text_config=SimpleNamespace(num_key_value_heads=heads, num_attention_heads=32, **config),
        model_arch_config=Arch(),
        get_total_num_kv_heads=lambda: heads,
        get_total_num_hidden_layers=lambda: layers,
    )


def totals(target: Any, names: list[str], draft: Any = None, stages: int = 1, window: int | None = None) -> list[Any]:
    config = SimpleNamespace(
        model_config=target,
        speculative_config=draft and SimpleNamespace(draft_model_config=draft),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    spec = SimpleNamespace(sliding_window=window)
    return [KvHeads(config)(name, spec) for name in names]


NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(6)]


def test_what_models_state_about_their_layers() -> None:
    assert totals(stated(), NAMES[:2]) == [4, 4]
    assert totals(stated(image_num_key_value_heads=16, vision={"num_kv_heads": 16}), NAMES[:1]) == [4]
    window = stated(swa_num_key_value_heads=8)
    assert (totals(window, NAMES[:1]), totals(window, NAMES[:1], window=128)) == ([4], [8])
    by_layer = stated(heads=8, overrides=[{}, {"total_num_kv_heads": 2}, {}, {}])
    assert totals(by_layer, NAMES[:2]) == [8, 2]
    other = {"attention_type": "sliding_attention", "num_attention_heads": 64, "num_attention_groups": 8}
    kinds = ["full_attention", "sliding_attention"]
    assert totals(stated(attention_other_setting=other, layer_types=kinds), NAMES[:3]) == [4, 8, None]
    blocks = [SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=each)) for each in (8, 4, None)]
    assert totals(stated(block_configs=blocks), NAMES[:4]) == [4, 8, None, None]


def test_what_is_not_understood_is_not_guessed() -> None:
    for config in (
        {"num_global_key_value_heads": 2},
        {"layers_config": [{"attention": {"num_kv_heads": 4}}, {"attention": {"num_kv_heads": 2}}]},
        {"num_kv_heads": [4, 2, 4, 2]},
    ):
        assert totals(stated(**config), NAMES[:1]) == [None], config
    assert totals(stated(num_global_key_value_heads=4), NAMES[:1]) == [4]


def test_draft_models_have_heads_of_their_own() -> None:
    names = [NAMES[3], NAMES[4], "draft_model.model.layers.0.self_attn.attn", "mtp.layers.0.self_attn.attn"]
    assert totals(stated(heads=4), names, draft=stated(heads=2)) == [4, 2, 2, 2]
    assert totals(stated(heads=4), names, draft=stated(heads=4)) == [4] * 4
    # On a later pipeline stage the number of a layer does not tell whose it is.
    assert totals(stated(heads=4), names, draft=stated(heads=2), stages=2) == [None, 2, 2, 2]
