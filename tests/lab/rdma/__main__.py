"""`scripts/rdma-vm`: runs a command where there are RDMA devices."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from lab.common import ROOT
from lab.rdma import packages
from lab.rdma.machine import POLL_S, Machine, Shape, appears

BOOT_S = {"kvm": 15.0, "tcg": 240.0}
"""Within this a machine is up. A KVM that does nothing, as within some virtual machines, is given up soon."""
PASSED = ("KVFERRY_", "UCX_", "PYTHONPATH", "VIRTUAL_ENV", "RUST_")
"""Beginnings of the environment variables that guests are given."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/rdma-vm",
        description="Runs a command in a virtual machine with two soft-RoCE devices, rxe0 and rxe1, or in two such "
        "machines that are joined by both. They see this host's files, read-only: what they write is gone with them.",
    )
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="machines; RDMA_HOST is 1 or 2 in them")
    parser.add_argument("--time", type=float, default=300.0, help="seconds after which all is ended (default: 300)")
    parser.add_argument("--memory", type=int, default=3072, help="MiB of memory of each machine (default: 3072)")
    parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments, or one shell command")
    asked = parser.parse_args()
    if asked.command[:1] == ["--"]:
        del asked.command[0]
    if not asked.command:
        parser.error("the command is missing")
    return asked


def run(asked: argparse.Namespace, accel: str, root: Path, folder: Path) -> int | None:
    """The exit code of the command, the first that is not 0 of several machines; None where no machine came up."""
    found = packages.find(root / ".deps/rdma")
    shape = Shape(asked.memory, accel, asked.hosts)
    links = [folder / f"net{number}" for number in (0, 1)]
    machines = [Machine(number, shape, found, folder / str(number), links) for number in range(1, asked.hosts + 1)]
    command = asked.command[0] if len(asked.command) == 1 else shlex.join(asked.command)
    environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    began = time.monotonic()
    try:
        for machine in machines:
            machine.start(command, root, environment)
            if machine.number == 1 and asked.hosts > 1:
                silent = [link for link in links if not appears(link, machine, BOOT_S[accel])]
                if silent:
                    if accel == "tcg":
                        print(f"error: QEMU does not listen at {silent[0]}:\n{machine.console()}", file=sys.stderr)
                    return None
        while True:
            passed = time.monotonic() - began
            for machine in machines:
                machine.tell()
            # In this order: one that boots and ends in between is up, and not one that never booted.
            is_over = [machine.is_over() for machine in machines]
            is_up = [machine.is_up() for machine in machines]
            if not all(is_up):
                ended = any(over and not up for over, up in zip(is_over, is_up, strict=True))
                if passed > BOOT_S[accel] or ended:
                    if accel == "tcg":
                        print(f"error: a machine did not boot:\n{machines[0].console()}", file=sys.stderr)
                    return None
            elif all(is_over):
                break
            elif passed > asked.time:
                print(f"error: not over after {asked.time:.0f} s, ended (--time)", file=sys.stderr)
                return 124
            time.sleep(POLL_S)
    finally:
        for machine in machines:
            machine.stop()
            machine.tell(end=True)
    codes = [machine.code() for machine in machines]
    if None in codes:
        dead = machines[codes.index(None)]
        print(f"error: machine {dead.number} ended before its command did:\n{dead.console()}", file=sys.stderr)
        return 1
    return next((code for code in codes if code), 0)


def main() -> int:
    asked = parse()
    root = ROOT
    # So that `finally` is reached.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    accels = [asked.accel]
    if asked.accel == "auto":
        accels = ["kvm", "tcg"] if os.access("/dev/kvm", os.R_OK | os.W_OK) else ["tcg"]
    code = None
    for accel in accels:
        folder = Path(tempfile.mkdtemp(prefix="kvferry-rdma-"))
        try:
            code = run(asked, accel, root, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if code is not None:
            return code
        if accel == "kvm":
            print("KVM does not boot a machine here: emulation is used", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
