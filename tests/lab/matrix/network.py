"""The two hosts of the fault matrix: network namespaces at a bridge, in a namespace of the command's own.

Nothing outside these namespaces is touched. Without root both engines share the loopback interface, and what needs the
link between them is not run.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_UP_WITHIN_S = 30.0
_SUBNET = "10.78.0"
SLOW_BITS = 8_000_000
"""Of the slowed link from the prefill engine: a prompt of 1,500 tokens has 6.3 MB of cache and takes six seconds."""

SOCKET_BUFFERS = "4096 65536 262144"
"""Least, first and most bytes of a TCP connection's buffers in the namespaces: else a whole prompt's cache would fit
into the sockets, and would be read when its first byte has arrived."""


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


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


class Network:
    """Both hosts. Without namespaces it is the loopback interface, and the link can't be shaped."""

    prefill: Host
    decode: Host

    def __init__(self, folder: Path) -> None:
        """Both hosts; `folder` is for files that their processes see."""
        self._made: list[str] = []
        self._hosts_file = folder / "hosts"
        self.why_not = _why_no_namespaces()
        if self.why_not is not None:
            self.prefill = self.decode = Host("127.0.0.1", ("localhost",), "lo")
            return
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    @property
    def two_hosts(self) -> bool:
        """Whether there is a link between two hosts."""
        return self.prefill.netns is not None

    def _make(self) -> None:
        """A bridge in a namespace of this process's own, and a host at it for each engine."""
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot make a network namespace")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "hub", "type", "bridge")
        _run("ip", "addr", "add", f"{_SUBNET}.254/24", "dev", "hub")
        _run("ip", "link", "set", "hub", "up")
        hosts = []
        for number, role in enumerate(("prefill", "decode"), 1):
            name, port = f"kvfmatrix{os.getpid()}{role[0]}", f"to-{role}"
            _run("ip", "netns", "add", name)
            self._made.append(name)
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", port, "master", "hub")
            _run("ip", "link", "set", port, "up")
            address, second = f"{_SUBNET}.{number}", f"{_SUBNET}.{number + 100}"
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for text in (address, second):
                _run("ip", "-n", name, "addr", "add", f"{text}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            for direction in ("rmem", "wmem"):
                setting = f"echo {SOCKET_BUFFERS} > /proc/sys/net/ipv4/tcp_{direction}"
                _run("ip", "netns", "exec", name, "sh", "-c", setting)
            hosts.append(Host(address, (f"{role}-host", second), "eth0", name, str(self._hosts_file)))
        self.prefill, self.decode = hosts
        names = "".join(f"{host.address} {host.aliases[0]}\n" for host in hosts)
        self._hosts_file.write_text(Path("/etc/hosts").read_text() + names)
        for host in hosts:
            self._await_up(host)

    def _await_up(self, host: Host) -> None:
        """UCX leaves out interfaces that the kernel does not call running yet."""
        deadline = time.monotonic() + _UP_WITHIN_S
        while " UP " not in _run("ip", "-n", str(host.netns), "-br", "link", "show", "eth0", "up"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"eth0 of network namespace {host.netns} does not come up")
            time.sleep(0.05)

    def slow(self, bits: int = SLOW_BITS) -> None:
        """Lets through so many bits a second from the prefill engine's host.

        A bucket that holds less than what a socket hands over at once (64 KiB) has the kernel cut that into packets,
        with a timer for each, which takes from engines of the same processors what a network card does by itself.
        """
        words = ("root", "tbf", "rate", str(bits), "burst", "128kb", "latency", "1s")
        _run("ip", "netns", "exec", str(self.prefill.netns), "tc", "qdisc", "replace", "dev", "eth0", *words)

    def firewall(self, open_ports: Sequence[int]) -> None:
        """Drops what opens a TCP connection to any port but these, on both hosts, as a firewall does."""
        ports = ",".join(str(port) for port in open_ports)
        rule = ("-i", "eth0", "-p", "tcp", "--syn", "-m", "multiport", "!", "--dports", ports, "-j", "DROP")
        for host in (self.prefill, self.decode):
            _run("ip", "netns", "exec", str(host.netns), "iptables", "-A", "INPUT", *rule)

    def dropped(self) -> int:
        """Packets that the firewall has dropped on both hosts."""
        return sum(
            dropped_packets(_run("ip", "netns", "exec", str(host.netns), "iptables", "-nvxL", "INPUT"))
            for host in (self.prefill, self.decode)
        )

    def restore(self) -> None:
        """Takes back `slow` and `firewall`."""
        if not self.two_hosts:
            return
        for host in (self.prefill, self.decode):
            _run("ip", "netns", "exec", str(host.netns), "iptables", "-F")
        # Fails where there is nothing to delete.
        words = ("ip", "netns", "exec", str(self.prefill.netns), "tc", "qdisc", "del", "dev", "eth0", "root")
        subprocess.run(words, check=False, capture_output=True)

    def bytes_from_prefill(self) -> int:
        """Bytes that have left the prefill engine's host."""
        # Not /proc/net: that is the namespace of the thread that asks, which may be one of a pool's.
        for line in Path(f"/proc/{os.getpid()}/net/dev").read_text().splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == "to-prefill":
                return int(figures.split()[0])
        raise OSError("no interface to-prefill")

    def close(self) -> None:
        """Removes the namespaces of the hosts; the bridge goes with this process."""
        for name in self._made:
            subprocess.run(("ip", "netns", "del", name), check=False)


def dropped_packets(listing: str) -> int:
    """What the rules of a chain have dropped, from what `iptables -nvxL` prints: packets, bytes, target and more."""
    rules = [line.split() for line in listing.splitlines()]
    return sum(int(words[0]) for words in rules if words[2:3] == ["DROP"])


def _why_no_namespaces() -> str | None:
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [name for name in ("ip", "tc", "iptables") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)} (on Debian: apt-get install iproute2 iptables)" if missing else None
