"""Facts about the machine from /sys, /proc and the like. Nothing here needs libkvferry.

`root` is where /sys, /proc, /dev and the rest lie.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path("/")
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")
"""PCI classes of VGA and 3D controllers."""


def read(path: Path) -> str | None:
    """A small file's text, without white space around it; None where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


@dataclass(frozen=True)
class Device:
    """A PCI device. `path` is its place below /sys/devices, `numa` its node, None where the machine does not say."""

    name: str
    path: tuple[str, ...]
    numa: int | None
    what: str = ""

    @property
    def place(self) -> str:
        """PCI address and NUMA node."""
        node = "" if self.numa is None else f", NUMA node {self.numa}"
        return f"{self.path[-1] if self.path else '?'}{node}"


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device, in the words of sysfs."""

    number: str
    state: str
    rate: str
    link: str

    @property
    def is_up(self) -> bool:
        """True if bytes can go through it."""
        return "ACTIVE" in self.state


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device and its ports."""

    device: Device
    ports: list[RdmaPort] = field(default_factory=list)

    @property
    def text(self) -> str:
        """For people."""
        ports = "; ".join(f"port {port.number}: {port.state}, {port.rate}, {port.link}" for port in self.ports)
        return f"{self.device.name} ({self.device.place}): {ports or 'no ports'}"


def _device(name: str, folder: Path, root: Path, what: str = "") -> Device:
    try:
        resolved = folder.resolve(strict=True)
        path = resolved.relative_to((root / "sys/devices").resolve()).parts
    except (OSError, ValueError):
        path = ()
    node = read(folder / "numa_node")
    numa = int(node) if node is not None and node.lstrip("-").isdigit() else None
    return Device(name, path, None if numa is None or numa < 0 else numa, what)


def rdma_devices(root: Path = ROOT) -> list[RdmaDevice]:
    """The RDMA devices that the kernel has."""
    found = []
    for folder in _entries(root / "sys/class/infiniband"):
        ports = [
            RdmaPort(
                port.name,
                read(port / "state") or "unknown state",
                read(port / "rate") or "unknown rate",
                read(port / "link_layer") or "unknown link layer",
            )
            for port in _entries(folder / "ports")
        ]
        found.append(RdmaDevice(_device(folder.name, folder / "device", root), ports))
    return found


def verbs_files(root: Path = ROOT) -> list[Path]:
    """The files through which a process uses RDMA devices."""
    return [path for path in _entries(root / "dev/infiniband") if path.name.startswith("uverbs")]


def gpus(root: Path = ROOT) -> list[Device]:
    """NVIDIA GPUs on the PCI bus."""
    found = []
    for folder in _entries(root / "sys/bus/pci/devices"):
        kind = (read(folder / "class") or "")[:6]
        if read(folder / "vendor") == _NVIDIA and kind in _DISPLAY:
            found.append(_device(folder.name, folder, root, "NVIDIA GPU"))
    return found


DISTANCES = ("one PCIe switch", "one host bridge", "one NUMA node", "different NUMA nodes", "unknown")
"""From near to far."""


def distance(one: Device, other: Device) -> str:
    """How far two PCI devices are from each other, in the words of `DISTANCES`."""
    common = 0
    for ours, theirs in zip(one.path[:-1], other.path[:-1], strict=False):
        if ours != theirs:
            break
        common += 1
    # The first part is the host bridge (pci0000:00), what follows are bridges and switches below it.
    if common > 1:
        return DISTANCES[0]
    if common == 1:
        return DISTANCES[1]
    if one.numa is None or other.numa is None:
        return DISTANCES[4]
    return DISTANCES[2] if one.numa == other.numa else DISTANCES[3]


def peer_memory(root: Path = ROOT, release: str | None = None) -> list[str]:
    """All that lets RDMA devices read GPU memory: loaded modules by name, and DMA-BUF of Linux 5.12 and newer with the
    open kernel modules of the GPU (https://docs.nvidia.com/cuda/gpudirect-rdma/)."""
    modules = [module for module in ("nvidia_peermem", "nv_peer_mem") if (root / "sys/module" / module).exists()]
    number = re.match(r"(\d+)\.(\d+)", release or os.uname().release)
    modern = number is not None and (int(number[1]), int(number[2])) >= (5, 12)
    is_open = "Open Kernel Module" in (read(root / "proc/driver/nvidia/version") or "")
    return [*modules, "DMA-BUF"] if modern and is_open else modules


def yama(root: Path = ROOT) -> str | None:
    """`kernel.yama.ptrace_scope`; None without Yama."""
    return read(root / "proc/sys/kernel/yama/ptrace_scope")


_CAP_IPC_LOCK = 14
"""Its number (linux/capability.h)."""


def may_lock(root: Path = ROOT) -> bool:
    """True if this process may lock memory beyond RLIMIT_MEMLOCK."""
    for line in (read(root / "proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def seccomp(root: Path = ROOT) -> str:
    """This process's seccomp mode: 0 none, 1 strict, 2 a filter."""
    for line in (read(root / "proc/self/status") or "").splitlines():
        if line.startswith("Seccomp:"):
            return line.split()[1]
    return "0"


def container(root: Path = ROOT) -> list[str]:
    """Signs that this is a container."""
    signs = [f"/{name} exists" for name in (".dockerenv", "run/.containerenv") if (root / name).exists()]
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        signs.append("KUBERNETES_SERVICE_HOST is set")
    # systemd's convention, in small letters (https://systemd.io/CONTAINER_INTERFACE/).
    signs += [f"the variable container is {value}" for name, value in os.environ.items() if name == "container"]
    groups = read(root / "proc/1/cgroup") or ""
    signs += [f"/proc/1/cgroup names {word}" for word in ("docker", "kubepods", "containerd", "lxc") if word in groups]
    return signs


def holders(port: int, root: Path = ROOT) -> list[str]:
    """The listeners on a TCP port of this machine: address, and process where this user may see it."""
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in (read(root / "proc/net" / table) or "").splitlines()[1:]:
            parts = line.split()
            # State 0A is LISTEN (include/net/tcp_states.h).
            if len(parts) > 9 and parts[3] == "0A" and int(parts[1].rpartition(":")[2], 16) == port:
                owner = _owner(parts[9], root)
                found.append(f"{_address(parts[1].rpartition(':')[0], family)}: {owner}")
    return found


def _address(text: str, family: int) -> str:
    """From the words of 32 bits, each in the machine's order, that /proc/net/tcp prints."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))


def _owner(inode: str, root: Path) -> str:
    for process in (path for path in _entries(root / "proc") if path.name.isdigit()):
        for descriptor in _entries(process / "fd"):
            try:
                if os.readlink(descriptor) == f"socket:[{inode}]":
                    return f"process {process.name} ({read(process / 'comm') or '?'})"
            except OSError:
                continue
    return "a process that this user cannot see"


def nearest(gpu: Device, devices: Iterable[RdmaDevice]) -> tuple[RdmaDevice, str] | None:
    """The RDMA device nearest to a GPU, and how far it is."""
    measured = [(device, distance(gpu, device.device)) for device in devices]
    return min(measured, key=lambda pair: DISTANCES.index(pair[1]), default=None)
