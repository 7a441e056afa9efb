"""Set-up for the connector's tests: they run in an environment that has vLLM."""

from __future__ import annotations

import os

import pytest

# No hub is asked for anything, no usage is reported, and vLLM's log stays out of the tests' output.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
