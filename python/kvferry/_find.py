"""Where the files are that this package needs: the library, its header, and UCX."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from ._errors import make_error

_HERE = Path(__file__).resolve().parent
GET_LIBRARY = "install the wheel that scripts/build-wheel makes, or set KVFERRY_LIBRARY to the path of libkvferry.so"
"""The remedy where there is none."""


def header_path() -> Path:
    """The header `kvferry.h` that belongs to the library, for C programs."""
    return _HERE / "kvferry.h"


def release() -> str:
    """The release that this package belongs to. Does not load the library."""
    found = re.search(r'^#define KVF_VERSION "(.*)"$', header_path().read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "unknown"


def parsed_header() -> Path:
    """The header's declarations as `scripts/build-wheel` has parsed them for cffi. Only a wheel has the file."""
    return _HERE / "_native" / "ffi.py"


def library_path() -> Path:
    """The library's file: `KVFERRY_LIBRARY` when set, else the one in this package."""
    chosen = os.environ.get("KVFERRY_LIBRARY")
    if chosen:
        return Path(chosen)
    found = sorted((_HERE / "_native").glob("*.so"))
    if not found:
        raise make_error(
            -2,
            "not_found",
            f"there is no library in {_HERE / '_native'}: this copy of the package is a source tree; {GET_LIBRARY}",
        )
    return found[0]


def declarations(header: str) -> str:
    """The part of the header that a parser of plain C without a preprocessor understands."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    header = re.sub(r"//[^\n]*", "", header)
    lines = []
    taken: list[bool] = []
    for line in header.splitlines():
        directive = line.strip()
        if directive.startswith("#if"):
            # We are neither C++ nor C23, and see the header for the first time: only an #ifndef holds.
            taken.append(directive.startswith("#ifndef"))
        elif directive.startswith("#else"):
            taken[-1] = not taken[-1]
        elif directive.startswith("#endif"):
            taken.pop()
        elif all(taken) and not directive.startswith("#"):
            lines.append(line)
    return "\n".join(lines)


def packaged_ucx() -> list[str]:
    """libucp of the Python packages `kvferry-ucx` and `libucx` (libucx-cu12 and its likes), where this Python has them.

    The library searches for UCX; only this process's module path knows of a package elsewhere.
    """
    found = []
    for name in ("kvferry_ucx", "libucx"):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        folders = (spec.submodule_search_locations or ()) if spec is not None else ()
        paths = (Path(folder) / "lib" / "libucp.so.0" for folder in folders)
        found += [str(path) for path in paths if path.is_file()][:1]
    return found
