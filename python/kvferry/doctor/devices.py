"""Findings about RDMA devices and GPUs. `root` is where /sys, /proc and /dev lie."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

from ..bench.sizes import size_text
from . import system
from .child import ChildError, call, left
from .findings import Finding, found
from .ucx import Seen
from .verbs import Verbs, verbs


def rdma(seen: Seen, root: Path = system.ROOT, look: Callable[[Seen], Verbs] = verbs) -> Finding:
    """RDMA devices, and whether UCX uses them. `look` is asked what stands in the way where nothing else does."""
    devices = system.rdma_devices(root)
    evidence = [device.text for device in devices]
    used = sorted(seen.devices("rdma"))
    if not devices:
        return found("rdma", "none", [f"UCX: {', '.join(used)}"] if used else [])
    if not any(port.is_up for device in devices for port in device.ports):
        return found("rdma", "down", evidence)
    if used:
        return found("rdma", "used", [*evidence, f"UCX uses {', '.join(used)}"])
    files = system.verbs_files(root)
    if not files:
        return found("rdma", "hidden", [*evidence, "there is no /dev/infiniband/uverbs*"])
    if not any(os.access(path, os.R_OK | os.W_OK) for path in files):
        return found("rdma", "forbidden", [*evidence, f"{', '.join(map(str, files))}: no access"])
    if not seen.is_open:
        return found("rdma", "unknown", evidence)
    if "rdma" in seen.lost:
        return found("rdma", "off", evidence, settings=seen.settings_text)
    way = look(seen)
    if way.module is None:
        info = seen.info or {}
        return found("rdma", "no-verbs", [*evidence, f"UCX {info['version']} at {info['path']} has no {way.text}"])
    if way.error:
        return found("rdma", "no-libibverbs", [*evidence, way.error])
    if not way.devices:
        return found("rdma", "no-provider", [*evidence, f"{way.libibverbs} sees no device"])
    return found("rdma", "unused", [*evidence, f"{way.libibverbs} sees {', '.join(way.devices)}"])


def ask_cuda() -> str | None:
    """Why CUDA's driver has no GPU to use; None when it has one. Raises `ChildError` where it does not answer."""
    # A driver that hangs would take all the time there is, and the other findings none of it.
    why: str | None = call("cuda", limit_s=left() / 2)
    return why


def gpu(seen: Seen, root: Path = system.ROOT, look: Callable[[], str | None] = ask_cuda) -> Finding:
    """GPUs, and whether CUDA and UCX can use them. `look` asks CUDA's driver."""
    cards = system.gpus(root)
    evidence = [f"{card.what} {card.place}" for card in cards]
    try:
        why = look()
    except ChildError as error:
        return found("gpu", "silent" if cards else "none", [*evidence, f"CUDA's driver: {error}"])
    if why is not None:
        return found("gpu", "no-driver" if cards else "none", [*evidence, why] if cards else [])
    if not seen.is_open:
        return found("gpu", "unknown", evidence)
    lanes = f"UCX has {', '.join(sorted(seen.transports('cuda'))) or 'no transport for CUDA memory'}"
    return found("gpu", "used" if seen.moves_cuda else "no-transport", [*evidence, lanes])


def gpu_rdma(root: Path = system.ROOT) -> Finding:
    """Finds the distance of GPUs from RDMA devices."""
    devices = [device for device in system.rdma_devices(root) if any(port.is_up for port in device.ports)]
    pairs = [(gpu, near) for gpu in system.gpus(root) if (near := system.nearest(gpu, devices)) is not None]
    if not pairs:
        return found("gpu-rdma", "absent")
    evidence = [f"GPU {gpu.place}: {near.device.name}, {how}" for gpu, (near, how) in pairs]
    access = system.peer_memory(root)
    if not access:
        return found("gpu-rdma", "no-peer-memory", evidence)
    evidence.append(f"access to GPU memory by {' and by '.join(access)}")
    far = any(how == system.DISTANCES[3] for _, (_, how) in pairs)
    return found("gpu-rdma", "far" if far else "near", evidence)


def locked_memory(root: Path = system.ROOT) -> Finding:
    """True if memory may be registered with an RDMA device."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    evidence = [f"soft limit {_limit(soft)}, hard limit {_limit(hard)}"]
    if system.may_lock(root):
        evidence.append("this process has CAP_IPC_LOCK, which the limit does not hold for")
    elif soft != resource.RLIM_INFINITY:
        return found("locked-memory", "limited" if system.rdma_devices(root) else "unneeded", evidence)
    return found("locked-memory", "unlimited", evidence)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else size_text(number)
