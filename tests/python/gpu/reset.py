"""Agents whose context is reset when they have ended, and others after them. For the double."""

from __future__ import annotations

import ctypes

import cuda
import kvferry
from expect import GENEROUS

NBYTES = 1 << 20


def move(driver: cuda.Driver, seed: int) -> None:
    """Writes and reads device memory by messages, short blocks and long ones, between agents that end."""
    device, host = cuda.DeviceMemory(driver, NBYTES), cuda.HostMemory(NBYTES)
    device.put(cuda.pattern(seed, NBYTES))
    with (
        kvferry.Agent({"name": "here", "transport": "tcp", "verify": True}) as here,
        kvferry.Agent({"name": "there", "transport": "tcp"}) as there,
    ):
        here.register((device.address, NBYTES), kind="cuda", device=0)
        there.register((host.address, NBYTES), kind="host")
        peer = here.connect(there.metadata())
        half = NBYTES // 2
        for segment in (
            kvferry.Segment(0, 0, 0, 0, 0, 1024, 1024, 1024),
            kvferry.Segment(0, 0, 0, half, half, half // 512, half // 512, half // 512),
        ):
            here.write(peer, [segment], [(list(range(512)), list(range(512)))]).wait(GENEROUS)
        assert (host.get() == cuda.pattern(seed, NBYTES)).all()
        host.put(cuda.pattern(seed + 1, NBYTES))
        here.read(peer, [kvferry.Segment(0, 0, 0, 0, 0, 0, 0, NBYTES)], [([0], [0])]).wait(GENEROUS)
        assert (device.get() == cuda.pattern(seed + 1, NBYTES)).all()


def main() -> None:
    """Two lives of the device's context."""
    for seed in (1, 3):
        driver = cuda.Driver()
        move(driver, seed)
        driver.call("cuDevicePrimaryCtxReset_v2", ctypes.c_int(0))
    print("moved in both", flush=True)


main()
