"""The connectors of the fault matrix: what each is configured with.

The requests are the same for all: P is asked with `do_remote_decode`, its answer's `kv_transfer_params` go with the
original request to D, and both carry the same `X-Request-Id`, by which the push connector pairs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.demo.options import Options
from lab.servers.connectors import Connector

LEASE_S = 10
"""The lease of every connector. The default is 30 s with all of them."""


@dataclass(frozen=True)
class Peer:
    """One connector."""

    name: str
    title: str
    # Parts of --kv-transfer-config.
    config: Mapping[str, Any]
    extra: Mapping[str, Any]

    @property
    def ours(self) -> bool:
        """Whether every cell must be good."""
        return self.name == "kvferry"


_NIXL = {"kv_buffer_device": "cpu"}
_NIXL_EXTRA = {"kv_lease_duration": LEASE_S}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "kvferry",
            "kvferry",
            {"kv_connector": "KvferryConnector"},
            {"lease_ms": LEASE_S * 1000, "transport": "tcp"},
        ),
        Peer("nixl-pull", "NixlConnector (pull)", {"kv_connector": "NixlConnector", **_NIXL}, _NIXL_EXTRA),
        Peer(
            "nixl-push",
            "NixlPushConnector",
            {"kv_connector": "NixlPushConnector", **_NIXL},
            # How long a decode engine waits for a push: by default 480 s.
            {**_NIXL_EXTRA, "push_registration_timeout": 2 * LEASE_S},
        ),
        Peer(
            "nixl-pull-quiet",
            "NixlConnector (pull), progress thread and CPU pinning off",
            {"kv_connector": "QuietNixlConnector", "kv_connector_module_path": "lab.probes.nixl", **_NIXL},
            _NIXL_EXTRA,
        ),
    )
}
USUAL = ("kvferry", "nixl-pull", "nixl-push")


@dataclass(frozen=True)
class Placed(Connector):
    """A connector in an engine of a certain address and side channel."""

    peer: Peer = field(default_factory=lambda: PEERS["kvferry"])
    address: str = "127.0.0.1"
    side_port: int = 0
    device: str = "lo"
    engine_id: str | None = None

    def transfer_config(self, role: str, options: Options) -> dict[str, Any]:
        """The value of --kv-transfer-config."""
        extra = dict(self.peer.extra)
        if self.peer.ours:
            extra["port"] = self.side_port
        config = {**self.peer.config, "kv_role": role, "kv_connector_extra_config": extra}
        if self.engine_id is not None:
            config["engine_id"] = self.engine_id
        return config

    def environment(self, role: str, options: Options, request_log: Path, dump: Path) -> dict[str, str]:
        """What to add to a server's environment. All move bytes over TCP, as between two hosts."""
        result = {"VLLM_HOST_IP": self.address, "UCX_NET_DEVICES": self.device}
        if not self.peer.ours:
            result["VLLM_NIXL_SIDE_CHANNEL_HOST"] = self.address
            result["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_port)
            result["UCX_TLS"] = "tcp,self"
        return result
