"""What scripts/rdma-vm does where a machine does not come up. That one does is what scripts/rdma-test shows."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from lab.rdma import __main__ as rdma_vm
from lab.rdma import machine, packages


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("accel", ["kvm", "tcg"])
def test_a_qemu_that_ends_at_once_is_no_machine(
    hosts: int, accel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nothing = Path("/dev/null")
    dead = packages.Packages(Path("/bin/false"), [], "", nothing, nothing, None)
    monkeypatch.setattr(packages, "find", lambda folder: dead)
    # Ended, before anybody looks at it.
    start = rdma_vm.Machine.start
    monkeypatch.setattr(rdma_vm.Machine, "start", lambda self, *rest: (start(self, *rest), self._child.wait(60)))
    asked = argparse.Namespace(hosts=hosts, time=60.0, memory=64, command=["true"])
    assert rdma_vm.run(asked, accel, tmp_path, tmp_path / "machines") is None
    # Of KVM nothing is said: emulation is tried next.
    assert ("error" in capfd.readouterr().err) == (accel == "tcg")


def test_a_guest_is_given_what_its_own_folders_hide(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/run")
    asked = [Path("/tmp/checkout"), Path("/usr"), link, Path("/tmpfoo")]
    assert machine.hidden(asked) == [Path("/tmp/checkout"), Path("/run")]
