"""The memory behind an engine's caches, as sleep mode leaves it: nobody's, and perhaps somewhere else afterwards."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from typing import Any


def _storages(views: Mapping[str, Any]) -> dict[int, Any]:
    """The memory of the views, by address."""
    storages = (view.untyped_storage() for view in views.values())
    return {storage.data_ptr(): storage for storage in storages}


def protect(views: Mapping[str, Any], mapped: bool) -> None:
    """Takes every access to the pages of the caches from this process and all others, or gives it back."""
    libc = ctypes.CDLL(None, use_errno=True)
    for address, storage in _storages(views).items():
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        rights = mmap.PROT_READ | mmap.PROT_WRITE if mapped else 0
        if length > 0 and libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(length), rights) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")


def move(views: Mapping[str, Any]) -> list[Any]:
    """Gives the caches other memory, full of what is nobody's. Returns the old one, which is to be kept: who still used
    it would get what was there."""
    import torch

    old = _storages(views)
    moved = {address: torch.full((storage.nbytes(),), 77, dtype=torch.uint8) for address, storage in old.items()}
    for view in views.values():
        new = moved[view.untyped_storage().data_ptr()].untyped_storage()
        view.set_(new, view.storage_offset(), view.size(), view.stride())
    return list(old.values())
