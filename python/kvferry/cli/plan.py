"""Shows who reads what from whom when a request goes from a prefill to a decode engine.

Neither engine has to run. The shapes and what comes of them are those of the library that the engines use."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..bench.errors import UsageError
from ..bench.sizes import between
from ..plan import describe
from . import capacity
from .picture import svg
from .shapes import KEYS, add_model, count, deployment, parse_engine
from .table import Request, table

EPILOG = (
    "keys of --prefill and --decode, as in tp=4,block=16 (all have defaults: one rank, blocks of 16 tokens,\n"
    "head-major, K and V packed, which is what vLLM keeps for KvferryConnector):\n"
    + "\n".join(f"  {name:16} {key.expected}" for name, key in KEYS.items())
    + """

layout: head-major and token-major say which is outside in a block; cpu is vLLM's CPU attention; in a whole block the
engine keeps tokens in an order of its own. parts: K and V packed per token and head, one after the other in each
block, or in regions of their own. prefix-caching (decode): whether blocks serve other requests with the same prefix.

examples:
  kvferry plan --prefill tp=4,block=16 --decode tp=1,block=64,layout=token-major \\
      --layers 64 --kv-heads 8 --head-size 128 --tokens 2000 --svg plan.svg
  kvferry plan --prefill tp=4 --decode tp=4 --layers 80 --kv-heads 8 --head-size 128 --tokens 8192 \\
      --rate 8 --engines 8:4 --link 100 --queue 1
"""
)


MOST_LAYERS = 8192
"""With K and V each, a rank has no more."""

_layers = between(1, MOST_LAYERS, f"whole number from 1 to {MOST_LAYERS}")


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else count(text)


# What argparse says of a text that is none.
_count_or_none.__name__ = "whole number"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--prefill", required=True, metavar="KEY=VALUE,...", help="shape of the prefill engine")
    parser.add_argument("--decode", required=True, metavar="KEY=VALUE,...", help="shape of the decode engine")
    parser.add_argument("--layers", required=True, type=_layers, metavar="N", help="layers of the model")
    add_model(parser)
    parser.add_argument("--tokens", type=count, default=2000, metavar="N", help="of the prompt (default %(default)s)")
    parser.add_argument(
        "--cached", type=_count_or_none, default=0, metavar="N", help="tokens the decode engine has already (default 0)"
    )
    parser.add_argument(
        "--blocks",
        choices=("scattered", "consecutive"),
        default="scattered",
        help="whether neighbours in the request are neighbours in memory (default %(default)s)",
    )
    capacity.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of a table")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    Raises `UsageError` for options that do not fit each other and `KvferryError` for engines that do not.
    """
    load = capacity.load(options)
    asked = deployment(options)
    described = describe(asked)
    request = Request(
        _shape("prefill", options.prefill),
        _shape("decode", options.decode),
        options.tokens,
        options.cached,
        options.blocks,
    )
    if options.svg is not None:
        try:
            options.svg.write_text(svg(request, described), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg: {options.svg} cannot be written: {error.strerror or error}") from error
    needed = None if load is None else capacity.sums(load, asked, described)
    if options.json:
        more = {} if needed is None else {"capacity": needed}
        print(json.dumps({"deployment": asked, **described, **more}, indent=2))
        return 0
    print(table(request, described))
    if load is not None and needed is not None:
        print(f"\n{capacity.table(load, needed)}")
    return 0


def _shape(engine: str, typed: str) -> str:
    keys: dict[str, Any] = parse_engine(f"--{engine}", typed)
    words = [f"tp {keys.get('tp', 1)}", f"pp {keys.get('pp', 1)}"]
    if keys.get("dcp", 1) > 1:
        words.append(f"dcp {keys['dcp']} by {keys.get('interleave', 1)}")
    blocks = "+".join(str(number) for number in keys.get("block", [16]))
    return f"{' x '.join(words)}, blocks of {blocks} tokens, {keys.get('layout', 'head-major')}"
