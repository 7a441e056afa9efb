"""From words to a deployment: the model and the two engines' shapes as they are typed."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from ..bench.errors import UsageError
from ..bench.sizes import between

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Bytes of an element of the cache."""

LAYOUTS = ("head-major", "token-major", "cpu", "whole")
PARTS = ("packed", "in-block", "regions")
SEPARATOR = "+"


class Key(NamedTuple):
    """A key of `--prefill` and `--decode`: from the text after it to a value, and what that text is."""

    parse: Callable[[str], Any]
    expected: str


def _number(text: str) -> int:
    value = int(text, 10)
    if not 1 <= value < 1 << 32 or text.strip() != text or text.startswith("+"):
        raise ValueError(text)
    return value


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(SEPARATOR)]


def _choice(choices: tuple[str, ...]) -> Key:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return Key(parse, f"one of {', '.join(choices)}")


_COUNT = Key(_number, "a whole number from 1")
_YES = Key(lambda text: {"yes": True, "no": False}[text], "yes or no")

KEYS: dict[str, Key] = {
    "tp": _COUNT,
    "pp": _COUNT,
    "stages": Key(_numbers, f"the layers of each pipeline stage, such as 20{SEPARATOR}22{SEPARATOR}22"),
    "dcp": _COUNT,
    "interleave": _COUNT,
    "block": Key(_numbers, f"tokens per block, or one number for each KV-cache group, such as 16{SEPARATOR}32"),
    "pages": _COUNT,
    "layout": _choice(LAYOUTS),
    "parts": _choice(PARTS),
    "layers-in-block": _YES,
    "prefix-caching": _YES,
}
"""The keys of an engine."""

_ENGINE_KEYS = {
    "tp": "tp",
    "pp": "pp",
    "stages": "stages",
    "dcp": "dcp",
    "interleave": "dcp_interleave",
    "block": "block_size",
    "pages": "pages",
    "layers-in-block": "layers_in_block",
}


count = between(1, (1 << 32) - 1, "whole number from 1")
"""The type of an option, for argparse."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a model's cache, but for `--layers`."""
    add = parser.add_argument
    add("--kv-heads", type=count, metavar="N", help="KV heads of the model")
    add("--head-size", type=count, metavar="N", help="elements of K, and of V, per token and head")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the cache (default %(default)s)")
    add("--mla", type=count, metavar="N", help="latents of N elements per token instead of K and V")
    add("--window", type=count, metavar="N", help="sliding window of N tokens, in all layers or")
    add("--full-every", type=count, metavar="N", help="in all but each N-th layer")


def parse_engine(option: str, text: str) -> dict[str, Any]:
    """The keys and values of `tp=4,block=16`."""
    found: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{option}: there is no key {name!r}; the keys are {', '.join(KEYS)}{hint}")
        if name in found:
            raise UsageError(f"{option}: the key {name} is given twice")
        try:
            if not equals:
                raise ValueError(item)
            found[name] = KEYS[name].parse(value)
        except (ValueError, KeyError):
            raise UsageError(f"{option}: {name}={value}: expected {KEYS[name].expected}") from None
    if "prefix-caching" in found and option != "--decode":
        raise UsageError(f"{option}: prefix-caching concerns the decode engine only, which would hand out what it read")
    return found


def engine(keys: dict[str, Any], itemsize: int) -> dict[str, Any]:
    """An engine as `kvf_plan_describe` takes it."""
    layout = keys.get("layout", LAYOUTS[0])
    return {
        "layout": {"turned": {"element": itemsize}} if layout == "cpu" else layout.replace("-", "_"),
        "parts": keys.get("parts", PARTS[0]).replace("-", "_"),
        **{theirs: keys[ours] for ours, theirs in _ENGINE_KEYS.items() if ours in keys},
    }


def model(options: argparse.Namespace) -> dict[str, Any]:
    """The model as `kvf_plan_describe` takes it."""
    itemsize = DTYPES[options.dtype]
    layers = range(options.layers)
    if options.mla is not None:
        for option in ("kv_heads", "head_size", "window", "full_every"):
            if getattr(options, option) is not None:
                raise UsageError(
                    f"--{option.replace('_', '-')} does not go with --mla: a latent has neither heads nor a window"
                )
        parts = [{"name": "latent", "heads": 1, "bytes": options.mla * itemsize}]
        return {"groups": [{"kind": "latent", "layers": list(layers), "parts": parts}]}
    if options.kv_heads is None or options.head_size is None:
        missing = "--kv-heads" if options.kv_heads is None else "--head-size"
        raise UsageError(f"{missing} is missing; a model without KV heads is given by --mla")
    parts = [{"name": name, "heads": options.kv_heads, "bytes": options.head_size * itemsize} for name in ("k", "v")]
    if options.window is None:
        if options.full_every is not None:
            raise UsageError("--full-every is given without --window: every layer is full then")
        return {"groups": [{"kind": "full", "layers": list(layers), "parts": parts}]}
    every = options.full_every or 0
    full = [layer for layer in layers if every and (layer + 1) % every == 0]
    kinds = {"full": full, "window": [layer for layer in layers if layer not in set(full)]}
    window = {"sliding_window": {"window": options.window}}
    return {
        "groups": [
            {"kind": window if kind == "window" else kind, "layers": numbers, "parts": parts}
            for kind, numbers in kinds.items()
            if numbers
        ]
    }


def deployment(options: argparse.Namespace) -> dict[str, Any]:
    """All that was typed as `kvf_plan_describe` takes it."""
    prefill = parse_engine("--prefill", options.prefill)
    decode = parse_engine("--decode", options.decode)
    itemsize = DTYPES[options.dtype]
    return {
        "model": model(options),
        "producer": engine(prefill, itemsize),
        "consumer": engine(decode, itemsize),
        "tokens": options.tokens,
        "cached_tokens": options.cached,
        "reuses_blocks": decode.get("prefix-caching", True),
        "consecutive_blocks": options.blocks == "consecutive",
    }
