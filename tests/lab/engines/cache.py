"""A cache whose bytes tell what they should be."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LAYERS = 4
TOKENS = 16
_KEY, _LAYER, _PLACE, _WORD = (np.uint32(x) for x in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F))


class Cache:
    """A rank's `LAYERS` layers of `blocks` blocks in one region. A block has `block_bytes` bytes and `heads` heads
    over all of `tp` ranks; this is rank `rank`.

    The bytes of a request differ by request, layer, place in the request's block list, and offset. They do not depend
    on the block's id, so that both engines can tell what a block must hold.
    """

    def __init__(self, blocks: int, block_bytes: int, heads: int = 1, tp: int = 1, rank: int = 0) -> None:
        self.blocks, self.heads, self.tp, self.rank = blocks, heads, tp, rank
        self.block_bytes = block_bytes // tp
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, LAYERS * blocks * self.block_bytes, flags=private)
        self.words = np.frombuffer(self._memory, np.uint32).reshape(LAYERS, blocks, self.block_bytes // 4)
        # Written, so that all of it is resident from the start.
        self.words.fill(1)
        self._ramp = np.arange(block_bytes // 4, dtype=np.uint32).reshape(tp, -1)[rank] * _WORD
        self._layers = np.arange(LAYERS, dtype=np.uint32) * _LAYER

    def give_up(self) -> None:
        """The bytes are gone, and whoever touches the memory gets a fault."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._protect(0)

    def take_back(self) -> None:
        """The memory of before, with other bytes."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self.words.fill(1)

    def _protect(self, access: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.words.ctypes.data)
        if libc.mprotect(address, ctypes.c_size_t(self.words.nbytes), access) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def geometry(self) -> dict[str, object]:
        """The address map, for `Worker.set_geometry`."""
        heads = self.heads // self.tp
        head = self.block_bytes // heads
        area = {
            "part": "kv",
            "group": 0,
            "region": 0,
            "num_blocks": self.blocks,
            "block_stride": self.block_bytes,
            "heads": heads,
            "first_head": self.rank * heads,
            "total_heads": self.heads,
            "head_stride": head,
            "tokens": TOKENS,
            "token_stride": head // TOKENS,
            "content": head // TOKENS,
        }
        per_layer = self.blocks * self.block_bytes
        return {
            "groups": [{"kind": "full", "block_size": TOKENS}],
            "areas": [{**area, "layer": f"layer.{i}", "offset": i * per_layer} for i in range(LAYERS)],
        }

    def _expected(self, key: int, layer: int, count: int, first: int = 0) -> NDArray[np.uint32]:
        places = np.arange(first, first + count, dtype=np.uint32) * _PLACE
        base = places + self._layers[layer] + np.uint32(key & 0xFFFFFFFF) * _KEY
        expected: NDArray[np.uint32] = base[:, None] ^ self._ramp[None, :]
        return expected

    def fill(self, key: int, blocks: Sequence[int], first: int = 0) -> None:
        """Gives the blocks the bytes of request `key`, from its block `first` on."""
        with np.errstate(over="ignore"):
            for layer in range(LAYERS):
                self.words[layer, blocks] = self._expected(key, layer, len(blocks), first)

    def wrong_bytes(self, key: int, blocks: Sequence[int]) -> int:
        """How many bytes of the blocks are not those of request `key`."""
        wrong = 0
        with np.errstate(over="ignore"):
            for layer in range(LAYERS):
                expected = self._expected(key, layer, len(blocks))
                found = self.words[layer, blocks]
                if not np.array_equal(expected, found):
                    wrong += int(np.count_nonzero(expected.view(np.uint8) != found.view(np.uint8)))
        return wrong
