"""Lets vLLM's processes sleep where they would spin, for two engines on a machine with few cores.

A worker that waits for its next step, and an engine that waits for its workers, call os.sched_yield() in a loop for a
second before they block (vLLM 0.32, SpinCondition.wait in shm_broadcast.py). An engine whose blocks a connector still
holds steps without pause, so its workers never get to block at all. How badly that ends is the kernel's matter.
Measured on Linux 6.18 on one core, with two processes that yield in a loop and one that computes: a process that had
yielded for 3 s did not get 0.2 s of processor time within 60 s, and one that only slept 50 ms at a time woke up 64 s
late. Two servers of two pipeline stages each on two cores, which others used too, stood still for up to 122 s at a
time; with short sleeps the longest hand-over of 40 prompts was 0.9 s. With one rank each, steps of 0.56 to 0.7 s were
seen of which the worker computed for 0.02 to 0.15 s and had no processor for the rest, while both engine cores yielded.

A short sleep waits as well and takes no share from anybody. It is used with every connector.
"""

from __future__ import annotations

import os
import time

# Well below a step of the model on a CPU, which takes 10 ms and more.
SLEEP_S = 0.0002


def _sleep() -> None:
    time.sleep(SLEEP_S)


def register() -> None:
    """vLLM's hook for general plug-ins, called in each of its processes; may be called again."""
    os.sched_yield = _sleep
