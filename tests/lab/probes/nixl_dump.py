"""vLLM's stock connector with the dump of `cache_dump.py`. vLLM loads this module by `kv_connector_module_path`."""

from __future__ import annotations

from lab.probes.cache_dump import CacheDump
from lab.probes.nixl import ObservedNixlConnector, QuietNixlConnector


class DumpedNixlConnector(CacheDump, ObservedNixlConnector):
    """`ObservedNixlConnector`, which also writes down what it sent and received."""


class DumpedQuietNixlConnector(CacheDump, QuietNixlConnector):
    """`QuietNixlConnector`, which also writes down what it sent and received."""
