"""Lets vLLM's Ray executor run on a machine without an accelerator, for `scripts/demo --executor ray`.

vLLM refuses Ray on a CPU ("current platform cpu does not support ray"): its executor places one worker per accelerator
and the CPU platform names none. Here a CPU platform names Ray's GPU resource, and Ray is told of as many as there
are ranks (RAY_OVERRIDE_RESOURCES). A platform plug-in is the one hook that vLLM runs early enough in Ray's actors, too.
Everything from placement to the collection of the workers' outputs is then vLLM's own Ray code; only the devices are
CPUs.
"""

from __future__ import annotations

import json
from pathlib import Path


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


def write_plugin(folder: Path) -> Path:
    """Makes `folder`, which holds nothing else, a place on PYTHONPATH where vLLM finds the platform: in every process
    that it starts, Ray's actors included, it looks for the entry points of distributions."""
    info = folder / "kvferry_demo_plugins-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-demo-plugins\nVersion: 0\n")
    entry = "kvferry_demo_ray = lab.servers.ray_on_cpu:register"
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{entry}\n")
    return folder
