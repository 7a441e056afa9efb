"""Measures the host memory that this process can still have, of the machine's and of its container's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class Available:
    """Memory that can be had without swapping.

    Attributes:
        nbytes: How much.
        of: Whose memory it is, for a message.
    """

    nbytes: int
    of: str


def available(root: Path = Path("/")) -> Available | None:
    """Returns the least that the machine and the control groups of this process leave. None if unknown.

    Args:
        root: Above `proc` and `sys`.
    """
    found = [limit for limit in (_machine(root), *_groups(root)) if limit is not None]
    return min(found, key=lambda limit: limit.nbytes, default=None)


def _machine(root: Path) -> Available | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "MemAvailable:" and words[1].isdigit():
            return Available(int(words[1]) * 1024, "this machine's")
    return None


def _groups(root: Path) -> Iterator[Available | None]:
    """Yields the memory left under each limit of the process's control groups and of their parents."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        # `0::/path` with version 2, `4:memory:/path` with version 1.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the path may be the host's, of which only the top is seen.
        folder = base / path.lstrip("/")
        yield _left(base, *names)
        while base in folder.parents:
            yield _left(folder, *names)
            folder = folder.parent


def _left(folder: Path, limit: str, usage: str, prefix: str) -> Available | None:
    most, used = _read(folder / limit), _read(folder / usage)
    if most is None or used is None or not most.isdigit() or not used.isdigit():
        # `max` is no limit.
        return None
    # Pages of files, which the kernel gives up for others, also those that were used lately, such as a model's weights.
    files = (f"{prefix}inactive_file", f"{prefix}active_file")
    cached = 0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in files and value.isdigit():
            cached += int(value)
    return Available(max(0, int(most) - int(used) + cached), "its container's or control group's")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
