"""What `kvferry doctor` reads in /sys and /proc, of machines that are not at hand."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvferry.doctor import devices, system, ucx
from kvferry.doctor.ucx import Seen
from kvferry.doctor.verbs import Verbs


def file(root: Path, path: str, text: str = "") -> Path:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text + "\n")
    return place


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two GPUs and two RDMA devices, the first of each behind one switch, the others on other sockets."""
    root = tmp_path / "root"
    pci = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    for address, parent, node in (("0000:02:00.0", pci, 0), ("0000:81:00.0", "sys/devices/pci0000:80", 1)):
        folder = f"{parent}/{address}"
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(node))):
            file(root, f"{folder}/{name}", text)
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root / folder)
    for name, folder, node, state in (
        ("mlx5_0", f"{pci}/0000:03:00.0", 0, "4: ACTIVE"),
        ("mlx5_1", "sys/devices/pci0000:c0/0000:c1:00.0", 2, "1: DOWN"),
    ):
        file(root, f"{folder}/numa_node", str(node))
        for what, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
            file(root, f"sys/class/infiniband/{name}/ports/1/{what}", text)
        (root / f"sys/class/infiniband/{name}/device").symlink_to(root / folder)
    return root


def test_distances_between_gpus_and_rdma_devices(machine: Path) -> None:
    near, far = system.gpus(machine)
    cards = system.rdma_devices(machine)
    assert [[port.is_up for port in card.ports] for card in cards] == [[True], [False]]
    assert "mlx5_0 (0000:03:00.0, NUMA node 0): port 1: 4: ACTIVE, 400 Gb/sec" in cards[0].text
    distances = [[system.distance(gpu, card.device) for card in cards] for gpu in (near, far)]
    assert distances == [["one PCIe switch", "different NUMA nodes"], ["different NUMA nodes"] * 2]
    nearest = system.nearest(near, cards)
    assert nearest is not None
    assert nearest[0].device.name == "mlx5_0"


def seen(*resources: tuple[str, str], **more: Any) -> Seen:
    info = {"path": "/x", "version": "1.22.0", "source": "the system's"}
    return Seen(info=info, resources=list(resources), available=list(resources), **more)


TCP, RC = ("tcp", "eth0"), ("rc_mlx5", "mlx5_0:1")


def test_what_stands_between_ucx_and_a_device(machine: Path, tmp_path: Path) -> None:
    file(machine, "dev/infiniband/uverbs0")
    info = {"path": str(file(tmp_path, "lib/libucp.so.0")), "version": "1.22.0", "source": "the system's"}
    file(tmp_path, "lib/ucx/libuct_ib_efa.so.0")
    without = Seen(info=info, resources=[TCP], available=[TCP])
    told = devices.rdma(without, machine)
    assert (told.case, told.state) == ("no-verbs", "problem")
    assert f"UCX 1.22.0 at {info['path']} has no {tmp_path}/lib/ucx/libuct_ib.so.0" in told.evidence
    assert "kvferry-ucx" in told.remedy
    file(tmp_path, "lib/ucx/libuct_ib-1a2b3c4d.so.0.0.0", "no library")
    told = devices.rdma(without, machine)
    assert told.case == "no-libibverbs"
    assert "lib/libucp.so.0" in told.evidence[-1]
    found = Verbs("libuct_ib.so.0", libibverbs="/private/libibverbs.so.1")
    told = devices.rdma(without, machine, lambda _: found)
    assert (told.case, told.evidence[-1]) == ("no-provider", "/private/libibverbs.so.1 sees no device")
    told = devices.rdma(without, machine, lambda _: replace(found, devices=("mlx5_0",)))
    assert (told.case, told.evidence[-1]) == ("unused", "/private/libibverbs.so.1 sees mlx5_0")


