"""kvferry's connector with the dump of `cache_dump.py`, or with a line for each step of its engine."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from kvferry.vllm import KvferryConnector

from lab.probes.cache_dump import CacheDump

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class DumpedKvferryConnector(CacheDump, KvferryConnector):
    """`KvferryConnector`, which also writes down what it sent and received."""


class StepsKvferryConnector(KvferryConnector):
    """A line per step in the file that KVFERRY_DEMO_STEPS names: seconds since 1970 when it begins, and its tokens."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """As the connector's own."""
        line = {"at": time.time(), "tokens": scheduler_output.total_num_scheduled_tokens}
        with open(os.environ["KVFERRY_DEMO_STEPS"], "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        return super().build_connector_meta(scheduler_output)
