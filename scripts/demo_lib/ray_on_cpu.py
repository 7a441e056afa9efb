"""Lets vLLM's Ray executor run on a machine without an accelerator, for `scripts/demo --executor ray`.

vLLM refuses Ray on a CPU ("current platform cpu does not support ray"): its executor places one worker per accelerator
and the CPU platform names none. Here a CPU platform names Ray's GPU resource, and Ray is told of as many as there
are ranks (RAY_OVERRIDE_RESOURCES). A platform plug-in is the one hook that vLLM runs early enough in Ray's actors, too.
Everything from placement to the collection of the workers' outputs is then vLLM's
own Ray code; only the devices are CPUs.

vLLM finds `register` through an entry point, so the demo writes the metadata of a small distribution into a folder
that is on the servers' PYTHONPATH.
"""

from __future__ import annotations

import json
from pathlib import Path

_ENTRY_POINTS = "[vllm.platform_plugins]\nkvferry_demo_ray_on_cpu = demo_lib.ray_on_cpu:register\n"
_METADATA = "Metadata-Version: 2.1\nName: kvferry-demo-ray-on-cpu\nVersion: 0\n"


def register() -> str:
    """vLLM's hook for platforms: the qualified name of the class to use."""
    return "demo_lib.ray_on_cpu_platform.RayCpuPlatform"


def write_plugin(folder: Path) -> Path:
    """Makes `folder` a place on PYTHONPATH where vLLM finds `register`."""
    info = folder / "kvferry_demo_ray_on_cpu-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    return folder


def environment(ranks: int, scripts: Path, deps: Path) -> dict[str, str]:
    """What to set for a server with `ranks` workers under Ray."""
    folder = write_plugin(deps / "ray-plugin")
    return {
        "PYTHONPATH": f"{scripts}:{folder}",
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": ranks}),
        # A cluster of this server alone, which nobody outside the machine reaches, without files in the user's home.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
