"""Memory of the first GPU for a measurement, through CUDA's driver library alone."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from .memory import Memory, Waiting
from .work import Ids, Work

DEVICE = 0


@cache
def _driver() -> Any:
    """The driver with the first GPU's primary context made current; raises `OSError` where there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    _check(driver, "cuInit", 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver, "cuDeviceGet", ctypes.byref(device), DEVICE)
    _check(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _check(driver, "cuCtxSetCurrent", context)
    return driver


def _check(driver: Any, function: str, *arguments: Any) -> None:
    status = getattr(driver, function)(*arguments)
    if status != 0:
        raise OSError(f"{function} failed with CUDA error {status}")


def why_not() -> str | None:
    """Why there is no GPU to measure; None when there is one. Makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        _check(driver, "cuInit", 0)
        _check(driver, "cuDeviceGetCount", ctypes.byref(count))
    except OSError as error:
        return str(error)
    return None if count.value else "CUDA's driver finds no GPU"


class CudaMemory(Memory):
    """As `Memory`, with the bytes on the GPU. `words` is the host's copy, which only fill, wipe and check touch."""

    kind = "cuda"

    def __init__(self, work: Work) -> None:
        self._device: int | None = None
        super().__init__(work)
        driver, place = _driver(), ctypes.c_uint64()
        _check(driver, "cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(work.pool_bytes))
        self._device = self.address = place.value
        self._upload()

    def _upload(self) -> None:
        if self._device is not None:
            host = ctypes.c_void_p(self.words.ctypes.data)
            _check(
                _driver(), "cuMemcpyHtoD_v2", ctypes.c_uint64(self._device), host, ctypes.c_size_t(self.words.nbytes)
            )

    def fill(self) -> None:
        super().fill()
        self._upload()

    def wipe(self, number: int) -> None:
        super().wipe(number)
        self._upload()

    def wrong_words(self, pairs: list[tuple[Ids, Ids]]) -> int:
        host, size = ctypes.c_void_p(self.words.ctypes.data), ctypes.c_size_t(self.words.nbytes)
        _check(_driver(), "cuMemcpyDtoH_v2", host, ctypes.c_uint64(self.address), size)
        return super().wrong_words(pairs)

    def last_words(self, pairs: list[tuple[Ids, Ids]]) -> Waiting:
        raise ValueError("a thread of the host cannot watch the memory of a GPU")

    def copy_from(self, other: CudaMemory, runs: list[tuple[int, int]]) -> None:
        """Copies `(offset, bytes)` within the GPU and waits for it."""
        driver = _driver()
        for offset, size in runs:
            to, source = ctypes.c_uint64(self.address + offset), ctypes.c_uint64(other.address + offset)
            _check(driver, "cuMemcpyDtoDAsync_v2", to, source, ctypes.c_size_t(size), None)
        _check(driver, "cuCtxSynchronize")
