"""`kvferry doctor --peer`: a running engine, something else that listens, and nobody."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from doctor_command import Told, doctor
from kvferry import Listener, Worker
from kvferry.cli import main
from lab.common import free_port

pytestmark = pytest.mark.slow

LAYERS, HEADS, HEAD_SIZE, TOKENS, BLOCKS = 3, 4, 8, 4, 20
CONTENT = 2 * 2 * HEAD_SIZE
"""K and V of bfloat16 per token and head."""
SHAPE = f"--layers {LAYERS} --kv-heads {HEADS} --head-size {HEAD_SIZE}"


def geometry(rank: int, ranks: int) -> dict[str, object]:
    heads = HEADS // ranks
    head = TOKENS * CONTENT
    area = {
        "part": "kv",
        "group": 0,
        "region": 0,
        "num_blocks": BLOCKS,
        "block_stride": heads * head,
        "heads": heads,
        "first_head": rank * heads,
        "total_heads": HEADS,
        "head_stride": head,
        "tokens": TOKENS,
        "token_stride": CONTENT,
        "content": CONTENT,
    }
    areas = [
        {**area, "layer": f"model.layers.{layer}.self_attn.attn", "offset": layer * BLOCKS * heads * head}
        for layer in range(LAYERS)
    ]
    return {"groups": [{"kind": "full", "block_size": TOKENS}], "areas": areas}


@contextmanager
def running(ranks: int = 2, ready: bool = True, **more: object) -> Iterator[str]:
    """An engine's workers and its listener: where it listens."""
    with ExitStack() as stack:
        shape = {"engine_id": "prefill", "tp_size": ranks}
        listener = stack.enter_context(Listener({**shape, "host": "127.0.0.1", **more}))
        for rank in range(ranks if ready else ranks - 1):
            memory = np.zeros(LAYERS * BLOCKS * HEADS // ranks * TOKENS * CONTENT, np.uint8)
            compat = [["model", "tiny"], ["cache_dtype", "auto"]]
            worker = stack.enter_context(Worker({**shape, "tp_rank": rank, "compat": compat, **more}))
            worker.register(memory.ctypes.data, memory.nbytes)
            worker.set_geometry(geometry(rank, ranks))
            listener.offer(worker.metadata())
            stack.callback(memory.fill, 0)
        host, port = listener.address
        yield f"{host}:{port}"


def ask(where: str, words: str = "", **environment: str) -> Told:
    return doctor("--peer", where, *words.split(), KVFERRY_PORT="0", **environment)


def test_a_peer_of_equal_and_of_fitting_shape(here: Told) -> None:
    with running() as where:
        equal = ask(where, f"--shape tp=2,block={TOKENS} {SHAPE} --compat model=tiny")
        other = ask(where, f"--shape pp=2,block=64,layout=token-major,parts=regions {SHAPE}")
    for told in (equal, other):
        assert told.cases("peer", "peer-shape") == ["answered", "fits"], told["peer-shape"]
        peer = told.map["peer"]
        assert (peer["engine"], peer["shape"], len(peer["ranks"])) == ("prefill", {"tp": 2, "pp": 1, "dcp": 1}, 2)
        assert peer["ranks"][1]["heads"] == [[2, 3]]
    if here["transfer-same-host"]["case"] == "moved":
        assert equal["peer-path"]["case"] == "fast"
        assert all("process_vm_readv" in line for line in equal["peer-path"]["evidence"])
    lines = "\n".join(other["peer-shape"]["evidence"])
    assert "tokens per block: 64 here, 4 there: fits (may differ)" in lines
    assert "bytes per token and head: k+v 32 here, k+v 32 there: fits\n" in lines + "\n"


def test_a_peer_of_a_differing_shape_is_told_field_by_field() -> None:
    with running() as where:
        told = ask(where, f"--shape tp=1 --layers 4 --kv-heads 2 --head-size {HEAD_SIZE} --compat model=large")
    assert told["peer-shape"]["case"] == "differs"
    wrong = {field["name"]: field for field in told.map["peer"]["fields"] if field["fits"] is False}
    assert set(wrong) == {
        "layers",
        "KV heads of the model",
        "model",
        "check of every pair of ranks",
    }
    assert (wrong["layers"]["here"], wrong["layers"]["there"]) == ("4 (0-3)", "3 (0-2)")
    assert (wrong["model"]["here"], wrong["model"]["there"]) == ("large", "tiny")
    assert all(field["remedy"] for field in wrong.values())
    assert "KV heads of the model" in told["peer-shape"]["remedy"]


def test_a_peer_without_a_shape_is_described() -> None:
    with running(1) as where:
        told = ask(where, "--no-connect")
    assert told.cases("peer", "peer-shape", "peer-path") == ["answered", "described", "skipped"]
    assert "model: tiny" in told["peer-shape"]["evidence"]
    assert any(line.startswith("pp 0 tp 0: layers 0-2, heads 0-3, 20 blocks") for line in told["peer"]["evidence"])


def test_a_peer_by_messages_on_this_host_is_slow() -> None:
    with running(1) as where:
        told = ask(where, UCX_TLS="tcp")
    assert told["peer-path"]["case"] == "slow", told["peer-path"]
    assert "served by messages" in told["peer-path"]["evidence"][0]


def test_nobody_listens() -> None:
    told = ask(f"127.0.0.1:{free_port()}")
    assert told.cases("peer", "peer-shape", "peer-path") == ["unreachable", "unknown", "unknown"]
    assert "5680" in told["peer"]["remedy"]
    assert told.map["peer"] is None


def test_a_peer_that_is_starting_and_something_else_that_listens() -> None:
    with running(ready=False) as where:
        told = ask(where)
    assert told["peer"]["case"] == "silent", told["peer"]
    assert any("1 of its 2 ranks have not reported yet" in line for line in told["peer"]["evidence"])
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = f"127.0.0.1:{mute.getsockname()[1]}"
        told = ask(where)
    assert told["peer"]["case"] == "unreachable", told["peer"]
    assert any(where in line and "says nothing" in line for line in told["peer"]["evidence"])


class Refusing(BaseHTTPRequestHandler):
    """An HTTP server, as vLLM's own port has one."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_port_of_another_program_is_told_as_that() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = ask(f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert told["peer"]["case"] == "foreign", told["peer"]
    assert any("is no kvferry listener but" in line for line in told["peer"]["evidence"])


def test_the_time_is_kept_where_packets_are_dropped() -> None:
    # The kernel drops what asks to connect to a port whose queue is full.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as held:
        fills = True
        while fills:
            filling = held.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(full.getsockname())
            fills = bool(select.select([], [filling], [], 3)[1])
        told = ask(f"127.0.0.1:{full.getsockname()[1]}")
    assert told["peer"]["case"] == "unreachable", told["peer"]
    assert any("does not answer" in line for line in told["peer"]["evidence"])


def key_at(path: Path) -> str:
    main(["key", str(path)])
    return str(path)


def test_a_peer_with_a_key(tmp_path: Path) -> None:
    right, wrong = key_at(tmp_path / "right"), key_at(tmp_path / "wrong")
    with running(1, key_file=right) as where:
        same = ask(where, KVFERRY_KEY_FILE=right)
        others = [ask(where, KVFERRY_KEY_FILE=wrong), ask(where)]
    assert same.cases("key", "peer", "peer-path") == ["usable", "answered", "fast"], same.troubles
    for told in others:
        assert told["peer"]["case"] == "key", told["peer"]
        assert "kvferry key" in told["peer"]["remedy"]
    with running(1, key_file="") as where:
        told = ask(where, KVFERRY_KEY_FILE=right)
    assert told["peer"]["case"] == "key", told["peer"]
    for told in (same, *others):
        for path in (right, wrong):
            assert Path(path).read_text().strip() not in told.text
