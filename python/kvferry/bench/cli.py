"""Measures kvferry, beside NIXL (--peer nixl), Mooncake (--peer mooncake) and the medium itself (--limit).

Every byte that is moved is compared, outside the timed part. docs/benchmarks.md tells how each figure is taken."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .errors import UsageError
from .sizes import between, parse_size

EPILOG = """example:
  kvferry bench transfer --transport tcp --block-bytes 16KiB --blocks 2048 --peer nixl --limit
"""


PATTERNS = ("random", "contiguous", "strided")
"""As in `work.Work`."""


def _block_bytes(text: str) -> int:
    value = parse_size(text)
    if not 1 << 10 <= value <= 4 << 20 or value % 8:
        raise ValueError(text)
    return value


_block_bytes.__name__ = "number of bytes from 1KiB to 4MiB that 8 divides"


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 10_000:
        raise ValueError(text)
    return value / 1e3


_milliseconds.__name__ = "number of milliseconds"


def _file(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_file():
        raise ValueError(text)
    return path


_file.__name__ = "path of a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's subcommands and their options."""
    works = parser.add_subparsers(dest="bench", required=True, metavar="WORK")
    add_transfer(works)
    add_others(works)


def _common(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument(
        "--rounds", type=between(1, 10_000), default=rounds, metavar="N", help="counted rounds (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")


def add_transfer(works: Any) -> None:
    """`kvferry bench transfer`."""
    parser = works.add_parser(
        "transfer",
        help="blocks from one process to another",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _common(parser, 15)
    add = parser.add_argument
    add("--pattern", choices=PATTERNS, default="random", help="of the blocks in memory (default %(default)s)")
    add("--block-bytes", type=_block_bytes, default=16384, metavar="SIZE", help="1KiB to 4MiB (default 16KiB)")
    add("--blocks", type=between(1, 10**6), default=2048, metavar="N", help="per layer and request (default 2048)")
    add("--layers", type=between(1, 8192), default=1, metavar="N", help="(default 1)")
    add("--direction", choices=("read", "write"), default="read", help="(default %(default)s)")
    add("--requests", type=between(1, 4096), default=1, metavar="N", help="started at once (default 1)")
    add("--transport", choices=("shm", "tcp", "cuda"), default="shm", help="(default %(default)s)")
    add("--api", choices=("agent", "worker"), default="agent", help="what of kvferry is used (default %(default)s)")
    add("--poll-ms", type=_milliseconds, default=0.0, metavar="MS", help="look for the end at this interval only")
    add("--watch", action="store_true", help="see by the memory when the last byte came, for `notify`; costs some CPU")
    add(
        "--peer",
        choices=("nixl", "mooncake"),
        action="append",
        default=[],
        help="alternate with the nixl package, num_threads 0 and 4, or over tcp with Mooncake's engine, 4 and 16 "
        "connections; may be given twice",
    )
    add("--limit", action="store_true", help="alternate with the medium itself")
    add("--library", type=_file, metavar="FILE", help="alternate with another build of libkvferry.so")
    add(
        "--am-limit", type=Path, metavar="PROGRAM", help="with --limit on tcp: what `cargo bench --bench am_limit` runs"
    )
    add("--huge-pages", action="store_true", help="ask for transparent huge pages for all memory")
    add("--ucx", action="append", default=[], metavar="NAME=VALUE", help="a UCX setting of kvferry's agents")
    add("--grow", choices=("blocks", "block-bytes", "layers", "requests"), help="measure again with twice as many, and")
    add("--steps", type=between(2, 12), default=4, metavar="N", help="so on, N times in all (default %(default)s)")
    add("--plot", type=Path, metavar="FILE.svg", help="draw every round's time, or with --grow how the medians grow")


def add_others(works: Any) -> None:
    """The other subcommands."""
    cold = works.add_parser("handshake", help="first contact to first byte")
    _common(cold, 15)
    cold.add_argument("--ranks", type=between(1, 256), default=1, metavar="N", help="of the producer (default 1)")
    cold.add_argument(
        "--blocks", type=between(1024, 1 << 22), default=131_072, metavar="N", help="of all 64 layers (default 131072)"
    )
    visits = works.add_parser("listener", help="handshakes per second")
    visits.add_argument("--clients", type=between(1, 10_000), default=1000, metavar="N", help="at once (default 1000)")
    visits.add_argument("--total", type=between(1, 10**7), default=20_000, metavar="N", help="handshakes (20000)")
    visits.add_argument("--json", type=Path, metavar="FILE", help="also write the row as JSON")
    idle = works.add_parser("idle", help="processor time while nothing is moved")
    idle.add_argument("--peers", type=between(1, 1000), default=100, metavar="N", help="connected (default 100)")
    idle.add_argument("--seconds", type=between(1, 3600), default=10, metavar="S", help="(default 10)")
    idle.add_argument("--json", type=Path, metavar="FILE", help="also write the row as JSON")
    for parser in (cold, idle):
        parser.add_argument("--transport", choices=("shm", "tcp"), default="tcp", help="(default %(default)s)")
        parser.add_argument("--peer", choices=("nixl",), help="also the nixl package, num_threads 0 and 4")
    behind = works.add_parser("behind", help="one block behind a large request to the same peer")
    _common(behind, 15)
    behind.add_argument("--transport", choices=("shm", "tcp"), default="tcp", help="(default %(default)s)")
    behind.add_argument("--block-bytes", type=_block_bytes, default=16384, metavar="SIZE", help="(default 16KiB)")
    behind.add_argument("--blocks", type=between(2, 10**6), default=32768, metavar="N", help="of the large (32768)")
    behind.add_argument("--peer", choices=("nixl",), help="also the nixl package, num_threads 0 and 4")
    counting = works.add_parser("telemetry", help="what counting and tracing cost a hand-over")
    _common(counting, 30)
    counting.add_argument("--sittings", type=between(1, 100), default=4, metavar="N", help="(default %(default)s)")
    counting.add_argument("--transport", choices=("shm", "tcp"), default="shm", help="(default %(default)s)")
    plans = works.add_parser("plan", help="working out what to copy, and how that grows with the blocks")
    _common(plans, 15)
    plans.add_argument("--layers", type=between(1, 8192), default=64, metavar="N", help="(default 64)")
    plans.add_argument("--blocks", type=between(1, 10**6), default=500, metavar="N", help="at first (default 500)")
    plans.add_argument("--steps", type=between(1, 12), default=4, metavar="N", help="doublings and one (default 4)")
    plans.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw how the medians grow")


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    Raises `UsageError` for what cannot be, `BenchError` for what failed.
    """
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise UsageError("kvferry bench needs numpy: pip install numpy") from None
    # Before anything is measured that would be lost.
    for option in ("json", "plot"):
        path = getattr(options, option, None)
        if path is not None and not os.access(path.parent, os.W_OK):
            raise UsageError(f"--{option}: {path} cannot be written: there is no folder {path.parent} to write to")
    # Warnings about the loopback would stand between the figures.
    os.environ.setdefault("KVFERRY_LOG", "error")
    from . import commands

    return int(getattr(commands, options.bench)(options))
