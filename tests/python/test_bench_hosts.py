"""`kvferry bench serve` and `transfer --peer`: every byte between two hosts, and every kind of failure."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import GENEROUS, ROOT, skip
from kvferry import Listener, Worker
from kvferry.bench import hosts
from kvferry.bench.cache import GROUPS, area
from kvferry.cli import main
from lab.common import free_port
from lab.network import Network

SMALL = "--block-bytes 4KiB --blocks 40 --layers 2 --requests 2 --rounds 1 --transport tcp"


@contextmanager
def kvferry(within: Sequence[str], words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*within, sys.executable, "-m", "kvferry", *shlex.split(words)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def server(
    within: Sequence[str] = (), words: str = "", **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and where it is."""
    with kvferry(within, "bench serve --size 1MiB --port 0 --transport tcp", **variables) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving 1 MiB of host memory at (\S+); Ctrl-C ends it.*\n", line)
        assert found, process.communicate()
        yield process, found[1]


@contextmanager
def here(**config: object) -> Iterator[tuple[hosts.Memory, str]]:
    """A server in this process: its memory, and where it is."""
    with hosts.serving(0, 1 << 20, "host", "tcp", config) as (memory, (host, port)):
        yield memory, f"{host}:{port}"


def failed(words: str, capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """What a transfer that fails says."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "transfer", *shlex.split(words)])
    assert ended.value.code == code
    return capsys.readouterr().err


def key_at(path: Path) -> str:
    main(["key", str(path)])
    return str(path)


@pytest.fixture
def network() -> Iterator[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Commands that run another one on either of two hosts, and the address of the first."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Network())
        except (OSError, subprocess.CalledProcessError) as error:
            skip("netns", str(error))
        first, second = (("ip", "netns", "exec", str(host.netns)) for host in made.hosts.values())
        yield first, second, made.prefill.address


@pytest.mark.slow
@pytest.mark.parametrize("with_key", [False, True])
def test_two_hosts(network: Any, with_key: bool, tmp_path: Path) -> None:
    first, second, address = network
    key = key_at(tmp_path / "key") if with_key else ""
    out = tmp_path / "rows.json"
    with server(first, KVFERRY_KEY_FILE=key) as (process, place):
        assert place.startswith(f"{address}:")
        for direction in ("read", "write"):
            words = f"bench transfer --peer {place} {SMALL} --direction {direction} --json {out}"
            with kvferry(second, words, KVFERRY_KEY_FILE=key) as client:
                text, errors = client.communicate(timeout=GENEROUS)
            assert client.returncode == 0, errors
            assert "every byte compared" in text
            found = json.loads(out.read_text())
            assert (found["peer"]["memory"], found["peer"]["peer_memory"]) == ("host", "host")
            assert "tcp" in found["peer"]["lanes"]
            (row,) = found["rows"]
            assert (row["block_bytes"], row["bytes"]) == (4096, 2 * 40 * 2 * 4096)
            assert min(row[key] for key in ("latency_us", "latency_p99_us", "ours_ms", "gb_per_s")) > 0
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=GENEROUS)
        assert (process.returncode, text.splitlines()[-1], errors) == (0, "ended", "")


def test_without_sizes_several_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvferry.bench.commands.REQUEST", 1 << 18)
    monkeypatch.setattr("kvferry.bench.commands.SIZES", [4096, 65536])
    out = tmp_path / "rows.json"
    with here() as (_, place):
        assert main(["bench", "transfer", "--peer", place, "--rounds", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["block_bytes"], row["bytes"]) for row in rows] == [(4096, 1 << 18), (65536, 1 << 18)]


@pytest.mark.parametrize("direction", ["read", "write"])
def test_wrong_bytes_are_seen(
    direction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with here() as (memory, place):
        # Of what is read in the next round, or of what was written in this one.
        half = 0 if direction == "read" else memory.words.size // 2
        monkeypatch.setattr(hosts.Starter, "tell", lambda _: memory.words.reshape(-1)[half:].fill(7))
        words = f"--peer {place} {SMALL} --direction {direction}"
        assert "words of 8 bytes are wrong after round" in failed(words, capsys)


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    said = failed(f"--peer 127.0.0.1:{port} {SMALL}", capsys)
    assert said.startswith("kvferry bench transfer: failed: ")
    assert f"127.0.0.1:{port}" in said
    assert "kvf_" not in said


def test_another_key_and_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = key_at(tmp_path / "right"), key_at(tmp_path / "wrong")
    with server(KVFERRY_KEY_FILE=right) as (_, place):
        for key in (wrong, ""):
            monkeypatch.setenv("KVFERRY_KEY_FILE", key)
            assert "key" in failed(f"--peer {place} {SMALL}", capsys)


def test_an_engine_is_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    memory = np.zeros(1 << 16, dtype=np.uint8)
    with (
        Listener({"engine_id": "prefill", "host": "127.0.0.1"}) as listener,
        Worker({"engine_id": "prefill"}) as worker,
    ):
        worker.register(memory.ctypes.data, memory.nbytes)
        worker.set_geometry({"groups": GROUPS, "areas": [area("0", 16, 4096)]})
        listener.offer(worker.metadata())
        host, port = listener.address
        said = failed(f"--peer {host}:{port} {SMALL} --direction write", capsys)
    assert "prefill" in said
    assert not memory.any()


def test_another_version(capsys: pytest.CaptureFixture[str]) -> None:
    answer = bytes.fromhex((ROOT / "tests/golden/handshake_refused.hex").read_text())
    # Version 99 (`c` in MessagePack) of the message, and of what its sender speaks.
    answer = re.sub(rb"(?s)(version).(.speaks.)..", rb"\1c\2cc", answer)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\x01" + bytes(31)

    def listen(port: socket.socket) -> None:
        client, _ = port.accept()
        with client:
            client.sendall(greeting + ready)
            heard = b""
            while b"handshake_request" not in heard:
                got = client.recv(4096)
                assert got, heard
                heard += got
            client.sendall(bytes([0, len(answer)]) + answer)
            client.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as port:
        thread = threading.Thread(target=listen, args=(port,), daemon=True)
        thread.start()
        said = failed(f"--peer 127.0.0.1:{port.getsockname()[1]} {SMALL}", capsys)
        thread.join()
    assert "protocol version 99" in said
    assert "upgrade" in said


@pytest.mark.parametrize("when", ["warm", "tell"])
def test_a_server_that_dies(when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (process, place):
        original = getattr(hosts.Starter, when)

        def die(starter: hosts.Starter) -> None:
            original(starter)
            if when == "warm":
                # Nothing is answered from now on, so that it dies in the middle of the transfer.
                process.send_signal(signal.SIGSTOP)
                threading.Timer(0.5, process.kill).start()
            else:
                process.kill()

        monkeypatch.setattr(hosts.Starter, when, die)
        said = failed(f"--peer {place} {SMALL}", capsys)
    assert said.startswith("kvferry bench transfer: failed: ")
    assert "peer" in said


def test_a_server_that_answers_no_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (process, place):
        original = hosts.Starter.warm

        def freeze(starter: hosts.Starter) -> None:
            original(starter)
            process.send_signal(signal.SIGSTOP)
            starter._limit_s = 0.5

        monkeypatch.setattr(hosts.Starter, "warm", freeze)
        assert "have not ended within" in failed(f"--peer {place} {SMALL}", capsys)


def test_interrupt_of_a_transfer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with here() as (_, place):
        monkeypatch.setattr(hosts.Starter, "tell", lambda _: signal.raise_signal(signal.SIGINT))
        assert failed(f"--peer {place} {SMALL}", capsys, 130) == "kvferry bench transfer: interrupted\n"


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main(["bench", "serve", "--port", str(port), "--size", "1MiB"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("kvferry bench serve: failed: ")
    assert str(port) in said


def test_more_than_the_server_has(capsys: pytest.CaptureFixture[str]) -> None:
    with here() as (_, place):
        said = failed(f"--peer {place} --block-bytes 1MiB --blocks 2", capsys, 2)
    assert "the server has 1 MiB" in said
    assert "larger --size" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("transfer --peer :1", "HOST or HOST:PORT"),
        ("transfer --peer here:0", "HOST or HOST:PORT"),
        ("transfer --peer here --api worker", "--api worker does not go with --peer"),
        ("transfer --peer here --watch", "--watch does not go with --peer"),
        ("transfer --peer here --plot drawing.svg", "--plot does not go with --peer"),
        ("serve --size 1000", "number of bytes from 1MiB"),
        ("serve --size 1024GiB", "this machine has"),
        ("serve --port 65536", "whole number from 0 to 65,535"),
        ("serve --ucx TLS", "'TLS' is not NAME=VALUE"),
    ],
)
def test_what_cannot_be_is_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *shlex.split(words)])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
