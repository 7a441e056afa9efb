"""Numbers and addresses as they are typed, and bytes as shown. Needs no numpy: the command line is read without it."""

from __future__ import annotations

from collections.abc import Callable

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


def between(least: int, most: int, name: str = "") -> Callable[[str], int]:
    """What argparse takes as the type of a whole number; `name` is what it calls one where that is not the range."""

    def parse(text: str) -> int:
        value = int(text, 10)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    parse.__name__ = name or f"whole number from {least:,} to {most:,}"
    return parse


def host_and_port(text: str, port: str = "") -> tuple[str, int]:
    """An address from a text such as `10.0.0.5:5680` or `[fd00::5]:5680`; without its port, if `port` is one.

    Raises `ValueError` for anything else.
    """
    host, colon, number = text.rpartition(":")
    if port and (not colon or text.endswith("]") or (text.count(":") > 1 and text[0] != "[")):
        host, number = text, port
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (number.isascii() and number.isdigit()) or not 1 <= int(number) <= 65535:
        raise ValueError(text)
    return host, int(number)


host_and_port.__name__ = "HOST:PORT such as 10.0.0.5:5680 or [fd00::5]:5680"
