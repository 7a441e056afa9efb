"""Hosts as network namespaces, joined by a bridge."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

_CLONE_NEWNET = 0x40000000


def run(*words: str) -> None:
    """A command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(addresses: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Hosts of these addresses in one /24 network, each with an interface eth0; the namespace of each.

    UCX looks for interfaces in /sys, which shows those of the machine: hence a name that is there too. It takes an
    interface's first address.
    """
    tag = f"kvfchaos{os.getpid()}"
    switch = f"{tag}switch"
    names = {host: f"{tag}{host}" for host in addresses}
    made = []
    try:
        for name in (switch, *names.values()):
            run("ip", "netns", "add", name)
            made.append(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for host, name in names.items():
            run(
                "ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port-{host}", "netns", switch
            )
            run("ip", "-n", switch, "link", "set", f"port-{host}", "master", "br0", "up")
            for address in addresses[host]:
                run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        # The kernel takes up to a second to call a new interface running, and UCX leaves out those that are not.
        deadline = time.monotonic() + 30
        for name in names.values():
            words = ("ip", "-n", name, "-br", "link", "show", "eth0", "up")
            while " UP " not in subprocess.run(words, check=True, capture_output=True, text=True).stdout:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"eth0 of network namespace {name} does not come up")
                time.sleep(0.05)
        yield names
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "del", name), check=False)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Two hosts on one network; namespace and address of each."""
    p_address, d_address = "10.78.0.1", "10.78.0.2"
    with hosts({"p": [p_address], "d": [d_address]}) as names:
        yield (names["p"], p_address), (names["d"], d_address)


def enter(netns: str) -> None:
    """Puts the calling thread into a network namespace."""
    with open(f"/run/netns/{netns}", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {netns}")


def swallow(netns: str, address: str) -> None:
    """Lets everything that is sent to `address` vanish, as a firewall that drops does.

    It goes to a hardware address that nobody has, which needs no packet filter.
    """
    nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
    run("ip", "-n", netns, "neigh", "replace", address, *nobody, "dev", "eth0")


def deliver(netns: str, address: str) -> None:
    """Undoes `swallow`."""
    run("ip", "-n", netns, "neigh", "del", address, "dev", "eth0")
