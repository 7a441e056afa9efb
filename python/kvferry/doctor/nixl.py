"""Tries if stock NIXL finds kvferry's plug-in, and if that works."""

from __future__ import annotations

import os

from .. import nixl
from .child import left
from .findings import Finding, found
from .ucx import CLASSES

LIMIT_S = 60.0
"""How long trying one NIXL may take, if that much time is left. Importing it may import torch."""
_ORDER = (
    *("dangling", "failed", "refused", "hidden", "elsewhere", "silent", "no-rdma", "two-ucx"),
    *("works", "untried", "uninstalled", "absent"),
)
"""The cases by priority: of several wheels, the finding is about the one whose case comes first."""


def own_ucx() -> list[str]:
    """The UCX inside each NIXL that has the plug-in, which takes that one."""
    able = [one for one in nixl.installed() if one.plugin is not None and one.ucx is not None]
    return [f"{one.package} {one.version}: the plug-in takes the UCX inside it, {one.ucx}" for one in able]


def finding(*, transfers: bool, has_rdma: bool) -> Finding:
    """The finding about NIXL. Without `transfers` nothing of NIXL is loaded. `has_rdma` is whether the UCX that agents
    outside NIXL use has RDMA."""
    looked = [(one, _look(one, transfers, has_rdma)) for one in nixl.installed()]
    case = min((case for _, (case, _) in looked), key=_ORDER.index, default="absent")
    evidence = [f"{one.package} {one.version}: {fact}" for one, (_, facts) in looked for fact in facts]
    tested = ", ".join(nixl.TESTED)
    # Those of the first wheel that is told.
    told = next((one for one, (its, _) in looked if its == case), None)
    plugin = folder = ""
    if told is not None:
        plugin = str(told.elsewhere if case == "elsewhere" else told.folder / nixl.FILE_NAME)
        folder = str(told.place.parent)
    return found("nixl", case, evidence, plugin=plugin, folder=folder, tested=tested)


def _look(one: nixl.Installed, transfers: bool, has_rdma: bool) -> tuple[str, list[str]]:
    """The case of one wheel, and the facts."""
    named = os.environ.get("NIXL_PLUGIN_DIR")
    where = f"NIXL_PLUGIN_DIR={named}" if named else str(one.folder)
    tested = [] if one.is_tested else [f"the plug-in was tested with {', '.join(nixl.TESTED)}"]
    if one.is_dangling:
        return "dangling", [f"{one.place} leads to {os.readlink(one.place)}", *tested]
    if one.plugin is None:
        if named and (one.folder / nixl.FILE_NAME).is_file():
            return "hidden", [f"no plug-in in {where}"]
        if one.elsewhere:
            return "elsewhere", [f"no plug-in in {where}; that of the wheel kvferry-nixl is {one.elsewhere}"]
        return "uninstalled", [f"no plug-in in {where}; the wheel kvferry-nixl has it", *tested]
    facts = [f"plug-in at {one.plugin}", *tested]
    return _try(one, facts, has_rdma) if transfers else ("untried", facts)


def _try(one: nixl.Installed, facts: list[str], has_rdma: bool) -> tuple[str, list[str]]:
    trial = nixl.try_read(one.package, min(LIMIT_S, left()))
    if trial.trouble:
        case = "refused" if trial.is_refused else "silent" if trial.timed_out else "failed"
        return case, [*facts, *nixl.telling(trial.trouble)]
    facts = [*facts, *(f"the plug-in says: {remark}" for remark in trial.remarks), f"used {trial.ucx}", trial.moved]
    if has_rdma and not any(name.startswith(CLASSES["rdma"]) for name in trial.transports):
        return "no-rdma", [*facts, f"that UCX has {', '.join(trial.transports)}"]
    if trial.beside:
        return "two-ucx", [*facts, f"with NIXL's own backend UCX in it: {trial.beside}"]
    if trial.others is None:
        return "works", [*facts, "NIXL's own backend UCX is not there to be tried beside it"]
    if not trial.others:
        return "works", [*facts, "NIXL's own backend UCX uses the same UCX"]
    return "two-ucx", [*facts, *(f"NIXL's own backend UCX brings {other}" for other in trial.others)]
