"""Run by `kvferry nixl` in a process of its own: two agents of stock NIXL, one reads from the other and notifies it.

The argument is the package, such as nixl_cu12. Prints one word when every byte is right.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from typing import Any

BLOCK, BLOCKS = 4096, 64
LIMIT = 60.0
"""Seconds for the read and the notification."""


def main(package: str) -> None:
    """Moves the blocks in reverse order; an error is an exception."""
    api: Any = importlib.import_module(f"{package}._api")
    size = BLOCK * BLOCKS
    source = bytes((place * 7 + place // BLOCK) % 251 for place in range(size))
    memories = [ctypes.create_string_buffer(content, size) for content in (bytes(size), source)]
    addresses = [ctypes.addressof(memory) for memory in memories]
    agents = [api.nixl_agent(f"kvferry check {n}", api.nixl_agent_config(backends=["KVFERRY"])) for n in range(2)]
    registered = [
        agent.register_memory([(address, size, 0, "")], "DRAM")
        for agent, address in zip(agents, addresses, strict=True)
    ]
    reader, owner = agents
    reader.add_remote_agent(owner.get_agent_metadata())
    ours = [(addresses[0] + number * BLOCK, BLOCK, 0) for number in range(BLOCKS)]
    theirs = [(addresses[1] + number * BLOCK, BLOCK, 0) for number in reversed(range(BLOCKS))]
    handle = reader.initialize_xfer(
        "READ",
        reader.get_xfer_descs(ours, "DRAM"),
        reader.get_xfer_descs(theirs, "DRAM"),
        "kvferry check 1",
        b"read",
    )
    deadline = time.monotonic() + LIMIT
    state = reader.transfer(handle, b"read")
    while state == "PROC" and time.monotonic() < deadline:
        state = reader.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"the read ended as {state}")
    expected = b"".join(source[start : start + BLOCK] for start in range(size - BLOCK, -1, -BLOCK))
    if memories[0].raw != expected:
        raise RuntimeError("the bytes that were read are wrong")
    notified: dict[str, list[bytes]] = {}
    while not notified and time.monotonic() < deadline:
        notified = owner.get_new_notifs()
    if notified != {"kvferry check 0": [b"read"]}:
        raise RuntimeError(f"the notification is {notified}")
    reader.release_xfer_handle(handle)
    for agent, memory in zip(agents, registered, strict=True):
        agent.deregister_memory(memory)
    print("right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
