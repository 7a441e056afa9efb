"""The command line of `scripts/demo`.

Run as a program it checks the command line with nothing installed, and prints what the run needs: the part of
scripts/setup, then `kvferry` if the package has to be built.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

COMPARED = ("kvferry", "kvferry-at-once", "stock", "stock-quiet")
CONNECTORS = (*COMPARED, "stock-plugin")
BACKENDS = ("stock-plugin", "stock")
"""The stock connector with either backend of NIXL, of which --compare-backends gives each its turns."""
TRANSPORTS = ("tcp", "shm")
EXECUTORS = ("mp", "ray")
JUDGED_BY_BYTES = ("mla", "lfm2", "gdn")
"""Models of which vLLM on a CPU does not give the same tokens prefilled as decoded."""

MODELS = ("llama", "hybrid", "chunked", "mla", "lfm2", "mamba2", "states", "gdn")
MATRIX_REQUESTS = 6


@dataclass(frozen=True)
class Shape:
    """An engine's size: ranks are tensor-parallel times pipeline-parallel; a block holds `block` tokens of a group."""

    tp: int = 1
    pp: int = 1
    # None leaves it to vLLM, whose default on a CPU is 128 (16 with MLA).
    block: int | None = None

    @property
    def ranks(self) -> int:
        """Worker processes of the engine."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp={self.tp},pp={self.pp}" + (f",block={self.block}" if self.block is not None else "")


_SHAPE = "tp=N, pp=N and block=N, with commas between them"
# Largest value of each key. One process takes 1.4 GiB and more; a prompt has 1500 tokens at most.
_LARGEST = {"tp": 8, "pp": 8, "block": 1024}


def parse_shape(text: str) -> Shape:
    """Reads such as `tp=2,pp=1,block=32`, in any order; what is not named is left at its default."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, separator, value = part.strip().partition("=")
        if not separator or key not in _LARGEST:
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r}: expected {_SHAPE}")
        if key in sizes:
            raise argparse.ArgumentTypeError(f"{key} is there twice in {text!r}")
        if not (value.isascii() and value.isdigit() and 1 <= int(value) <= _LARGEST[key]):
            raise argparse.ArgumentTypeError(
                f"{key}={value!r} in {text!r}: expected a whole number from 1 to {_LARGEST[key]}"
            )
        sizes[key] = int(value)
    return Shape(**sizes)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


class Options(argparse.Namespace):
    """What one run does."""

    prefill: Shape
    decode: Shape
    transport: str | None
    requests: int
    connectors: tuple[str, ...]
    compare: bool
    model: str
    executor: str
    check_bytes: bool
    json: Path | None
    negative_control: bool
    start_limit: int
    matrix: bool
    only: tuple[str, ...]
    pair_limit: int


def build_parser() -> argparse.ArgumentParser:
    """The parser, also used for `--help`."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=(
            "Runs vLLM on CPU as a prefill and a decode server with a tiny random model, moves the KV cache between "
            "them, and checks that every greedy token is that of a single server. Exit status 0 only when all are "
            "equal, vLLM's own counters say that the decode server got its cache from outside, and the negative "
            "control (KV blocks of another prompt) changes the output. With the models mla, lfm2 and gdn the cache's "
            "bytes decide and not the tokens: of these, vLLM on CPU does not give the same tokens prefilled as decoded."
        ),
    )
    shape = "tp=N,pp=N,block=N"
    parser.add_argument(
        "--prefill",
        type=parse_shape,
        metavar=shape,
        help="prefill engine: ranks, tokens per KV block (default 1, 1, vLLM's)",
    )
    parser.add_argument("--decode", type=parse_shape, metavar=shape, help="decode engine, and the baseline's block")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="the only kind of UCX transport to use (default: what UCX chooses)"
    )
    parser.add_argument(
        "--requests",
        type=_positive,
        metavar="N",
        help=f"prompts to check (default 12, with --matrix {MATRIX_REQUESTS})",
    )
    parser.add_argument(
        "--connector",
        choices=CONNECTORS,
        default="kvferry",
        help="kvferry-at-once: the proxy asks both engines at the same time; stock: vLLM's NixlConnector as shipped; "
        "stock-quiet: without its progress thread and CPU pinning; stock-plugin: stock with kvferry's NIXL plug-in",
    )
    parser.add_argument("--compare", action="store_true", help="run all but stock-plugin in turn and print one table")
    parser.add_argument(
        "--compare-backends",
        type=_positive,
        metavar="TURNS",
        help="run stock-plugin and stock in turn, each so often, and print one table",
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="hybrid: sliding-window and full attention; chunked: chunked local and full attention; mla: latents; "
        "lfm2: short convolutions; mamba2; gdn: gated delta nets; these three beside full attention; states: Mamba2 "
        "alone (default llama)",
    )
    parser.add_argument("--executor", choices=EXECUTORS, default="mp", help="vLLM's executor backend")
    parser.add_argument(
        "--check-bytes",
        action="store_true",
        help="also compare the cache that arrived with the prefill engine's, byte by byte (always with mla, lfm2, gdn)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--negative-control",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send a prompt with another prompt's KV blocks and demand another output",
    )
    parser.add_argument(
        "--start-limit", type=_positive, default=900, metavar="S", help="seconds that servers may take to start"
    )
    matrix = parser.add_argument_group("many pairs of shapes")
    matrix.add_argument(
        "--matrix",
        action="store_true",
        help="run a list of pairs of shapes one after the other and print one table; exit status 0 when all passed",
    )
    matrix.add_argument(
        "--only", type=_names, default=(), metavar="NAME[,NAME...]", help="of the list, only these (default: all)"
    )
    matrix.add_argument(
        "--pair-limit", type=_positive, default=600, metavar="S", help="seconds for one pair, servers' start included"
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    from lab.demo.shapes import PAIRS

    names = tuple(part.strip() for part in text.split(","))
    known = [pair.name for pair in PAIRS]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown pair {name!r}: expected some of {', '.join(known)}")
    return names


def _check(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Ends the program where options do not go together."""
    if parsed.compare and parsed.compare_backends:
        parser.error("--compare and --compare-backends are two comparisons: leave one out")
    if parsed.matrix:
        if parsed.compare or parsed.compare_backends:
            parser.error("--matrix runs one connector: choose it with --connector and leave --compare out")
        for option in ("prefill", "decode", "model"):
            if getattr(parsed, option) is not None:
                parser.error(f"--matrix chooses --{option} itself: leave it out")
    elif parsed.only:
        parser.error("--only belongs to --matrix")


def parse_options(arguments: list[str]) -> Options:
    """Parses the command line; prints an error and exits with status 2 where it is wrong."""
    parser = build_parser()
    options = parser.parse_args(arguments, Options())
    _check(parser, options)
    compared = COMPARED if options.compare else BACKENDS * (options.compare_backends or 0)
    options.connectors, options.compare = compared or (options.connector,), bool(compared)
    options.prefill, options.decode = options.prefill or Shape(), options.decode or Shape()
    options.model = options.model or MODELS[0]
    options.requests = options.requests or (MATRIX_REQUESTS if options.matrix else 12)
    options.check_bytes |= options.model in JUDGED_BY_BYTES
    return options


if __name__ == "__main__":
    _options = parse_options(sys.argv[1:])
    _wheel = ["kvferry"] if any(name.startswith("kvferry") for name in _options.connectors) else []
    _plugin = ["plugin"] if "stock-plugin" in _options.connectors else []
    print("ray" if _options.executor == "ray" else "vllm", *_plugin, *_wheel)
