"""Memory of the first GPU for a measurement."""

from __future__ import annotations

import ctypes

from .driver import DEVICE, DeviceMemory, check, driver, why_not
from .memory import Memory, Waiting
from .work import Ids, Work

__all__ = ["DEVICE", "CudaMemory", "why_not"]


class CudaMemory(Memory):
    """As `Memory`, with the bytes on the GPU. `words` is the host's copy, which only fill, wipe and check touch."""

    kind = "cuda"

    def __init__(self, work: Work) -> None:
        self._device: DeviceMemory | None = None
        super().__init__(work)
        self._device = DeviceMemory(work.pool_bytes)
        self.address = self._device.address
        self._upload()

    def _upload(self) -> None:
        if self._device is not None:
            self._device.upload(self.words.ctypes.data)

    def fill(self) -> None:
        super().fill()
        self._upload()

    def wipe(self, number: int) -> None:
        super().wipe(number)
        self._upload()

    def wrong_words(self, pairs: list[tuple[Ids, Ids]]) -> int:
        if self._device is not None:
            self._device.download(self.words.ctypes.data)
        return super().wrong_words(pairs)

    def last_words(self, pairs: list[tuple[Ids, Ids]]) -> Waiting:
        raise ValueError("a thread of the host cannot watch the memory of a GPU")

    def copy_from(self, other: CudaMemory, runs: list[tuple[int, int]]) -> None:
        """Copies `(offset, bytes)` within the GPU and waits for it."""
        library = driver()
        for offset, size in runs:
            to, source = ctypes.c_uint64(self.address + offset), ctypes.c_uint64(other.address + offset)
            check(library, "cuMemcpyDtoDAsync_v2", to, source, ctypes.c_size_t(size), None)
        check(library, "cuCtxSynchronize")
