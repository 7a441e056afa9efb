"""Functions that run in a process of their own (`child.call`). Arguments and results are of JSON's types.

An error of kvferry's is a result too: `{"error": name, "message": text}`.
"""

from __future__ import annotations

import ctypes
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import Agent, Listener, Scheduler, Worker, _find, _lib, _wire
from .._errors import KvferryError
from ..agent import PeerConnected, PeerLost
from ..bench import driver

Result = dict[str, Any]


def _result(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except KvferryError as error:
        # The C function's name says nothing to whoever types a command.
        return {"error": error.name, "message": re.sub(r"^kvf_\w+: ", "", error.message)}


def library() -> Result:
    """Loads libkvferry: its path, version and ABI."""
    return _result(lambda: {"path": str(_find.library_path()), "version": _lib.version(), "abi": _lib.abi_version()})


def candidates(ucx_lib: str | None) -> Result:
    """Returns every libucp that the search for a UCX comes across, in search order, with its outcome.

    Each is a map of `path`, `source`, `fate` ("chosen", "refused", "not_tried"), `version` and `why`. Opens the chosen
    one; it is no error if there is none.
    """

    return _result(
        lambda: _wire.unpack_map("candidates", _lib.ask("kvf_ucx_candidates", _lib.text("ucx_lib", ucx_lib or "")))
    )


def outlook(config: Mapping[str, object]) -> Result:
    """The UCX, transports and devices of an agent of this configuration, and other UCX in the process."""

    def look() -> Result:
        result = _wire.unpack_map("an outlook", _lib.ask("kvf_ucx_outlook", _wire.pack("config", config)))
        # They are loaded, so that this opens nothing.
        result["others"] = [{"path": path, **ucx_version(path)} for path in result["others"]]
        return result

    return _result(look)


def ucx_version(path: str) -> Result:
    """The version and place of the libucp that the dynamic linker opens as `path`."""
    try:
        library = ctypes.CDLL(path)
        library.ucp_get_version_string.restype = ctypes.c_char_p
        version = library.ucp_get_version_string().decode()
    except (OSError, AttributeError) as error:
        return {"version": None, "why": str(error)}
    return {"version": version}


def key(key_file: str | None) -> Result:
    """True if the key file can be used: a listener on the loopback reads it."""

    def look() -> Result:
        config: dict[str, object] = {"engine_id": "doctor", "host": "127.0.0.1"}
        if key_file is not None:
            config["key_file"] = key_file
        Listener(config).close()
        return {}

    return _result(look)


def listen(config: Mapping[str, object]) -> Result:
    """Binds a handshake listener and frees it: the address that others would be told."""

    def look() -> Result:
        with Listener({"engine_id": "doctor", **config}) as listener:
            host, port = listener.address
        return {"host": host, "port": port}

    return _result(look)


def start(worker: Mapping[str, object], scheduler: Mapping[str, object] | None) -> list[Result]:
    """Starts a worker, and with `scheduler` a scheduler side, and ends them. Returns the errors of their starts.

    A scheduler side with `push` binds its listener's port."""

    def start_worker() -> Result:
        # No file is made or written, and nobody connects.
        unused = {"warm_up": False, "trace": "", "request_log": ""}
        tried = Worker({"engine_id": "check", **worker, **unused})
        # It has started, however long its end takes.
        with suppress(KvferryError):
            tried.shutdown(1.0)
        return {}

    def start_scheduler() -> Result:
        with Scheduler({"engine_id": "check", "groups": [{"kind": "full", "block_size": 1}], **(scheduler or {})}):
            return {}

    answer = [_result(start_worker)] if scheduler is None else [_result(start_worker), _result(start_scheduler)]
    return [result for result in answer if result]


def cuda() -> str | None:
    """Why CUDA's driver has no GPU to use; None when it has one."""
    return driver.why_not()


def is_here(host: str) -> bool:
    """True if `host` is an address of this machine: only then can a socket be bound to it."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(address)
                return True
    except OSError:
        pass
    return False


def verbs(libucp: str, module: str) -> dict[str, Any]:
    """Loads UCX's module for verbs: the error, its libibverbs, and the devices that this one knows."""
    answer: dict[str, Any] = {"error": "", "libibverbs": "libibverbs", "devices": []}
    try:
        # The module needs libraries that lie beside libucp.
        ctypes.CDLL(libucp)
        ctypes.CDLL(module)
    except OSError as error:
        return {**answer, "error": str(error)}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    path = next((line[line.index("/") :] for line in maps.splitlines() if "/libibverbs" in line), "libibverbs.so.1")
    library = ctypes.CDLL(path)
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype, library.ibv_get_device_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    number = ctypes.c_int()
    devices = library.ibv_get_device_list(ctypes.byref(number))
    names = [library.ibv_get_device_name(devices[at]).decode(errors="replace") for at in range(number.value)]
    return {**answer, "libibverbs": path, "devices": names}


def survey(
    host: str, port: int, config: Mapping[str, object], agent: Mapping[str, object] | None, connect_s: float = 0.0
) -> Result:
    """Asks a listener who it is; with `agent`, the configuration of one, also which way bytes would go to each rank.
    Those have `connect_s` seconds from the call on."""
    deadline = time.monotonic() + connect_s

    def look() -> Result:
        packed = _wire.pack("config", config)
        answer = _wire.unpack_map("a survey", _lib.ask("kvf_handshake_survey", _lib.text("host", host), port, packed))
        result: Result = {"survey": answer["survey"]}
        if agent is not None:
            result["routes"] = _result(lambda: {"ranks": _routes(agent, answer["agents"], deadline)})
        return result

    return _result(look)


def _routes(config: Mapping[str, object], agents: list[bytes], deadline: float) -> list[Result]:
    """Connects to every agent, and says how each is reached or why not."""
    routes: list[Result] = [{} for _ in agents]
    start = time.monotonic()
    # Closed without a shutdown that waits: the process ends after this.
    agent = Agent(config)
    try:
        waiting: dict[int, int] = {}
        for index, metadata in enumerate(agents):
            try:
                waiting[agent.connect(metadata)] = index
            except KvferryError as error:
                routes[index] = {"error": error.name, "message": error.message}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for event in agent.wait(left):
                if not isinstance(event, PeerConnected | PeerLost) or event.peer not in waiting:
                    continue
                index = waiting.pop(event.peer)
                if isinstance(event, PeerLost):
                    routes[index] = {"error": event.error.name, "message": event.error.message}
                elif route := agent.route(event.peer):
                    routes[index] = {"lanes": route.lanes, "host": route.host, "device": route.device}
                    agent.disconnect(event.peer)
        for index in waiting.values():
            waited = time.monotonic() - start
            routes[index] = {"error": "timeout", "message": f"no answer within {waited:.1f} s"}
    finally:
        # This process ends anyway.
        with suppress(KvferryError):
            agent.shutdown(0.5)
    return routes
