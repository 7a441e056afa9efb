"""kvferry's connector with the dump of `cache_dump.py`. vLLM loads this module by `kv_connector_module_path`."""

from __future__ import annotations

from kvferry.vllm import KvferryConnector

from lab.probes.cache_dump import CacheDump


class DumpedKvferryConnector(CacheDump, KvferryConnector):
    """`KvferryConnector`, which also writes down what it sent and received."""
