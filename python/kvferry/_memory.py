"""Where the bytes of a Python object are."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from . import _lib
from ._errors import invalid

Kind = Literal["host", "cuda"]
_KINDS = {"host": "KVF_MEMORY_HOST", "cuda": "KVF_MEMORY_CUDA"}
_VIEW = "register the array that it is a view of, and give the place inside it by offset and stride"


class Span(NamedTuple):
    """Contiguous bytes, and the object that keeps them alive."""

    address: int
    nbytes: int
    kind: Kind
    device: int
    owner: object | None


def memory_arguments(address: int, nbytes: int, kind: str, device: int) -> tuple[Any, int, int, int]:
    """Memory as functions that register it take it."""
    if not isinstance(address, int) or not 0 <= address < 1 << 64:
        raise invalid(f"an address must be an int from 0 to 2**64 - 1, not {address!r}")
    number = _lib.constant(_KINDS, "memory kind", kind)
    pointer = _lib.load().ffi.cast("void *", address)
    return pointer, _lib.whole("nbytes", nbytes), number, _lib.whole("device", device, 32)


def _not_empty(nbytes: int, what: str) -> None:
    if not nbytes:
        raise invalid(f"{what} is empty, so there is nothing to register; register memory after it is allocated")


def span_of(memory: Any, kind: Kind | None, device: int | None) -> Span:
    """The bytes of `memory`, see `Agent.register`. `kind` and `device` override what the object itself says."""
    if isinstance(memory, tuple):
        if len(memory) != 2 or not all(isinstance(part, int) for part in memory):
            raise invalid("memory given as a tuple must be (address, nbytes), both int")
        return Span(memory[0], memory[1], kind or "host", device or 0, None)
    if hasattr(memory, "data_ptr") and hasattr(memory, "element_size"):
        return _of_tensor(memory, kind, device)
    interface = getattr(memory, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_cuda_array(memory, interface, device)
    return _of_buffer(memory, kind)


def _of_tensor(tensor: Any, kind: Kind | None, device: int | None) -> Span:
    if not tensor.is_contiguous():
        raise invalid(
            f"the tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} is not contiguous; "
            "register the storage that it is a view of"
        )
    own_kind: Kind = "cuda" if tensor.is_cuda else "host"
    own_device = tensor.device.index or 0 if tensor.is_cuda else 0
    nbytes = tensor.element_size() * tensor.nelement()
    _not_empty(nbytes, f"the tensor of shape {tuple(tensor.shape)}")
    return Span(tensor.data_ptr(), nbytes, kind or own_kind, own_device if device is None else device, tensor)


def _of_cuda_array(memory: Any, interface: dict[str, Any], device: int | None) -> Span:
    address, read_only = interface["data"]
    if read_only:
        raise invalid("the CUDA array is read-only; register memory that may be written")
    itemsize = int(interface["typestr"][2:])
    nbytes = itemsize
    for extent in interface["shape"]:
        nbytes *= extent
    expected = itemsize
    strides = interface.get("strides")
    if strides is not None:
        for extent, stride in zip(reversed(interface["shape"]), reversed(strides), strict=True):
            if extent > 1 and stride != expected:
                raise invalid(f"the CUDA array with strides {strides} is not contiguous in C order; {_VIEW}")
            expected *= extent
    _not_empty(nbytes, "the CUDA array")
    return Span(address, nbytes, "cuda", device or 0, memory)


def _of_buffer(memory: Any, kind: Kind | None) -> Span:
    try:
        view = memoryview(memory)
    except TypeError:
        raise invalid(
            f"cannot register an object of type {type(memory).__name__}: expected a writable buffer, a tensor, an "
            "object with __cuda_array_interface__, or (address, nbytes)"
        ) from None
    except (ValueError, BufferError) as error:
        # numpy has types that the buffer protocol has no word for, such as dates and bfloat16.
        raise invalid(
            f"cannot register an object of type {type(memory).__name__}, which gives no buffer ({error}): expected a "
            "writable buffer; of a numpy array whose dtype has none, register memory.view(numpy.uint8)"
        ) from None
    if view.readonly:
        raise invalid(f"the buffer of the {type(memory).__name__} is read-only; register memory that may be written")
    if not view.c_contiguous:
        raise invalid(
            f"the buffer of the {type(memory).__name__} of shape {view.shape} and strides {view.strides} is not "
            f"contiguous in C order; {_VIEW}"
        )
    _not_empty(view.nbytes, f"the buffer of the {type(memory).__name__}")
    ffi = _lib.load().ffi
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(view)))
    # The view, not only the object, is kept: it stops a bytearray from being resized under the transfer.
    return Span(address, view.nbytes, kind or "host", 0, view)
