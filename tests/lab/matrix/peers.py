"""The connectors of the fault matrix: what each is configured with.

The requests are the same for all: P is asked with `do_remote_decode`, its answer's `kv_transfer_params` go with the
original request to D, and both carry the same `X-Request-Id`, by which the push connector pairs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.demo.options import Options
from lab.network import Host
from lab.servers.connectors import Connector, placed

LEASE_S = 10
"""The lease of every connector. The default is 30 s with all of them."""

POOL_TOKENS = 48 * 128
"""Of an engine: 48 blocks."""
TOKEN_BYTES = 4096
"""Of the tiny model: 4 layers, K and V, 4 heads of 32 float32."""


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
    """A connector in an engine of a certain host and side channel."""

    peer: Peer
    host: Host
    side_port: int
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
        """What to add to a server's environment."""
        return placed(self.host, self.side_port, self.peer.ours)
