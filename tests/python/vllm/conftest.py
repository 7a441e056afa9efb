"""Set-up for the connector's tests: they run in an environment that has vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lone_scheduler import LoneScheduler
    from mini_trio import Trio

# No hub is asked for anything, no usage is reported, and vLLM's log stays out of the tests' output.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Threads of torch, which wait for their next work by spinning, are of no use to engines without a model.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")


@pytest.fixture(scope="session", params=[False, True], ids=["trio-one-group", "trio-hybrid"])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Engines with one KV-cache group (full attention), and with a second one (sliding window)."""
    from mini_trio import Trio

    trio = Trio(tmp_path_factory.mktemp("model"), request.param)
    yield trio
    trio.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoneScheduler, LoneScheduler]]:
    """The schedulers of a prefill and of a decode engine."""
    from lone_scheduler import LoneScheduler
    from mini_config import write_model

    with ExitStack() as stack:
        model = tmp_path_factory.mktemp("model")
        write_model(model)
        yield LoneScheduler(stack, "kv_producer", model), LoneScheduler(stack, "kv_consumer", model)
