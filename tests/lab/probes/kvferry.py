"""kvferry's connector, which also writes down when each step of its engine begins, and how many tokens it computes.

vLLM loads this module by `kv_connector_module_path`.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from kvferry.vllm import KvferryConnector

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

STEP_LOG = "KVFERRY_DEMO_STEPS"


class StepsKvferryConnector(KvferryConnector):
    """A line per step in the file that KVFERRY_DEMO_STEPS names: seconds since 1970, and tokens."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """As the connector's own."""
        line = {"at": time.time(), "tokens": scheduler_output.total_num_scheduled_tokens}
        with open(os.environ[STEP_LOG], "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        return super().build_connector_meta(scheduler_output)
