"""The layers between a UCX and RDMA devices: its module for verbs, libibverbs, and the providers of that."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .child import ChildError, call
from .ucx import Seen

MODULE = "libuct_ib"


@dataclass(frozen=True)
class Verbs:
    """`module`: the file of UCX's module for verbs, None if it has none. `error`: why that cannot be loaded, empty if
    it can. `libibverbs`: the one that it loads. `devices`: those that this one has a provider for."""

    module: str | None
    error: str = ""
    libibverbs: str = "libibverbs"
    devices: tuple[str, ...] = ()
    text: str = ""


def verbs(seen: Seen) -> Verbs:
    """Looks, in a process of its own where anything is loaded."""
    libucp = Path((seen.info or {}).get("path", ""))
    folder = Path(os.environ.get("UCX_MODULE_DIR") or libucp.resolve().parent / "ucx")
    module = module_of(folder)
    if module is None:
        return Verbs(None, text=f"{folder / MODULE}.so.0")
    try:
        answer = call("verbs", str(libucp), str(module))
    except ChildError as error:
        return Verbs(str(module), error=str(error))
    return Verbs(str(module), answer["error"], answer["libibverbs"], tuple(answer["devices"]))


def module_of(folder: Path) -> Path | None:
    """UCX's module for verbs in a folder of its modules. Packages may rename it (`libuct_ib-1a2b3c4d.so.0.0.0`)."""
    return next(
        (path for path in sorted(folder.glob(f"{MODULE}?*")) if path.name[len(MODULE)] in ".-" and ".so" in path.name),
        None,
    )
