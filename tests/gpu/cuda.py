"""Device memory through the CUDA driver alone, and host memory behind the same interface."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.integer[Any]]


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
        self.devices = count.value
        """How many this process sees."""
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

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Makes another device the one that memory is allocated on. Its context is kept."""
        ordinal, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(context))

    def free_bytes(self) -> int:
        """Device memory that nobody has."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextlib.contextmanager
    def blocked_default_stream(self) -> Iterator[None]:
        """Keeps the default stream, and all that wait for it, from going on meanwhile."""
        go_on, has_begun = threading.Event(), threading.Event()

        def wait(_: object) -> None:
            has_begun.set()
            go_on.wait()

        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(wait)
        self.call("cuLaunchHostFunc", None, function, None)
        has_begun.wait()
        try:
            yield
        finally:
            go_on.set()
            self.call("cuCtxSynchronize")

    def describe(self) -> str:
        """The device's name and the driver's CUDA version."""
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, ctypes.c_int(256), self._device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{name.value.decode()}, driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


class DeviceMemory:
    """An allocation on a device. Lives until the process ends, because agents use it until then."""

    def __init__(self, driver: Driver, nbytes: int, device: int = 0) -> None:
        self._driver, self._device = driver, device
        address = ctypes.c_uint64()
        with driver.on(device):
            driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.address: int = address.value
        self.nbytes = nbytes

    def put(self, data: Bytes) -> None:
        """Replaces all bytes."""
        source = np.ascontiguousarray(data)
        # Only its own device is sure to reach it.
        with self._driver.on(self._device):
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
        with self._driver.on(self._device):
            self._driver.call(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(data.ctypes.data),
                ctypes.c_uint64(self.address),
                ctypes.c_size_t(self.nbytes),
            )
        return data

    def free(self) -> None:
        """Gives it back to the device."""
        self._driver.call("cuMemFree_v2", ctypes.c_uint64(self.address))


NO_HANDLES, DESCRIPTORS, FABRIC = 0, 1, 8
"""CUmemAllocationHandleType."""


class PooledMemory(DeviceMemory):
    """Memory of a device's pool, as of cudaMallocAsync."""

    def __init__(self, driver: Driver, nbytes: int, device: int = 0) -> None:
        self._driver, self._device = driver, device
        address = ctypes.c_uint64()
        with driver.on(device):
            driver.call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(nbytes), None)
            driver.call("cuCtxSynchronize")
        self.address = address.value
        self.nbytes = nbytes

    def free(self) -> None:
        """Gives it back to the pool."""
        with self._driver.on(self._device):
            self._driver.call("cuMemFreeAsync", ctypes.c_uint64(self.address), None)
            self._driver.call("cuCtxSynchronize")


class PiecewiseMemory(DeviceMemory):
    """A range of several allocations, as PyTorch's expandable segments and vLLM's sleep mode have.

    They can be passed to other processes by handles of the type `handles`. Nothing is mapped where the piece `missing`
    would be."""

    def __init__(self, driver: Driver, nbytes: int, handles: int, missing: int | None = None, device: int = 0) -> None:
        self._driver, self._device = driver, device
        self._properties = _Properties(type=1, handle_types=handles, location=_Location(type=1, id=device))
        grain = ctypes.c_size_t()
        properties = ctypes.byref(self._properties)
        driver.call("cuMemGetAllocationGranularity", ctypes.byref(grain), properties, ctypes.c_int(0))
        self._grain = grain
        self.nbytes = nbytes
        # The range lies across the end of the first piece.
        before = min(nbytes // 2, grain.value // 2) // 512 * 512
        pieces = 1 + -(-(nbytes - before) // grain.value)
        address = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._whole = ctypes.c_size_t(pieces * grain.value)
        driver.call("cuMemAddressReserve", ctypes.byref(address), self._whole, ctypes.c_size_t(0), zero, zero)
        self._base = address
        self.address = address.value + grain.value - before
        self._places = [address.value + piece * grain.value for piece in range(pieces) if piece != missing]
        self._handles: list[ctypes.c_uint64] = []
        self.remap()

    @property
    def mapped_bytes(self) -> int:
        """Memory that the device has given for it, which is more than `nbytes`; 0 when it is unmapped."""
        return len(self._handles) * self._grain.value

    def remap(self) -> None:
        """Maps new memory at the same addresses. It holds anything."""
        zero = ctypes.c_uint64(0)
        access = _Access(location=self._properties.location, flags=3)
        for place in self._places:
            handle, at = ctypes.c_uint64(), ctypes.c_uint64(place)
            properties = ctypes.byref(self._properties)
            self._driver.call("cuMemCreate", ctypes.byref(handle), self._grain, properties, zero)
            self._handles.append(handle)
            self._driver.call("cuMemMap", at, self._grain, ctypes.c_size_t(0), handle, zero)
            self._driver.call("cuMemSetAccess", at, self._grain, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self) -> None:
        """Gives the memory back and keeps the addresses, as vLLM does when it falls asleep."""
        for place, handle in zip(self._places, self._handles, strict=True):
            self._driver.call("cuMemUnmap", ctypes.c_uint64(place), self._grain)
            self._driver.call("cuMemRelease", handle)
        self._handles = []

    def free(self) -> None:
        """Gives it back to the device, and the addresses too."""
        self.unmap()
        self._driver.call("cuMemAddressFree", self._base, self._whole)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class TorchMemory:
    """A tensor's memory, from whichever allocator the environment names."""

    def __init__(self, nbytes: int) -> None:
        import torch  # the other tests need none

        # Not at the beginning of its allocation.
        self._torch = torch
        self._tensor = torch.zeros(nbytes + 512, dtype=torch.uint8, device="cuda")[512:]
        torch.cuda.synchronize()
        self.address: int = self._tensor.data_ptr()
        self.nbytes = nbytes

    def put(self, data: Bytes) -> None:
        """Replaces all bytes."""
        self._tensor.copy_(self._torch.from_numpy(np.array(data)))
        self._torch.cuda.synchronize()

    def get(self) -> Bytes:
        """A copy of all bytes."""
        data: Bytes = self._tensor.cpu().numpy()
        return data


@contextlib.contextmanager
def computing(is_on: bool) -> Iterator[None]:
    """Keeps the device busy with matrix products on PyTorch's own stream meanwhile."""
    if not is_on:
        yield
        return
    import torch  # the other tests need none

    done = threading.Event()

    def compute() -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
            while not done.is_set():
                for _ in range(20):
                    a = torch.nn.functional.normalize(a @ a)
                torch.cuda.default_stream().synchronize()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def pattern(seed: int, nbytes: int) -> Bytes:
    """Bytes that differ by seed and by place."""
    words = np.arange((nbytes + 7) // 8, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    mixed: Bytes = (words ^ (words >> np.uint64(31))).view(np.uint8)[:nbytes]
    return mixed
