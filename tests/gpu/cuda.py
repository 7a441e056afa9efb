"""Device memory through the CUDA driver alone, and host memory behind the same interface."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class NoCuda(Exception):
    """There is no usable CUDA device; the text says why."""


class Memory(Protocol):
    """Some bytes to be registered."""

    address: int
    nbytes: int

    def put(self, data: Bytes) -> None:
        """Replaces all bytes."""

    def get(self) -> Bytes:
        """A copy of all bytes."""


class HostMemory:
    """Host memory."""

    def __init__(self, nbytes: int) -> None:
        self._array: Bytes = np.zeros(nbytes, dtype=np.uint8)
        self.address: int = self._array.ctypes.data
        self.nbytes = nbytes

    def put(self, data: Bytes) -> None:
        """Replaces all bytes."""
        self._array[:] = data

    def get(self) -> Bytes:
        """A copy of all bytes."""
        copy: Bytes = self._array.copy()
        return copy


class Driver:
    """The CUDA driver with the primary context of device 0 current on the calling thread."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoCuda(f"no CUDA driver ({error})") from None
        try:
            self.call("cuInit", ctypes.c_uint(0))
        except RuntimeError as error:
            raise NoCuda(str(error)) from None
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            raise NoCuda("the CUDA driver sees no device")
        self._device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(0))
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver; an error raises."""
        result = getattr(self._lib, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned CUDA error {result}")

    def describe(self) -> str:
        """The device's name and the driver's CUDA version."""
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, ctypes.c_int(256), self._device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{name.value.decode()}, driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


class DeviceMemory:
    """An allocation on device 0. Lives until the process ends, because agents use it until then."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        address = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.address: int = address.value
        self.nbytes = nbytes

    def put(self, data: Bytes) -> None:
        """Replaces all bytes."""
        source = np.ascontiguousarray(data)
        self._driver.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(self.nbytes),
        )
        # A copy from pageable memory may still be under way on the device.
        self._driver.call("cuCtxSynchronize")

    def get(self) -> Bytes:
        """A copy of all bytes."""
        data: Bytes = np.empty(self.nbytes, dtype=np.uint8)
        self._driver.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(self.nbytes),
        )
        return data


def pattern(seed: int, nbytes: int) -> Bytes:
    """Bytes that differ by seed and by place."""
    words = np.arange((nbytes + 7) // 8, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    mixed: Bytes = (words ^ (words >> np.uint64(31))).view(np.uint8)[:nbytes]
    return mixed
