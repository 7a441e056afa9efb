"""Which UCX would be used, and what it has to work with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .child import ChildError, call, left, run
from .findings import Finding, found

CLASSES = {
    "tcp": ("tcp",),
    "rdma": ("rc_", "dc_", "ud_", "srd"),
    "cma": ("cma",),
    "cuda": ("cuda_", "gdr_copy"),
}
"""Transports that matter to kvferry, by the beginnings of UCX's names for them."""
COSTS = {
    "tcp": "no messages and no transfers over TCP",
    "rdma": "no RDMA: bytes to other hosts go over TCP",
    "cma": "no copies between processes of this host: their bytes go by messages",
    "cuda": "no GPU memory",
}
VERSION_S = 10.0
"""How long a libucp may take to say its version, if twice that much time is left."""
SETTINGS = ("TLS", "NET_DEVICES")


@dataclass
class Seen:
    """The state of UCX. `resources` are pairs of transport and device; `available` those without the settings that
    choose among them, `lost` the classes that the settings leave nothing of; `networks` are the network devices."""

    candidates: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, Any] | None = None
    crash: str = ""
    error: str = ""
    resources: list[tuple[str, str]] = field(default_factory=list)
    available: list[tuple[str, str]] = field(default_factory=list)
    networks: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    moves_cuda: bool = False
    unknown_variables: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """True if UCX was opened and made a context."""
        return self.info is not None and not self.error

    @property
    def classes(self) -> set[str]:
        """The classes of transports that there are."""
        return {kind for kind in CLASSES if self.transports(kind)}

    @property
    def lost(self) -> set[str]:
        """The classes that settings switch off."""
        return {kind for kind, starts in CLASSES.items() if _of(self.available, starts)} - self.classes

    @property
    def settings_text(self) -> str:
        """The settings that choose transports and devices, for people."""
        return " and ".join(self.settings) or "UCX_TLS and UCX_NET_DEVICES (neither is set here)"

    def transports(self, kind: str) -> set[str]:
        """UCX's names of the transports of a class."""
        return {name for name, _ in _of(self.resources, CLASSES[kind])}

    def devices(self, kind: str) -> set[str]:
        """Transports of a class with their devices."""
        return {f"{name}/{device}" for name, device in _of(self.resources, CLASSES[kind])}

    def as_map(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "candidates": self.candidates,
            "in_use": self.info,
            "resources": [{"transport": name, "device": device} for name, device in self.resources],
            "devices": self.networks,
            "moves_cuda": self.moves_cuda,
            "others": self.others,
        }


def _of(resources: list[tuple[str, str]], starts: tuple[str, ...]) -> list[tuple[str, str]]:
    return [pair for pair in resources if pair[0].startswith(starts)]


def _pairs(outlook: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(one["transport"], one["device"]) for one in outlook["resources"]]


def look(agent: Mapping[str, Any]) -> Seen:
    """Looks at UCX as an agent of this configuration would use it, in processes of their own."""
    seen = Seen()
    # A key file that cannot be used is another finding's.
    agent = {**agent, "key_file": ""}
    try:
        seen.candidates = call("candidates", agent.get("ucx_lib"))["candidates"]
        outlook = call("outlook", agent)
    except ChildError as error:
        seen.crash = str(error)
        return seen
    _name_versions(seen.candidates)
    chosen = next((one for one in seen.candidates if one["fate"] == "chosen"), None)
    if chosen is None:
        return seen
    seen.info = {key: chosen[key] for key in ("path", "version", "source")}
    seen.settings = _settings(agent)
    if "error" in outlook:
        seen.error = outlook["message"]
    else:
        seen.resources = _pairs(outlook)
        seen.networks = outlook["devices"]
        seen.moves_cuda = outlook["moves_cuda"]
        seen.unknown_variables = outlook["unknown_variables"]
        seen.others = outlook["others"]
    seen.available = _without_settings(agent) if seen.settings else seen.resources
    return seen


def _settings(agent: Mapping[str, Any]) -> dict[str, str]:
    """The settings that choose transports and devices, with their values."""
    own = agent.get("ucx", {})
    chosen = {f"{name} in the option ucx": own[name] for name in SETTINGS if name in own}
    chosen |= {f"UCX_{name}": os.environ[f"UCX_{name}"] for name in SETTINGS if f"UCX_{name}" in os.environ}
    if agent.get("transport", "auto") != "auto":
        chosen["the option transport"] = agent["transport"]
    return chosen


def _without_settings(agent: Mapping[str, Any]) -> list[tuple[str, str]]:
    environment = {name: value for name, value in os.environ.items() if name not in [f"UCX_{s}" for s in SETTINGS]}
    own = {name: value for name, value in dict(agent.get("ucx", {})).items() if name not in SETTINGS}
    try:
        outlook = call("outlook", {**agent, "transport": "auto", "ucx": own}, environment=environment)
    except ChildError:
        return []
    return [] if "error" in outlook else _pairs(outlook)


_ASK_VERSION = (
    "import ctypes, sys\n"
    "library = ctypes.CDLL(sys.argv[1])\n"
    "library.ucp_get_version_string.restype = ctypes.c_char_p\n"
    "print(library.ucp_get_version_string().decode())"
)


