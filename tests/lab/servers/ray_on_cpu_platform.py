"""vLLM's CPU platform with a device that Ray can count. See ray_on_cpu.py."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """A CPU whose ranks are placed by Ray's GPU resource."""

    ray_device_key = "GPU"
