"""Reads and writes between two instances of one card, as MIG makes them, or within one. For the double."""

from __future__ import annotations

import sys

import check
import cuda


def main(instance: str) -> None:
    """`instance`: the peer's, as CUDA_VISIBLE_DEVICES names it."""
    print(check.Checks(cuda.Driver()).move("auto", "cuda", "cuda", visible=instance), flush=True)


main(sys.argv[1])
