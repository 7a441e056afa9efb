"""Lets vLLM's Ray executor run on a machine without an accelerator, for `scripts/demo --executor ray`.

vLLM refuses Ray on a CPU ("current platform cpu does not support ray"): its executor places one worker per accelerator
and the CPU platform names none. Here a CPU platform names Ray's GPU resource, and Ray is told of as many as there
are ranks (RAY_OVERRIDE_RESOURCES). A platform plug-in is the one hook that vLLM runs early enough in Ray's actors, too.
Everything from placement to the collection of the workers' outputs is then vLLM's own Ray code; only the devices are
CPUs.
"""

from __future__ import annotations

import json


def register() -> str:
    """vLLM's hook for platforms: the qualified name of the class to use."""
    return "lab.servers.ray_on_cpu_platform.RayCpuPlatform"


def environment(ranks: int) -> dict[str, str]:
    """What to set for a server with `ranks` workers under Ray."""
    return {
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": ranks}),
        # A cluster of this server alone, which nobody outside the machine reaches, without files in the user's home.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
