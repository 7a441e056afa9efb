"""What a process holds: memory and threads."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def resident_bytes() -> int:
    """This process's resident memory, after the allocator has given back what it does not use."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def thread_count(workers: int) -> int:
    """This process's threads, with the copy thread of each of its workers that read.

    A worker makes its copy thread for the first transfer that takes long or has memory that may not be there yet, and
    keeps it. Which transfer that is depends on time, so it counts from the beginning: only more than that is growth.
    """
    copiers = others = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:
            continue  # it has ended
        if name == "kvf-copy\n":
            copiers += 1
        else:
            others += 1
    return others + max(copiers, workers)


_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2.split()]


def heap_bytes() -> int:
    """Bytes that are allocated from glibc's heap: what a leak would add to, without what fragments it."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)
