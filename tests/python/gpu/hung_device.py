"""Shuts an agent down while its device does not end a copy, and prints how long that took and what it said.

For the double: `KVFERRY_CUDA_DOUBLE_CALLS` names the file of its calls.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import cuda
import kvferry
from expect import until

NBYTES = 1 << 16


def main() -> None:
    """Reads device memory by messages, and ends the agent that has it."""
    calls = Path(os.environ["KVFERRY_CUDA_DOUBLE_CALLS"])
    owner, reader = (kvferry.Agent({"name": name, "transport": "tcp"}) for name in ("owner", "reader"))
    device, host = cuda.DeviceMemory(cuda.Driver(), NBYTES), cuda.HostMemory(NBYTES)
    owner.register((device.address, NBYTES), kind="cuda", device=0)
    reader.register((host.address, NBYTES), kind="host")
    reader.read(reader.connect(owner.metadata()), [kvferry.Segment(0, 0, 0, 0, 0, 0, 0, NBYTES)], [([0], [0])])
    until("no copy began", lambda: "cuEventRecord" in calls.read_text())
    began = time.monotonic()
    try:
        owner.shutdown(timeout=1.0)
    except kvferry.KvferryError as error:
        print(f"{time.monotonic() - began:.1f} s: {error}", flush=True)
    # What the device may still write to is not given back.
    os._exit(0)


main()
