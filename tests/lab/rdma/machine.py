"""One virtual machine: its start, its output, its end."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.process import Child
from lab.rdma.packages import Packages

POLL_S = 0.05

HIDDEN = (Path("/tmp"), Path("/run"))
"""Folders of which a guest has its own, so that it does not see what the host has there."""


@dataclass(frozen=True)
class Shape:
    """What all machines of a run have: memory in MiB, how they are run ("kvm" or "tcg"), how many there are."""

    memory: int
    accel: str
    hosts: int


class Machine:
    """A machine that runs one command. `folder` is its own; `links` are the files of the two networks' sockets."""

    def __init__(self, number: int, shape: Shape, packages: Packages, folder: Path, links: list[Path]) -> None:
        self.number, self.shape, self.packages, self.folder, self.links = number, shape, packages, folder, links
        self._child: Child | None = None
        self._told = 0

    def start(self, command: str, root: Path, environment: Mapping[str, str]) -> None:
        """Boots it. The command runs in `root`, which has the same path as on the host, wherever that is."""
        self.folder.mkdir(parents=True)
        others = [f"10.99.{link}.{other}" for other in range(1, self.shape.hosts + 1) for link in (0, 1)]
        exports = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin") + ":/usr/sbin:/sbin",
            "HOME": "/root",
            "RDMA_HOST": str(self.number),
            "RDMA_ADDRESSES": " ".join(others),
            "PYTHONDONTWRITEBYTECODE": "1",
            **environment,
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
        lines += ["ulimit -l unlimited", f"cd {shlex.quote(str(root))}", command]
        (self.folder / "command").write_text("\n".join(lines) + "\n")
        (self.folder / "needed").write_text("".join(f"{path}\n" for path in hidden([root, Path(sys.base_prefix)])))
        environment = {**os.environ, "LD_LIBRARY_PATH": self.packages.libraries}
        self._child = Child.program(self._qemu(), self.folder / "console", environment)

    def _qemu(self) -> list[str]:
        words = f"console=ttyS0 panic=-1 quiet mitigations=off loglevel=4 NUMBER={self.number}"
        shares = [("host", "/", True), ("out", str(self.folder), False)]
        if self.packages.guest is not None:
            words += " PACKAGES=1"
            shares.append(("packages", str(self.packages.guest), True))
        how = (
            ["-accel", "kvm", "-cpu", "host"]
            if self.shape.accel == "kvm"
            else ["-accel", "tcg,thread=multi", "-cpu", "max"]
        )
        arguments = [str(self.packages.qemu), *how, "-machine", "q35", "-m", str(self.shape.memory), "-smp", "2"]
        for folder in self.packages.firmware:
            arguments += ["-L", str(folder)]
        arguments += ["-nographic", "-monitor", "none", "-no-reboot", "-nodefaults", "-serial", "stdio"]
        arguments += ["-kernel", str(self.packages.kernel), "-initrd", str(self.packages.initramfs), "-append", words]
        arguments += ["-device", "virtio-rng-pci"]
        for tag, path, fixed in shares:
            options = f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap"
            arguments += ["-virtfs", options + (",readonly=on" if fixed else "")]
        for number, link in enumerate(self.links):
            if self.shape.hosts == 1:
                net = f"user,id=n{number},restrict=on"
            else:
                server = "on" if self.number == 1 else "off"
                net = f"stream,id=n{number},server={server},addr.type=unix,addr.path={link}"
            mac = f"52:54:00:99:0{number}:0{self.number}"
            device = f"virtio-net-pci,netdev=n{number},mac={mac},host_mtu=4200,romfile="
            arguments += ["-netdev", net, "-device", device]
        return arguments

    def is_up(self) -> bool:
        """Whether it has booted."""
        return (self.folder / "up").exists()

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._child is not None and self._child.poll() is not None

    def code(self) -> int | None:
        """The command's exit code; None if it did not end."""
        try:
            return int((self.folder / "code").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def tell(self, end: bool = False) -> None:
        """Passes on whole lines of its output that are new; all that there is at the end."""
        try:
            with (self.folder / "output").open("rb") as output:
                output.seek(self._told)
                new = output.read()
        except FileNotFoundError:
            return
        if not end:
            new = new[: new.rfind(b"\n") + 1]
        self._told += len(new)
        mark = f"[{self.number}] " if self.shape.hosts > 1 else ""
        for line in new.decode(errors="replace").splitlines():
            print(f"{mark}{line}", flush=True)

    def console(self) -> str:
        """The last that it said by itself."""
        return (self.folder / "console").read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """Ends it, whatever it does."""
        if self._child is not None:
            self._child.kill()


def hidden(paths: list[Path]) -> list[Path]:
    """Those of `paths` that a guest would not see."""
    resolved = [path.resolve() for path in paths]
    return [path for path in resolved if any(path.is_relative_to(folder) for folder in HIDDEN)]


def appears(path: Path, machine: Machine, seconds: float) -> bool:
    """Waits until a file is there; false if the machine has ended or the time has passed before."""
    until = time.monotonic() + seconds
    while not path.exists():
        if machine.is_over() or time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True
