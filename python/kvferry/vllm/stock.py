"""Translates keys of vLLM's own `NixlConnector` in `kv_connector_extra_config`.

A key with a counterpart here is taken for that; the others are left out, with a note that says why and what to use
instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._errors import make_error

SECONDS = {"kv_lease_duration": "lease_ms", "engine_ttl": "peer_ttl_ms", "decoder_kv_blocks_ttl": "history_lease_ms"}
"""Durations in seconds, and the key in milliseconds that each stands for."""

SAME = {"bidirectional_kv_xfer": "multi_turn", "kv_recompute_threshold": "history_least_tokens"}
"""Other keys, and the key of the same values that each stands for."""

WITHOUT_MEANING = {
    "backends": "the one backend is UCX; choose what it uses with transport or ucx",
    "enforce_handshake_compat": "engines are always compared, field by field; shapes may differ",
    "num_threads": "one thread per worker drives UCX; copy_threads says how many copy memory within a host",
    "push_registration_timeout": "it is about vLLM's push connector; hold_timeout_ms bounds the waits here",
}
"""Keys without a counterpart, and the note about each."""

VARIABLES = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "host (KVFERRY_HOST) names the address that other engines are told, and bind "
    "(KVFERRY_BIND) the one that is bound",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "port (KVFERRY_PORT) is the handshake listener's",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "bootstrap_port (KVFERRY_BOOTSTRAP_PORT) is that of the server that proxies ask",
}
"""Environment variables of vLLM's other P/D connectors, and what to use here."""


def vain_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns notes about variables of vLLM's other P/D connectors that are set in `environment`."""
    return [
        f"{name}={environment[name]} has no effect on KvferryConnector: {why}"
        for name, why in VARIABLES.items()
        if environment.get(name)
    ]


def translate(extra: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Returns `extra` in this connector's keys, notes about keys taken for others, and notes about keys without effect.

    A key of this connector wins over the one of `NixlConnector` that it stands for. Keys that neither has are left in.

    Raises `InvalidArgumentError` for a duration that is no number of seconds.
    """
    named_here = SECONDS | SAME
    own = {key: value for key, value in extra.items() if key not in named_here and key not in WITHOUT_MEANING}
    taken, left_out = [], []
    for key, ours in named_here.items():
        value = extra.get(key)
        if value is None:
            continue
        if own.get(ours) is not None:
            left_out.append(f"NixlConnector's {key} has no effect: {ours} is given too")
            continue
        own[ours] = _milliseconds(key, value) if key in SECONDS else value
        unit = " (s)" if key in SECONDS else ""
        taken.append(f"NixlConnector's {key} {value}{unit} is taken for {ours} {own[ours]}")
    for key, why in WITHOUT_MEANING.items():
        if key in extra:
            left_out.append(f"NixlConnector's {key} has no effect here: {why}")
    return own, taken, left_out


def _milliseconds(key: str, value: Any) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise make_error(
            -1,
            "invalid_argument",
            f"kv_connector_extra_config: {key} must be a number of seconds above 0, not {value!r}; "
            f"or give {SECONDS[key]}, in milliseconds",
        )
    return round(float(value) * 1000)
