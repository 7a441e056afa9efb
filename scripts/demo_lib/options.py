"""The command line of `scripts/demo`.

Run as a program it checks the command line with nothing installed, and prints what the run needs: the part of
scripts/setup, then `kvferry` if the package has to be built.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

CONNECTORS = ("kvferry", "stock", "stock-quiet")
TRANSPORTS = ("tcp", "shm")
EXECUTORS = ("mp", "ray")
MODELS = ("llama", "hybrid")


@dataclass(frozen=True)
class Shape:
    """How many ranks an engine has: tensor-parallel times pipeline-parallel."""

    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Worker processes of the engine."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp={self.tp},pp={self.pp}"


def parse_shape(text: str) -> Shape:
    """Reads `tp=2`, `pp=2` or `tp=2,pp=2`; what is not named is 1."""
    sizes = {"tp": 1, "pp": 1}
    for part in text.split(","):
        key, separator, value = part.strip().partition("=")
        if not separator or key not in sizes:
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r}: expected tp=N, pp=N or tp=N,pp=N")
        if not value.isdigit() or not 1 <= int(value) <= 8:
            raise argparse.ArgumentTypeError(f"{key}={value!r} in {text!r}: expected a whole number from 1 to 8")
        sizes[key] = int(value)
    return Shape(**sizes)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


@dataclass(frozen=True)
class Options:
    """What one run does."""

    prefill: Shape
    decode: Shape
    transport: str | None
    requests: int
    connectors: tuple[str, ...]
    compare: bool
    model: str
    executor: str
    block_size: int | None
    json: Path | None
    negative_control: bool
    start_limit_s: int


def build_parser() -> argparse.ArgumentParser:
    """The parser, also used for `--help`."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=(
            "Runs vLLM on CPU as a prefill and a decode server with a tiny random model, moves the KV cache between "
            "them, and checks that every greedy token is that of a single server. Exit status 0 only when all are "
            "equal, vLLM's own counters say that the decode server got its cache from outside, and the negative "
            "control (KV blocks of another prompt) changes the output."
        ),
    )
    parser.add_argument("--prefill", type=parse_shape, default=Shape(), metavar="tp=N[,pp=N]", help="prefill engine")
    parser.add_argument("--decode", type=parse_shape, default=Shape(), metavar="tp=N[,pp=N]", help="decode engine")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="the only kind of UCX transport to use (default: what UCX chooses)"
    )
    parser.add_argument("--requests", type=_positive, default=12, metavar="N", help="prompts to check (default 12)")
    parser.add_argument(
        "--connector",
        choices=CONNECTORS,
        default="kvferry",
        help="stock: vLLM's NixlConnector as shipped; stock-quiet: without its progress thread and CPU pinning",
    )
    parser.add_argument("--compare", action="store_true", help="run all three connectors in turn and print one table")
    parser.add_argument("--model", choices=MODELS, default="llama", help="hybrid: sliding-window and full attention")
    parser.add_argument("--executor", choices=EXECUTORS, default="mp", help="vLLM's executor backend")
    parser.add_argument("--block-size", type=_positive, metavar="N", help="tokens per KV block (default: vLLM's)")
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
    return parser


def parse_options(arguments: list[str]) -> Options:
    """Parses the command line; prints an error and exits with status 2 where it is wrong."""
    parsed = build_parser().parse_args(arguments)
    return Options(
        prefill=parsed.prefill,
        decode=parsed.decode,
        transport=parsed.transport,
        requests=parsed.requests,
        connectors=CONNECTORS if parsed.compare else (parsed.connector,),
        compare=parsed.compare,
        model=parsed.model,
        executor=parsed.executor,
        block_size=parsed.block_size,
        json=parsed.json,
        negative_control=parsed.negative_control,
        start_limit_s=parsed.start_limit,
    )


if __name__ == "__main__":
    _options = parse_options(sys.argv[1:])
    print("ray" if _options.executor == "ray" else "vllm", *(["kvferry"] if "kvferry" in _options.connectors else []))