def _version_of(path: str) -> str | None:
    """The version of a libucp, asked in a process that has no other and nothing of this Python's packages."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-I", "-S", "-c", _ASK_VERSION, path]
    try:
        _, printed = run(command, min(VERSION_S, left() / 2), environment=environment, stderr=subprocess.DEVNULL)
    except ChildError:
        return None
    return printed or None


def _name_versions(candidates: list[dict[str, Any]]) -> None:
    """Fills in the versions of candidates that were not opened."""
    for candidate in candidates:
        if candidate["version"] is None and candidate["fate"] == "not_tried":
            # What the process has loaded already is not there in another one.
            if candidate["source"] == "already loaded in the process" and "/" not in candidate["path"]:
                continue
            candidate["version"] = _version_of(candidate["path"])


def _candidate_text(number: int, candidate: Mapping[str, Any]) -> str:
    version = f" is UCX {candidate['version']}" if candidate["version"] else ""
    fate = {"chosen": "taken", "refused": "refused", "not_tried": "not tried, because the search had ended"}
    why = f" ({candidate['why']})" if candidate["why"] else ""
    return f"{number}. {candidate['source']}: {candidate['path']}{version}: {fate[candidate['fate']]}{why}"


def findings(seen: Seen, is_loaded: bool, of_nixl: Sequence[str]) -> Iterator[Finding]:
    """The findings about UCX. `of_nixl` tells which ones the plug-in for NIXL takes."""
    order = [_candidate_text(number, one) for number, one in enumerate(seen.candidates, 1)]
    if seen.crash:
        yield found("ucx", "crashed", [seen.crash, *order])
    elif not is_loaded:
        yield found("ucx", "unknown")
    elif seen.info is None:
        case = _missing(seen.candidates)
        if case == "missing" and of_nixl:
            case, order = "nixl-only", [*of_nixl, *order]
        yield found("ucx", case, order)
    else:
        info = seen.info
        yield found("ucx", "chosen", [f"UCX {info['version']} at {info['path']} ({info['source']})", *order])
    if seen.info is None:
        yield from (found(id, "unknown") for id in ("ucx-versions", "ucx-settings", "transports", "network-devices"))
        return
    yield _versions(seen)
    yield _variables(seen)
    yield _transports(seen)
    yield _network_devices(seen)


def _missing(candidates: list[dict[str, Any]]) -> str:
    if candidates and candidates[0]["source"] in ("named by the program as ucx_lib", "named by KVFERRY_UCX_LIB"):
        return "misnamed"
    return "in-the-way" if any(one["fate"] == "not_tried" for one in candidates) else "missing"


def _versions(seen: Seen) -> Finding:
    if seen.error:
        return found("ucx-versions", "unknown")
    if not seen.others:
        return found("ucx-versions", "one")
    info = seen.info or {}
    others = [f"also loaded: UCX {other['version'] or '?'} at {other['path']}" for other in seen.others]
    return found("ucx-versions", "several", [f"in use: UCX {info['version']} at {info['path']}", *others])


def _variables(seen: Seen) -> Finding:
    if seen.error:
        return found("ucx-settings", "unknown")
    if not seen.unknown_variables:
        return found("ucx-settings", "known")
    names = [
        f"{one['name']} (did you mean {' or '.join(one['similar'])}?)" if one["similar"] else one["name"]
        for one in seen.unknown_variables
    ]
    return found("ucx-settings", "unknown-names", names, names=", ".join(names))


def _listed(resources: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name}/{device}" for name, device in resources) or "none"


def _transports(seen: Seen) -> Finding:
    given = [f"set: {name}={value}" for name, value in seen.settings.items()]
    if seen.error:
        if seen.settings and seen.available:
            evidence = [seen.error, *given]
            available = _listed(seen.available)
            return found("transports", "none", evidence, settings=seen.settings_text, available=available)
        return found("transports", "failed", [seen.error, *given])
    evidence = [_listed(seen.resources), *given]
    lost = sorted(seen.lost)
    evidence += [f"switched off: {_listed(_of(seen.available, CLASSES[kind]))}: {COSTS[kind]}" for kind in lost]
    if (
        "tcp" not in seen.classes
        and seen.transports("rdma")
        and all(name.startswith("rc_") for name in seen.transports("rdma"))
    ):
        return found("transports", "no-wireup", evidence)
    if not seen.classes & {"tcp", "rdma"}:
        return found("transports", "no-network", evidence, settings=seen.settings_text)
    if lost:
        names = sorted({name for kind in lost for name, _ in _of(seen.available, CLASSES[kind])})
        return found("transports", "restricted", evidence, settings=seen.settings_text, lost=", ".join(names))
    if "cma" not in seen.classes:
        return found("transports", "no-copies", evidence)
    return found("transports", "found", evidence)


def _network_devices(seen: Seen) -> Finding:
    if not seen.networks:
        return found("network-devices", "unknown")
    evidence = []
    for one in seen.networks:
        addresses, use = ", ".join(one["addresses"]) or "no address", "used" if one["is_used"] else "not used"
        evidence.append(f"{one['name']} ({addresses}): {use}: {one['why']}")
    repeating = [one["name"] for one in seen.networks if one["is_used"] and one["repeats"]]
    if repeating:
        return found("network-devices", "repeating", evidence, names=", ".join(repeating))
    return found("network-devices", "all" if all(one["is_used"] for one in seen.networks) else "some", evidence)
