"""Adds `KvferryConnector` to the table in which NVIDIA Dynamo's workers look up how a connector's requests look.

The table's error for a missing name asks for that. Read from dynamo/vllm/kv_connector_protocols.py of ai-dynamo
1.6.1.
"""

from __future__ import annotations

import importlib
import sys

_MODULE = "dynamo.vllm.kv_connector_protocols"
LIKE = "NixlConnector"
"""The connector whose requests look the same."""


def register(connector: str) -> None:
    """Adds `connector` where this process is a worker of Dynamo's whose table can be added to, and does nothing in any
    other. May be called any number of times."""
    if "dynamo.vllm" not in sys.modules:
        return
    try:
        protocols = getattr(importlib.import_module(_MODULE), "KV_CONNECTOR_PROTOCOLS", None)
    except Exception:
        # Dynamo reports what is wrong with it.
        return
    if isinstance(protocols, dict) and LIKE in protocols:
        protocols.setdefault(connector, protocols[LIKE])
