"""What the machines are made of: QEMU, a kernel, an initramfs, and rdma-core for the guests."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MODULES = ["crc32_generic", "virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_net", "virtio_rng"]
MODULES += ["ib_uverbs", "rdma_ucm", "rdma_rxe"]


@dataclass(frozen=True)
class Packages:
    """Where all of it lies. `guest` is a folder whose files a guest has besides the host's."""

    qemu: Path
    firmware: list[Path]
    libraries: str
    kernel: Path
    initramfs: Path
    guest: Path | None


def find(folder: Path) -> Packages:
    """The packages that `scripts/setup rdma` has unpacked in `folder`, and the system's own."""
    tools = folder / "tools"
    libraries = os.pathsep.join(
        str(path) for path in (tools / "usr/lib/x86_64-linux-gnu", tools / "lib/x86_64-linux-gnu")
    )
    firmware = [tools / f"usr/share/{name}" for name in ("qemu", "seabios")]
    (kernel,) = (folder / "kernel/boot").glob("vmlinuz-*")
    guest = folder / "guest"
    packages = Packages(
        qemu=_program("qemu-system-x86_64", tools),
        firmware=[path for path in firmware if path.is_dir()],
        libraries=libraries,
        kernel=kernel,
        initramfs=folder / "initramfs.gz",
        guest=guest if guest.is_dir() else None,
    )
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make_initramfs(folder, packages)
    return packages


def _program(name: str, tools: Path) -> Path:
    """A program's path: the system's, or that of the unpacked packages."""
    if system := shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
        return Path(system)
    for folder in ("usr/bin", "bin", "usr/sbin", "sbin"):
        if (path := tools / folder / name).exists():
            return path
    sys.exit(f"error: there is no {name} here: run scripts/setup rdma")


def _make_initramfs(folder: Path, packages: Packages) -> None:
    """An initramfs of busybox, init.sh and the modules, in their order, made anew where one of those is newer."""
    init = Path(__file__).with_name("init.sh")
    made = packages.initramfs
    if made.exists() and made.stat().st_mtime > max(init.stat().st_mtime, Path(__file__).stat().st_mtime):
        return
    tools = folder / "tools"
    environment = {**os.environ, "LD_LIBRARY_PATH": packages.libraries}
    kernel = folder / "kernel"
    (release,) = (path.name for path in (kernel / "lib/modules").iterdir())

    def run(*words: str | Path) -> str:
        return subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stdout

    run(_program("depmod", tools), "-b", kernel, release)
    modprobe = _program("modprobe", tools)
    tree = folder / "initramfs"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("bin", "modules", "proc", "sys", "dev", "host", "out", "packages", "up", "new"):
        (tree / name).mkdir(parents=True)
    order: list[str] = []
    for module in MODULES:
        for line in run(modprobe, "-d", kernel, "-S", release, "--show-depends", module).splitlines():
            word, path, *_ = line.split()
            if word == "insmod" and Path(path).name not in order:
                order.append(Path(path).name)
                shutil.copy(path, tree / "modules")
    (tree / "modules/order").write_text("".join(f"{name}\n" for name in order))
    shutil.copy(_program("busybox", tools), tree / "bin/busybox")
    shutil.copy(init, tree / "init")
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in [tree, *sorted(tree.rglob("*"))])
    cpio = [str(_program("cpio", tools)), "-o", "-H", "newc", "--quiet"]
    archive = subprocess.run(
        cpio, input=names.encode(), cwd=tree, check=True, capture_output=True, env=environment
    ).stdout
    new = made.with_suffix(".new")
    new.write_bytes(archive)
    new.rename(made)
