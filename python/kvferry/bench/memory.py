"""A process's memory for a measurement, whose bytes tell what they should be."""

from __future__ import annotations

import mmap
import os
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .work import Ids, Work

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that products with different numbers differ."""
_AT_ONCE = 32 << 20
"""Bytes that are made or compared at a time."""


class Memory:
    """`[layer, block, word]`: words of 8 bytes, each of which tells its place from the beginning.

    Every page is touched by the constructor. One mapping for all layers, so that a single copy can cover it. `pages` is
    a file whose pages it is to have, as `Pages` makes them.
    """

    def __init__(self, work: Work, pages: str | None = None) -> None:
        self.work = work
        self.shape = (work.layers, work.pool_blocks, work.block_bytes // 8)
        if pages is None:
            self._mapping = mmap.mmap(-1, work.pool_bytes)
        else:
            with open(pages, "r+b") as file:
                self._mapping = mmap.mmap(file.fileno(), work.pool_bytes)
        # Said either way, so that all processes have the same, whatever the system's setting.
        self._mapping.madvise(mmap.MADV_HUGEPAGE if work.huge_pages else mmap.MADV_NOHUGEPAGE)
        self.words: NDArray[np.uint64] = np.frombuffer(self._mapping, dtype=np.uint64).reshape(self.shape)
        self.address = int(self.words.ctypes.data)
        self.layer_bytes = work.pool_blocks * work.block_bytes
        self.blank = np.uint64(0)
        self.wipe(0)

    kind: Literal["host", "cuda"] = "host"

    def layer(self, number: int) -> tuple[int, int]:
        """Address and bytes of a layer."""
        return self.address + number * self.layer_bytes, self.layer_bytes

    def fill(self) -> None:
        """Gives every word its own value: what is read from here must be equal to it."""
        for layer in range(self.shape[0]):
            for ids in self._slices(np.arange(self.shape[1], dtype=np.uint32)):
                self.words[layer, ids] = self._expected(layer, ids)

    def wipe(self, number: int) -> None:
        """Overwrites everything with a value that no block holds, another one for each number."""
        self.blank = np.uint64(0x5A5A5A5A00000000 + number)
        self.words[...] = self.blank

    def wrong_words(self, pairs: list[tuple[Ids, Ids]]) -> int:
        """How many words are not what a copy of `pairs` (written, read) must have left here after a wipe."""
        wrong = 0
        untouched = np.ones(self.shape[1], dtype=bool)
        for written, read in pairs:
            untouched[written] = False
            step = max(1, _AT_ONCE // self.work.block_bytes)
            for layer in range(self.shape[0]):
                for start in range(0, len(written), step):
                    found = self.words[layer, written[start : start + step]]
                    wrong += int(np.count_nonzero(found != self._expected(layer, read[start : start + step])))
        for layer in range(self.shape[0]):
            for ids in self._slices(np.flatnonzero(untouched).astype(np.uint32)):
                wrong += int(np.count_nonzero(self.words[layer, ids] != self.blank))
        return wrong

    def last_words(self, pairs: list[tuple[Ids, Ids]]) -> Waiting:
        """The last words of all blocks that are to be written, for seeing when the last of them has come."""
        written = np.concatenate([ids for ids, _ in pairs])
        return Waiting(self.words[:, :, -1], written, self.blank)

    def _slices(self, ids: Ids) -> list[Ids]:
        step = max(1, _AT_ONCE // self.work.block_bytes)
        return [ids[start : start + step] for start in range(0, len(ids), step)]

    def _expected(self, layer: int, ids: Ids) -> NDArray[np.uint64]:
        _, blocks, words = self.shape
        starts = (ids.astype(np.uint64) + np.uint64(layer * blocks)) * np.uint64(words)
        expected: NDArray[np.uint64] = (starts[:, None] + np.arange(words, dtype=np.uint64)) * _FACTOR
        return expected


class Pages:
    """Memory that the processes of all engines share, in turns: then none has the luck of better placed pages."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str], int] = {}

    def of(self, work: Work) -> tuple[str, str] | None:
        """The files for what is written and for what is read. None where huge pages are asked for, which such files may
        not get."""
        if work.huge_pages:
            return None
        return self._file(work.pool_bytes, "written"), self._file(work.pool_bytes, "read")

    def _file(self, size: int, role: str) -> str:
        if (size, role) not in self._files:
            file = os.memfd_create(f"kvferry-bench-{role}")
            os.ftruncate(file, size)
            self._files[size, role] = file
        return f"/proc/{os.getpid()}/fd/{self._files[size, role]}"

    def close(self) -> None:
        """Frees it, when the processes have ended."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class Waiting:
    """Blocks that have not come yet, seen by their last words. Those that came are not looked at again."""

    def __init__(self, words: NDArray[np.uint64], written: Ids, blank: np.uint64) -> None:
        self._words, self._blank = words, blank
        self._layers = np.repeat(np.arange(words.shape[0]), len(written))
        self._blocks = np.tile(written, words.shape[0])

    def over(self) -> bool:
        """Whether all have come."""
        left = self._words[self._layers, self._blocks] == self._blank
        self._layers, self._blocks = self._layers[left], self._blocks[left]
        return not len(self._layers)
