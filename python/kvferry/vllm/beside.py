"""Checks which connectors `MultiConnector` has beside `KvferryConnector`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._errors import make_error

CONNECTOR_NAME = "KvferryConnector"
MULTI_CONNECTOR = "MultiConnector"

HAND_OVER = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector")
"""vLLM's own P/D connectors, of 0.32 and 0.33. Their answers have the same keys in `kv_transfer_params`, which
`MultiConnector` refuses at the first request by ending the engine core."""


def children(connector: object, extra: object) -> list[Mapping[str, Any]]:
    """Lists the configurations of `MultiConnector`'s children, those of nested ones too; none for another connector.
    Malformed ones are left out; vLLM reports them."""
    listed = extra.get("connectors") if connector == MULTI_CONNECTOR and isinstance(extra, Mapping) else None
    found: list[Mapping[str, Any]] = []
    for child in listed if isinstance(listed, list) else ():
        if isinstance(child, Mapping):
            nested = children(child.get("kv_connector"), child.get("kv_connector_extra_config"))
            found += nested or [child]
    return found


def check_children(configs: Iterable[Mapping[str, Any]]) -> None:
    """Raises `InvalidArgumentError` where `KvferryConnector` would not be the only P/D connector of an engine."""
    names = [str(config.get("kv_connector")) for config in configs]
    others = [name for name in names if name in HAND_OVER]
    own = names.count(CONNECTOR_NAME)
    if not own or (own == 1 and not others):
        return
    what = f"{own} {CONNECTOR_NAME}s" if own > 1 else f"{CONNECTOR_NAME} beside {' and '.join(others)}"
    raise make_error(
        -1,
        "invalid_argument",
        f"{MULTI_CONNECTOR} has {what}; expected one P/D connector, because all of them use the same keys in "
        "kv_transfer_params. Leave out the others",
    )
