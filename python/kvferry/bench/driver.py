"""CUDA's driver library alone, without numpy."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

DEVICE = 0


@cache
def driver() -> Any:
    """The driver with the first GPU's primary context made current; raises `OSError` where there is none."""
    library = ctypes.CDLL("libcuda.so.1")
    check(library, "cuInit", 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(library, "cuDeviceGet", ctypes.byref(device), DEVICE)
    check(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    check(library, "cuCtxSetCurrent", context)
    return library


def check(library: Any, function: str, *arguments: Any) -> None:
    """Calls a function of the driver; raises `OSError` unless it succeeds."""
    status = getattr(library, function)(*arguments)
    if status != 0:
        raise OSError(f"{function} failed with CUDA error {status}")


def why_not() -> str | None:
    """Why there is no GPU to measure; None when there is one. Makes no context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        check(library, "cuInit", 0)
        check(library, "cuDeviceGetCount", ctypes.byref(count))
    except OSError as error:
        return str(error)
    return None if count.value else "CUDA's driver finds no GPU"


class DeviceMemory:
    """`nbytes` of the first GPU's memory, to be filled from and compared with host memory."""

    def __init__(self, nbytes: int) -> None:
        place = ctypes.c_uint64()
        check(driver(), "cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(nbytes))
        self.address, self.nbytes = place.value, nbytes

    def upload(self, host: int) -> None:
        """Copies all of it from the host address `host`."""
        check(
            driver(),
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(host),
            ctypes.c_size_t(self.nbytes),
        )

    def download(self, host: int) -> None:
        """Copies all of it to the host address `host`."""
        check(
            driver(),
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(host),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(self.nbytes),
        )
