"""Numbers of bytes as they are typed and shown. Needs no numpy, so that the command line can be read without it."""

from __future__ import annotations

UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


def size_text(number: float) -> str:
    """A number of bytes."""
    for unit, size in UNITS.items():
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{number:.0f} B"


def parse_size(text: str) -> int:
    """Bytes from a text such as `16KiB`, `4MiB` or `4096`; raises `ValueError` for anything else."""
    for unit, size in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit).strip(), 10) * size
    return int(text, 10)
