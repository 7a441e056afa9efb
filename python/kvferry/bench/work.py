"""What is moved: blocks, layers, pattern, and the block ids that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .sizes import size_text

Pattern = Literal["random", "contiguous", "strided"]
Ids = NDArray[np.uint32]


@dataclass(frozen=True)
class Work:
    """One transfer, or several at once.

    Each of `requests` requests moves `blocks` blocks of `block_bytes` bytes in each of `layers` layers. `direction` is
    seen from the process that starts the transfer: "read" copies from the other's memory, "write" to it. `huge_pages`:
    whether the memory asks for transparent huge pages; the kernel copies between processes page by page.
    """

    pattern: Pattern = "random"
    block_bytes: int = 16384
    blocks: int = 2048
    layers: int = 1
    requests: int = 1
    direction: Literal["read", "write"] = "read"
    huge_pages: bool = False

    @property
    def request_bytes(self) -> int:
        """Bytes of one request."""
        return self.block_bytes * self.blocks * self.layers

    @property
    def bytes(self) -> int:
        """Bytes of all requests."""
        return self.request_bytes * self.requests

    @property
    def pool_blocks(self) -> int:
        """Blocks per layer in either process's memory: more than are moved, so that what must not change is seen."""
        moved = self.blocks * self.requests
        return 2 * moved if self.pattern == "strided" else moved + moved // 8 + 1

    @property
    def pool_bytes(self) -> int:
        """Bytes of either process's memory."""
        return self.pool_blocks * self.layers * self.block_bytes

    @property
    def text(self) -> str:
        """The work in words."""
        layers = f" x {self.layers} layers" if self.layers > 1 else ""
        many = f"{self.requests} requests at once of " if self.requests > 1 else ""
        huge = ", huge pages" if self.huge_pages else ""
        verb = "READ" if self.direction == "read" else "WRITE"
        return f"{many}{self.blocks:,} x {size_text(self.block_bytes)}{layers} {self.pattern}, {verb}{huge}"

    def ids(self) -> list[tuple[Ids, Ids]]:
        """Per request, the block ids in the memory that is written and in the memory that is read.

        The same in every process. No block is named twice.
        """
        moved = self.blocks * self.requests
        if self.pattern == "random":
            draw = np.random.default_rng(20260101)
            ours, theirs = (draw.permutation(self.pool_blocks)[:moved] for _ in range(2))
        elif self.pattern == "strided":
            # Different parities, so that equal numbers on both sides prove nothing.
            ours, theirs = np.arange(moved) * 2, np.arange(moved) * 2 + 1
        else:
            ours, theirs = np.arange(moved), np.arange(moved) + 1
        written, read = (ids.astype(np.uint32).reshape(self.requests, self.blocks) for ids in (ours, theirs))
        return list(zip(written, read, strict=True))
