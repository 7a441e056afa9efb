"""A process of its own in which stock NIXL is tried, for `kvferry nixl` and the doctor: one agent reads from another.

The arguments are the package, such as nixl_cu12, and a folder to write in, empty without one. Prints a line for each
step that succeeds, which begins with `STEP` and goes on as JSON; an error is an exception:

    {"bytes": {"copied": 262144}, "lanes": "tcp/lo, cma/memory", "ucx": {"path", "version"}, "transports": ["tcp", ...]}
    {"ucx_backend": true, "others": [{"path", "version"}]}

The first is the read, with every byte right, and the UCX of the plug-in with the transports that it has; without a
folder `bytes` and `lanes` are empty. The second is the process with NIXL's own backend UCX in it too (`ucx_backend` is
false where NIXL has none): the further UCX that are loaded then.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

BLOCK, BLOCKS = 4096, 64
LIMIT = 60.0
"""Seconds for the read and the notification, and for their figures to be told."""
OWNER = "kvferry check 1"
STEP = "kvferry nixl: "
"""The beginning of the lines that are told: libraries print what they like between them."""
_SAMPLE = re.compile(r"kvferry_peer_(\w+)\{(.*)\} (\d+)")


def read(api: Any) -> Any:
    """Moves the blocks in reverse order. Returns the agent that has them; the other is gone, its metrics written."""
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
        "READ", reader.get_xfer_descs(ours, "DRAM"), reader.get_xfer_descs(theirs, "DRAM"), OWNER, b"read"
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
    return owner


def figures(path: Path) -> dict[str, Any]:
    """The reader's metrics of the owner, once they have the whole read."""
    deadline = time.monotonic() + LIMIT
    while True:
        text = path.read_text() if path.exists() else ""
        found = [match.groups() for match in _SAMPLE.finditer(text) if f'peer="{OWNER}"' in match[2]]
        values = {name: int(value) for name, _, value in found}
        if values.get("bytes_read_total") == BLOCK * BLOCKS:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"the read is not in the metrics: {values}")
        time.sleep(0.1)
    ways = {name.removesuffix("_bytes_total"): value for name, value in values.items() if name.endswith("_bytes_total")}
    (labels,) = (dict(re.findall(r'(\w+)="([^"]*)"', text)) for name, text, _ in found if name == "connected")
    return {"bytes": {name: value for name, value in ways.items() if value}, **labels}


def library_of(maps: str) -> str:
    """The library of kvferry among the files that a process has mapped, as /proc/PID/maps tells them: a libkvferry.so,
    or the one that the Python package has by another name. Raises `RuntimeError` if there is none."""
    found = re.search(r"(/.*/(?:libkvferry\.so[^/ ]*|kvferry/_native/[^/ ]+\.so))$", maps, re.MULTILINE)
    if found is None:
        raise RuntimeError("the plug-in has loaded no library of kvferry")
    return found[1]


def _has_ucx_backend(api: Any) -> bool:
    """Makes an agent with NIXL's own backend UCX, if there is one."""
    agent = api.nixl_agent("kvferry check UCX", api.nixl_agent_config(backends=[]))
    if "UCX" not in agent.get_plugin_list():
        return False
    agent.create_backend("UCX", {})
    return True


def _tell(step: dict[str, Any]) -> None:
    print(STEP + json.dumps(step), flush=True)


def main(package: str, folder: str) -> None:
    """Tries one wheel of NIXL."""
    os.environ["KVFERRY_METRICS_FILE"] = os.path.join(folder, "%a.prom") if folder else ""
    api: Any = importlib.import_module(f"{package}._api")
    # Alive while the figures of the other one are looked at, which say that they are connected.
    owner = read(api)
    os.environ["KVFERRY_LIBRARY"] = library_of(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    from .doctor import inside

    moved = figures(Path(folder) / "kvferry_check_0.prom") if folder else {"bytes": {}, "lanes": ""}
    outlook = inside.outlook({})
    transports = sorted({resource["transport"] for resource in outlook["resources"]})
    told = {"bytes": moved["bytes"], "lanes": moved["lanes"], "ucx": outlook["ucx"], "transports": transports}
    _tell(told)
    del owner
    has_backend = _has_ucx_backend(api)
    _tell({"ucx_backend": has_backend, "others": inside.outlook({})["others"]})


if __name__ == "__main__":
    main(*sys.argv[1:])
