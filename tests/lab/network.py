"""Hosts as network namespaces at a bridge, which has a namespace of its own: nothing outside of these is touched."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_UP_WITHIN_S = 30.0

TWO = {"prefill": ("10.78.0.1", "10.78.0.101"), "decode": ("10.78.0.2", "10.78.0.102")}
"""The addresses of the usual two hosts."""

SLOW_BITS = 8_000_000
"""Of the slowed link from the prefill engine: a prompt of 1,500 tokens has 6.3 MB of cache and takes six seconds."""

SOCKET_BUFFERS = "4096 65536 262144"
"""Least, first and most bytes of a TCP connection's buffers where a link is slowed: else a whole prompt's cache would
fit into the sockets, and would be read when its first byte has arrived."""


def run(*command: str) -> str:
    """What a command that must succeed prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def why_not() -> str | None:
    """Why there can be no network namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [name for name in ("ip", "tc", "iptables") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)} (on Debian: apt-get install iproute2 iptables)" if missing else None


def _check(result: int, words: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"cannot {words}")


def enter(netns: str, hosts: str | None = None) -> None:
    """Puts the calling thread into a network namespace, with the file `hosts` in the place of /etc/hosts if there is
    one."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{netns}", "rb") as namespace:
        _check(libc.setns(namespace.fileno(), _CLONE_NEWNET), f"enter the network namespace {netns}")
    if hosts is not None:
        _check(libc.unshare(_CLONE_NEWNS), "make a mount namespace")
        _check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "detach mounts")
        words = f"put {hosts} in the place of /etc/hosts"
        _check(libc.mount(hosts.encode(), b"/etc/hosts", None, ctypes.c_ulong(_MS_BIND), None), words)


@dataclass(frozen=True)
class Host:
    """Where an engine lives."""

    address: str
    # Other texts by which the same host is reached.
    aliases: tuple[str, ...]
    device: str
    netns: str | None = None
    # What its processes see as /etc/hosts, where it is not that.
    hosts_file: str | None = None

    def ip(self, *words: str) -> str:
        """`ip` in its network namespace."""
        return run("ip", "-n", str(self.netns), *words)

    def run(self, *command: str) -> str:
        """A command there."""
        return run("ip", "netns", "exec", str(self.netns), *command)


LOOPBACK = Host("127.0.0.1", ("localhost",), "lo")


