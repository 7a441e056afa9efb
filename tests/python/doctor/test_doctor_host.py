"""`kvferry doctor` on limits of the host, made narrow for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from commands import WITHOUT_FOLDERS, skip
from doctor_command import Told, doctor
from kvferry import Listener
from kvferry.cli import main

pytestmark = pytest.mark.slow


def unshared(*flags: str) -> list[str]:
    command = ["unshare", "-r", *flags]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        skip("unshare", str(error))
    else:
        if done.returncode:
            skip("unshare", done.stderr.strip())
    return command


LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
fcntl.ioctl(socket.socket(), SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""`ip link set lo up` and then a command, where there is no `ip`."""


def test_a_network_namespace_without_a_route(here: Told) -> None:
    within = [*unshared("-n"), sys.executable, "-c", LOOPBACK_UP]
    told = doctor("--transfers", "--config", '{"port": 0}', within=within)
    assert told["address"]["case"] == "local-only", told.troubles
    assert told["address"]["evidence"] == ["127.0.0.1"]
    assert "KVFERRY_HOST" in told["address"]["remedy"]
    assert told["transfer-tcp"]["case"] == "moved"


def test_a_tiny_dev_shm() -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    told = doctor("--config", '{"port": 0}', within=[*unshared("-m"), "sh", "-c", mount, "sh"])
    assert told["shm"]["case"] == "small", told["shm"]
    assert told["shm"]["evidence"] == ["1 MiB, 1 MiB of it free"]
    assert "--shm-size" in told["shm"]["remedy"]


def test_no_network_and_a_dev_shm_that_cannot_be_written_to() -> None:
    # Not even a loopback interface that is up: UCX has no TCP.
    mount = 'mount -t tmpfs -o ro,size=1m tmpfs /dev/shm && exec "$@"'
    told = doctor("--config", '{"port": 0}', within=[*unshared("-n", "-m"), "sh", "-c", mount, "sh"])
    assert told["transports"]["case"] == "no-network", told.troubles
    assert "ip link set lo up" in told["transports"]["remedy"]
    assert told["shm"]["case"] == "unusable", told["shm"]


def test_a_running_engine_may_have_the_port() -> None:
    with Listener({"engine_id": "own", "host": "127.0.0.1"}) as listener:
        _, port = listener.address
        told = doctor(KVFERRY_HOST="127.0.0.1", KVFERRY_PORT=str(port))
    assert (told["port"]["case"], told["port"]["state"]) == ("engine", "ok"), told.troubles
    assert any(f"127.0.0.1: process {os.getpid()} " in line for line in told["port"]["evidence"])


def test_an_engine_with_another_key_has_the_port(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert main(["key", str(key)]) == 0
    with Listener({"engine_id": "own", "host": "127.0.0.1", "key_file": str(key)}) as listener:
        told = doctor(KVFERRY_HOST="127.0.0.1", KVFERRY_PORT=str(listener.address[1]))
    assert told["port"]["case"] == "engine", told.troubles


def test_a_port_in_use() -> None:
    """One that is free is in `test_this_machine_as_it_is`."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = doctor(KVFERRY_HOST="127.0.0.1", KVFERRY_PORT=str(port))
    assert told["port"]["case"] == "in-use", told.troubles
    assert "KVFERRY_PORT" in told["port"]["remedy"]
    assert any(f"127.0.0.1: process {os.getpid()} " in line for line in told["port"]["evidence"])


def test_few_open_files_and_the_default_port_which_is_an_engines() -> None:
    with ExitStack() as held:
        # Whoever else has it will do, unless it is an engine.
        with suppress(OSError):
            held.enter_context(socket.create_server(("0.0.0.0", 5680)))
        told = doctor(within=["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh"])
    assert told["port"]["case"] in ("in-use", "engine"), told["port"]
    assert any("5680" in line for line in told["port"]["evidence"])
    assert told["open-files"]["case"] == "low"
    assert told["open-files"]["evidence"][0].startswith("soft limit 256,")


def test_no_folder_that_can_be_written_to() -> None:
    told = doctor("--transfers", "--config", '{"port": 0}', within=[sys.executable, "-c", WITHOUT_FOLDERS])
    assert told["library"]["case"] == "loaded", told.text
    assert told["transfer-tcp"]["case"] == "moved", told.text