def test_why_rdma_is_not_used(machine: Path) -> None:
    assert devices.rdma(seen(TCP, RC), machine).case == "used"
    hidden = devices.rdma(seen(TCP), machine)
    assert (hidden.case, hidden.state) == ("hidden", "problem")
    assert "--device /dev/infiniband" in hidden.remedy
    verbs = file(machine, "dev/infiniband/uverbs0")
    if os.geteuid():
        verbs.chmod(0)
        assert devices.rdma(seen(TCP), machine).case == "forbidden"
        verbs.chmod(0o600)
    off = Seen(seen(TCP).candidates, seen().info, resources=[TCP], available=[TCP, RC], settings={"UCX_TLS": "tcp"})
    told = devices.rdma(off, machine)
    assert (told.case, told.remedy) == ("off", "unset UCX_TLS")
    (transports,) = (finding for finding in ucx.findings(off, True, []) if finding.id == "transports")
    assert transports.case == "restricted"
    assert any("no RDMA" in line for line in transports.evidence)
    assert devices.rdma(Seen(), machine).case == "unknown"
    file(machine, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert devices.rdma(seen(TCP), machine).case == "down"


def test_devices_that_repeat_are_warned_of() -> None:
    def device(name: str, address: str, *, is_used: bool, repeats: bool) -> dict[str, object]:
        return {"name": name, "addresses": [address], "is_used": is_used, "repeats": repeats, "why": "because"}

    def told(*networks: dict[str, object]) -> tuple[str, list[str], str]:
        seen_now = replace(seen(TCP), networks=list(networks))
        (one,) = (finding for finding in ucx.findings(seen_now, True, []) if finding.id == "network-devices")
        return one.case, one.evidence, one.remedy

    eth0 = device("eth0", "10.1.0.1", is_used=True, repeats=False)
    case, evidence, _ = told(eth0, device("docker0", "172.17.0.1", is_used=False, repeats=True))
    assert case == "some"
    assert evidence == ["eth0 (10.1.0.1): used: because", "docker0 (172.17.0.1): not used: because"]
    assert told(eth0)[0] == "all"
    case, _, remedy = told(device("docker0", "172.17.0.1", is_used=True, repeats=True))
    assert case == "repeating"
    assert "UCX_NET_DEVICES, in place of docker0" in remedy


def test_how_far_a_gpu_may_be_and_who_may_lock_memory(machine: Path) -> None:
    assert devices.gpu_rdma(machine).case in ("no-peer-memory", "far")
    (machine / "sys/module/nvidia_peermem").mkdir(parents=True)
    far = devices.gpu_rdma(machine)
    assert far.case == "far"
    assert far.evidence[:2] == [
        "GPU 0000:02:00.0, NUMA node 0: mlx5_0, one PCIe switch",
        "GPU 0000:81:00.0, NUMA node 1: mlx5_0, different NUMA nodes",
    ]
    assert far.evidence[2].startswith("access to GPU memory by nvidia_peermem")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = "unlimited" if soft == resource.RLIM_INFINITY else "limited"
    file(machine, "proc/self/status", "CapEff:\t0000000000000000")
    assert devices.locked_memory(machine).case == limited
    file(machine, "proc/self/status", "CapEff:\t0000000000004000")
    assert devices.locked_memory(machine).case == "unlimited"


def test_what_lets_rdma_read_gpu_memory(tmp_path: Path) -> None:
    assert system.peer_memory(tmp_path, "6.8.0") == []
    file(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64")
    assert system.peer_memory(tmp_path, "6.8.0-45-generic") == ["DMA-BUF"]
    assert system.peer_memory(tmp_path, "5.4.0") == []
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert system.peer_memory(tmp_path, "5.4.0") == ["nvidia_peermem"]
    assert system.peer_memory(tmp_path, "6.8.0") == ["nvidia_peermem", "DMA-BUF"]


def test_limits_of_containers_and_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("container", raising=False)
    assert (system.yama(tmp_path), system.seccomp(tmp_path), system.container(tmp_path)) == (None, "0", [])
    file(tmp_path, "proc/sys/kernel/yama/ptrace_scope", "1")
    file(tmp_path, "proc/self/status", "Name:\tpython\nSeccomp:\t2\nSeccomp_filters:\t1")
    file(tmp_path, "proc/1/cgroup", "0::/kubepods/besteffort/pod1")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert (system.yama(tmp_path), system.seccomp(tmp_path)) == ("1", "2")
    assert system.container(tmp_path) == ["KUBERNETES_SERVICE_HOST is set", "/proc/1/cgroup names kubepods"]