class Network(AbstractContextManager["Network"]):
    """Hosts in one /24 network, each with an interface eth0; the first of its addresses is the one that UCX takes.

    UCX looks for interfaces in /sys, which shows those of the machine: hence a name that is there too.
    """

    why_not: str | None = None
    """Why there are no hosts; None if there are."""

    def __init__(self, folder: Path | None = None, hosts: Mapping[str, Sequence[str]] = TWO) -> None:
        """With a `folder`, for a file that the hosts' processes see as /etc/hosts, this process joins the network, and
        connections have small buffers."""
        self._tag = f"kvflab{os.getpid()}"
        self._made: list[str] = []
        self._home: int | None = None
        self.hosts: dict[str, Host] = {}
        try:
            self._make(folder, hosts)
        except BaseException:
            self.close()
            raise

    @property
    def prefill(self) -> Host:
        """The prefill engine's host."""
        return self.hosts["prefill"]

    @property
    def decode(self) -> Host:
        """The decode engine's host."""
        return self.hosts["decode"]

    def _make(self, folder: Path | None, hosts: Mapping[str, Sequence[str]]) -> None:
        switch = self._namespace("switch")
        run("ip", "-n", switch, "link", "add", "hub", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "hub", "up")
        file = folder / "hosts" if folder is not None else None
        for name, addresses in hosts.items():
            netns, port = self._namespace(name), f"to-{name}"
            host = Host(addresses[0], (f"{name}-host", *addresses[1:]), "eth0", netns, str(file) if file else None)
            host.ip("link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", switch, "link", "set", port, "master", "hub", "up")
            for address in addresses:
                host.ip("addr", "add", f"{address}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
            for direction in ("rmem", "wmem") if file else ():
                host.run("sh", "-c", f"echo {SOCKET_BUFFERS} > /proc/sys/net/ipv4/tcp_{direction}")
            self.hosts[name] = host
        if file:
            names = "".join(f"{host.address} {host.aliases[0]}\n" for host in self.hosts.values())
            file.write_text(Path("/etc/hosts").read_text() + names)
            network = next(iter(self.hosts.values())).address.rpartition(".")[0]
            run("ip", "-n", switch, "addr", "add", f"{network}.254/24", "dev", "hub")
            self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            enter(switch)
        # The kernel takes up to a second to call a new interface running, and UCX leaves out those that are not.
        deadline = time.monotonic() + _UP_WITHIN_S
        for name, host in self.hosts.items():
            while " UP " not in host.ip("-br", "link", "show", "eth0", "up"):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"eth0 of the host {name} does not come up")
                time.sleep(0.05)

    def _namespace(self, name: str) -> str:
        made = f"{self._tag}{name}"
        run("ip", "netns", "add", made)
        self._made.append(made)
        run("ip", "-n", made, "link", "set", "lo", "up")
        return made

    def slow(self, bits: int = SLOW_BITS) -> None:
        """Lets through so many bits a second from the prefill engine's host.

        A bucket that holds less than what a socket hands over at once (64 KiB) has the kernel cut that into packets,
        with a timer for each, which takes from engines of the same processors what a network card does by itself.
        """
        words = ("root", "tbf", "rate", str(bits), "burst", "128kb", "latency", "1s")
        self.prefill.run("tc", "qdisc", "replace", "dev", "eth0", *words)

    def cut(self, host: Host) -> None:
        """Drops all that comes to a host and leaves it."""
        host.run("iptables", "-I", "INPUT", "-i", "eth0", "-j", "DROP")
        host.run("iptables", "-I", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def firewall(self, open_ports: Sequence[int]) -> None:
        """Drops what opens a TCP connection to any port but these, on all hosts, as a firewall does."""
        ports = ",".join(str(port) for port in open_ports)
        rule = ("-i", "eth0", "-p", "tcp", "--syn", "-m", "multiport", "!", "--dports", ports, "-j", "DROP")
        for host in self.hosts.values():
            host.run("iptables", "-A", "INPUT", *rule)

    def dropped(self) -> int:
        """Packets that the firewall has dropped on all hosts."""
        return sum(dropped_packets(host.run("iptables", "-nvxL", "INPUT")) for host in self.hosts.values())

    def restore(self) -> None:
        """Takes back `slow`, `cut` and `firewall`."""
        for host in self.hosts.values():
            host.run("iptables", "-F")
            # Fails where there is nothing to delete.
            words = ("ip", "netns", "exec", str(host.netns), "tc", "qdisc", "del", "dev", "eth0", "root")
            subprocess.run(words, check=False, capture_output=True)

    def swallow(self, host: Host, address: str) -> None:
        """Lets everything that `host` sends to `address` vanish, as a firewall that drops does.

        It goes to a hardware address that nobody has, which needs no packet filter.
        """
        host.ip("neigh", "replace", address, "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")

    def deliver(self, host: Host, address: str) -> None:
        """Undoes `swallow`."""
        host.ip("neigh", "del", address, "dev", "eth0")

    def bytes_from_prefill(self) -> int:
        """Bytes that have left the prefill engine's host, as this process sees it that has joined the network."""
        # Not /proc/net: that is the namespace of the thread that asks, which may be one of a pool's.
        for line in Path(f"/proc/{os.getpid()}/net/dev").read_text().splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == "to-prefill":
                return int(figures.split()[0])
        raise OSError("no interface to-prefill")

    def close(self) -> None:
        """Leaves the network and removes it."""
        if self._home is not None:
            ctypes.CDLL(None).setns(self._home, _CLONE_NEWNET)
            os.close(self._home)
            self._home = None
        for name in self._made:
            subprocess.run(("ip", "netns", "del", name), check=False)
        self._made.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


class OneHost(Network):
    """In the place of a network where there can be none: all engines share the loopback interface, and what needs a
    link between them is not run."""

    def __init__(self, why_not: str) -> None:
        self.why_not, self.hosts = why_not, dict.fromkeys(TWO, LOOPBACK)
        self._home, self._made = None, []

    def restore(self) -> None:
        """There is nothing to restore."""


def dropped_packets(listing: str) -> int:
    """What the rules of a chain have dropped, from what `iptables -nvxL` prints: packets, bytes, target and more."""
    rules = [line.split() for line in listing.splitlines()]
    return sum(int(words[0]) for words in rules if words[2:3] == ["DROP"])
