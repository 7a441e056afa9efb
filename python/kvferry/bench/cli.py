"""Measures kvferry on this host, or between two hosts: `serve` on one, `transfer --peer` on the other.

Every byte that is moved is compared, outside the timed part. docs/benchmarks.md tells how each figure is taken."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .errors import UsageError
from .sizes import between, host_and_port, parse_size

EPILOG = """examples:
  kvferry bench transfer --transport tcp --block-bytes 16KiB --blocks 2048

  kvferry bench serve                           on the host 10.0.0.1
  kvferry bench transfer --peer 10.0.0.1        on another: latency and rate over block sizes
"""
PORT = 5679
"""Of a server: next to that of engines, 5680."""

PATTERNS = ("random", "contiguous", "strided")
"""As in `work.Work`."""


def _block_bytes(text: str) -> int:
    value = parse_size(text)
    if not 64 <= value <= 64 << 20 or value % 8:
        raise ValueError(text)
    return value


_block_bytes.__name__ = "number of bytes from 64B to 64MiB that 8 divides"


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 10_000:
        raise ValueError(text)
    return value / 1e3


_milliseconds.__name__ = "number of milliseconds"


def _mebibytes(text: str) -> int:
    value = parse_size(text)
    if not 1 << 20 <= value <= 1 << 40 or value % (1 << 20):
        raise ValueError(text)
    return value


_mebibytes.__name__ = "number of bytes from 1MiB to 1024GiB that 1MiB divides"


def _peer(text: str) -> tuple[str, int]:
    return host_and_port(text, str(PORT))


_peer.__name__ = "HOST or HOST:PORT"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's subcommands and their options."""
    works = parser.add_subparsers(dest="bench", required=True, metavar="WORK")
    add_transfer(works)
    add_serve(works)
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
        help="blocks from one process to another, or to and from another host",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _common(parser, 15)
    add = parser.add_argument
    add("--pattern", choices=PATTERNS, default="random", help="of the blocks in memory (default %(default)s)")
    add("--block-bytes", type=_block_bytes, metavar="SIZE", help="64B to 64MiB (default 16KiB; with --peer several)")
    add(
        "--blocks", type=between(1, 10**6), metavar="N", help="per layer and request (default 2048; with --peer 32 MiB)"
    )
    add("--layers", type=between(1, 8192), default=1, metavar="N", help="(default 1)")
    add("--direction", choices=("read", "write"), default="read", help="(default %(default)s)")
    add("--requests", type=between(1, 4096), default=1, metavar="N", help="started at once (default 1)")
    _endpoint(parser, "shm; with --peer auto")
    add("--peer", type=_peer, metavar="HOST[:PORT]", help=f"measure with `kvferry bench serve` there (port {PORT})")
    add("--api", choices=("agent", "worker"), default="agent", help="what of kvferry is used (default %(default)s)")
    add("--poll-ms", type=_milliseconds, default=0.0, metavar="MS", help="look for the end at this interval only")
    add("--watch", action="store_true", help="see by the memory when the last byte came, for `notify`; costs some CPU")
    add("--huge-pages", action="store_true", help="ask for transparent huge pages for all memory")
    add("--grow", choices=("blocks", "block-bytes", "layers", "requests"), help="measure again with twice as many, and")
    add("--steps", type=between(2, 12), default=4, metavar="N", help="so on, N times in all (default %(default)s)")
    add("--plot", type=Path, metavar="FILE.svg", help="draw every round's time, or with --grow how the medians grow")


def _endpoint(parser: argparse.ArgumentParser, default: str) -> None:
    add = parser.add_argument
    add("--transport", choices=("auto", "shm", "tcp", "cuda"), help=f"cuda: auto, memory cuda (default {default})")
    add("--memory", choices=("host", "cuda"), help="of this side; cuda: the first GPU's (default host)")
    add("--ucx", action="append", default=[], metavar="NAME=VALUE", help="a UCX setting of kvferry's agents")


def add_serve(works: Any) -> None:
    """`kvferry bench serve`."""
    parser = works.add_parser("serve", help="memory for `transfer --peer` on another host, until Ctrl-C")
    add = parser.add_argument
    add("--port", type=between(0, 65_535), default=PORT, metavar="N", help="(default %(default)s; 0: a free one)")
    add("--size", type=_mebibytes, default=256 << 20, metavar="SIZE", help="to read, and to write (default 256MiB)")
    _endpoint(parser, "auto")


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
    behind = works.add_parser("behind", help="one block behind a large request to the same peer")
    _common(behind, 15)
    behind.add_argument("--transport", choices=("shm", "tcp"), default="tcp", help="(default %(default)s)")
    behind.add_argument("--block-bytes", type=_block_bytes, default=16384, metavar="SIZE", help="(default 16KiB)")
    behind.add_argument("--blocks", type=between(2, 10**6), default=32768, metavar="N", help="of the large (32768)")
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
