"""Caches of a device that the library has no path to, through buffers in host memory (`kv_buffer_device` `cpu`).

The device is made up: its memory is the caches', it writes there only when somebody waits for it, and vLLM's platform
copies blocks between it and the host. The rest is vLLM's and the connector's; every byte is checked on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvferry
import mini_ranks
import numpy as np
import pytest
import torch
from kvferry.vllm import host_buffer, host_memory
from kvferry.vllm.geometry import Layer
from kvferry.vllm.host_buffer import Copies, HostBuffer
from mini_config import BLOCK
from test_vllm_engines import REMOTE_DECODE, Pair, prompt
from test_vllm_states import HERE, THERE, Stateful

BUFFERED: dict[str, Any] = {"host_buffer": "copied"}
AHEAD = BUFFERED | {"ahead": 1}
"""A step begins before the output of the one before it is taken in."""


class Buffered(Pair):
    """A pair whose prefill engine may answer before blocks are where they are read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decode_buffered = "host_buffer" in arguments[5]

    def decoded(self, name: str, tokens: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
        """As vLLM, the prefill engine steps while it keeps the blocks."""
        self.prefill.start("run_while_needed")
        answer = super().decoded(name, tokens, params)
        self.prefill.result("run_while_needed")
        return answer

    def quiesce(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """And nothing that is over is waited for by a host buffer."""
        states = super().quiesce()
        assert [engine.call("filling") for engine in (self.prefill, self.decode)] == [[], []]
        return states


@pytest.fixture(
    scope="module",
    params=[
        (BUFFERED, BUFFERED, True, False, "mixin"),
        (BUFFERED, {}, False, False, "active"),
        ({}, BUFFERED, True, False, "active"),
        (BUFFERED | {"block": 48, "layout": "LBNHC"}, BUFFERED | {"block": 32}, False, False, "mixin"),
        (BUFFERED | {"states": "align"}, BUFFERED | {"states": "align"}, False, False, "active"),
        (BUFFERED, BUFFERED, False, True, "mixin"),
        (AHEAD, AHEAD, True, False, "active"),
        (AHEAD | {"states": "align"}, AHEAD | {"states": "align"}, False, False, "mixin"),
    ],
    ids=[
        "both-hybrid",
        "prefill",
        "decode-hybrid",
        "both-other-blocks",
        "both-states",
        "both-children",
        "ahead-hybrid",
        "ahead-states",
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buffered]:
    prefill, decode, hybrid, child, runner = request.param
    pair = Buffered(tmp_path_factory.mktemp("model"), "fail", hybrid, child, prefill, decode, runner)
    yield pair
    pair.close()


@pytest.mark.release
@pytest.mark.parametrize("tokens", [5, BLOCK, 103, 500])
def test_hand_over(pair: Buffered, tokens: int) -> None:
    name = f"over-{tokens}"
    words = prompt(tokens, tokens)
    answer = pair.decoded(name, words, pair.prefilled(name, words))
    assert (answer["reason"], len(answer["tokens"])) == ("length", 4)
    p, d = pair.quiesce()
    assert d["starts"][name][0] == tokens - 1
    assert d["wrong_bytes"][name] == 0
    assert p["figures"]["sends_read"] >= 1


@pytest.mark.release
def test_a_prefill_in_chunks(pair: Buffered) -> None:
    """What a chunk writes into a block of the chunk before is there too. Nothing is read before the end."""
    words = prompt(40, 11 * BLOCK + 5)
    first = pair.prefilled("place", prompt(41, 20))
    pair.decoded("place", prompt(41, 20), first)
    place = {key: first[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    pair.prefill.call("chunk", 2 * BLOCK + 3 if not pair.states else 2 * BLOCK)
    try:
        asked = {**place, "do_remote_prefill": True, "transfer_id": "x-chunks"}
        pair.decode.call("add", "chunks", words, 4, asked)
        for _ in range(20):
            pair.decode.call("step")
        pair.prefill.call("add", "p-chunks", words, 1, {**REMOTE_DECODE, "transfer_id": "x-chunks"})
        pair.prefill.start("run_while_needed")
        pair.decode.call("run_until", "'reason' in e.answers.get('chunks', {})")
        pair.prefill.result("run_while_needed")
    finally:
        pair.prefill.call("chunk", 0)
    _, d = pair.quiesce()
    assert d["starts"]["chunks"][0] == len(words) - 1
    assert d["wrong_bytes"]["chunks"] == 0


def test_prefixes_in_common_and_blocks_that_are_used_again(pair: Buffered) -> None:
    """More prompts than there are blocks, so that a block holds one after the other in both memories."""
    shared = prompt(50, 6 * BLOCK)
    for i in range(6):
        name, words = f"again-{i}", (shared if i % 2 else []) + prompt(60 + i, 300 + 23 * i)
        assert pair.decoded(name, words, pair.prefilled(name, words))["reason"] == "length"
        assert pair.quiesce()[1]["wrong_bytes"][name] == 0


@pytest.mark.release
def test_a_load_that_fails_and_one_that_is_aborted(pair: Buffered) -> None:
    words = prompt(70, 200)
    params = pair.prefilled("lost", words)
    key = "remote_request_id" if params.get("remote_block_ids") else "transfer_id"
    pair.decode.call("add", "lost", words, 4, {**params, "remote_incarnation": None, key: "nobody's"})
    pair.decode.call("step")
    pair.decode.call("abort", "lost")
    pair.decode.call("add", "taken-back", words, 4, params)
    pair.decode.call("step")
    pair.decode.call("abort", "taken-back")
    pair.quiesce()
    good = prompt(71, 200)
    assert pair.decoded("good", good, pair.prefilled("good", good))["reason"] == "length"
    assert pair.quiesce()[1]["wrong_bytes"]["good"] == 0


def test_a_load_that_is_aborted_before_the_workers_know_of_it(pair: Buffered) -> None:
    words = prompt(73, 200)
    params = pair.prefilled("withheld", words)
    pair.decode.call("withhold_steps", True)
    try:
        pair.decode.call("add", "withheld", words, 4, params)
        pair.decode.call("step")
        assert pair.decode.call("filling") == (["withheld"] if pair.decode_buffered else [])
        pair.decode.call("abort", "withheld")
        pair.decode.call("step")
    finally:
        pair.decode.call("withhold_steps", False)
    pair.quiesce()
    good = prompt(74, 200)
    assert pair.decoded("good-too", good, pair.prefilled("good-too", good))["reason"] == "length"
    assert pair.quiesce()[1]["wrong_bytes"]["good-too"] == 0


@pytest.mark.release
def test_blocks_that_a_step_in_flight_still_writes(pair: Buffered) -> None:
    """Requests that are aborted while they run leave blocks behind, and loads take these."""
    for turn in range(4):
        for at in range(3):
            pair.decode.call("add", f"local-{turn}-{at}", prompt(300 + 10 * turn + at, 250), 50, None)
        for _ in range(3):
            pair.decode.call("step")
        name, words = f"taker-{turn}", prompt(400 + turn, 600)
        params = pair.prefilled(name, words)
        pair.decode.call("add", name, words, 4, params)
        for at in range(3):
            pair.decode.call("abort", f"local-{turn}-{at}")
        pair.prefill.start("run_while_needed")
        pair.decode.call("run_until", f"'reason' in e.answers.get('{name}', {{}})")
        pair.prefill.result("run_while_needed")
        assert pair.decode.call("answer", name)["reason"] == "length"
        assert pair.quiesce()[1]["wrong_bytes"][name] == 0


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("not saved", "copied"), ("copied", "not filled")],
    ids=["not-saved", "not-filled"],
)
def test_without_either_copy_the_bytes_are_wrong(tmp_path: Path, prefill: str, decode: str) -> None:
    pair = Buffered(tmp_path, "fail", False, False, {"host_buffer": prefill}, {"host_buffer": decode})
    try:
        words = prompt(97, 64)
        assert pair.decoded("control", words, pair.prefilled("control", words))["reason"] == "length"
        assert pair.quiesce()[1]["wrong_bytes"]["control"] > 1000
    finally:
        pair.close()


def test_the_check_of_bytes_can_fail(pair: Buffered) -> None:
    assert pair.wrong_bytes_of_others("other", 98) > 1000


def test_a_load_that_begins_inside_a_block_keeps_what_is_in_front_of_it() -> None:
    """Both groups' blocks of two rows, and layers that share memory."""
    memory = torch.arange(8 * 2 * 3, dtype=torch.uint8)
    caches = {"a": memory.view(8, 1, 2, 3), "b": memory.view(8, 1, 2, 3)}
    before = memory.clone()
    buffer = HostBuffer(caches, {"a": Layer(0, None), "b": Layer(1, None)}, num_blocks=4, zeroed=False)
    copied: list[tuple[str, list[str], list[int]]] = []

    def copy(source: Any, target: Any, there: list[int], here: list[int], direction: str) -> None:
        assert there == here
        copied.append((direction, sorted(source), there))
        for name in source:
            target[name][here] = source[name][there]

    buffer.set_copy_operation(copy)
    buffer.save_and_prepare(Copies(filled={"r": ((1, 3), (2,))}))
    assert copied == [("d2h", ["a"], [2, 3]), ("d2h", ["b"], [4, 5])]
    host = buffer.caches["a"]
    assert host.untyped_storage().data_ptr() == buffer.caches["b"].untyped_storage().data_ptr()
    # What is loaded: all but the first token of block 1.
    host[2, :, 1:] = 200
    host[[3, 6, 7]] = 201
    buffer.finish_loads(["r", "somebody's"], failed=())
    expected = before.view(8, 1, 2, 3).clone()
    expected[2, :, 1:] = 200
    expected[[3, 6, 7]] = 201
    assert torch.equal(memory.view(8, 1, 2, 3), expected)
    # Ended, so that nothing comes of it any more; and nothing of one that has failed.
    buffer.save_and_prepare(Copies(filled={"lost": ((1,), ())}))
    host.fill_(99)
    buffer.finish_loads(["r", "lost"], failed={"lost"})
    assert torch.equal(memory.view(8, 1, 2, 3), expected)
    # A copy waits for the device: one for all requests of a step.
    copied.clear()
    buffer.save_and_prepare(Copies(saved=(((1,), (3,)), ((2,), ())), filled={"s": ((3,), ())}))
    assert copied == [("d2h", ["a"], [2, 3, 4, 5, 6, 7]), ("d2h", ["b"], [6, 7])]


@pytest.mark.release
def test_a_model_runner_that_has_no_copy_is_refused() -> None:
    buffer = HostBuffer({"a": torch.zeros(4, 1, 2, 3)}, {"a": Layer(0, None)}, 4, zeroed=False)
    with pytest.raises(RuntimeError, match="has not called set_host_xfer_buffer_ops"):
        buffer.check()


def test_a_cache_that_is_no_tensor_is_left_to_who_describes_it() -> None:
    caches: dict[str, Any] = {"a": torch.zeros(4, 1, 2, 3), "listed": [torch.zeros(4)]}
    buffer = HostBuffer(caches, {name: Layer(0, None) for name in caches}, 4, zeroed=False)
    assert buffer.caches["listed"] is caches["listed"]
    assert set(buffer.caches) == set(caches)


@pytest.mark.parametrize(("p_size", "d_size"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("copies", [True, False], ids=["copied", "not-copied"])
def test_ranks_of_unequal_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p_size: int, d_size: int, copies: bool
) -> None:
    """Of a model with full attention and states."""
    path, holds = mini_ranks.model(tmp_path), Stateful("GDN_ATTN")
    p = mini_ranks.Engine("p", path, p_size, monkeypatch, holds=holds, host_buffer=True)
    d = mini_ranks.Engine("d", path, d_size, monkeypatch, holds=holds, host_buffer=True)
    try:
        if copies:
            assert mini_ranks.hand_over(p, d, THERE, HERE) is None
        else:
            for side in p.sides:
                side.set_copy_operation(lambda *_: None)
            with pytest.raises(AssertionError):
                mini_ranks.hand_over(p, d, THERE, HERE)
            wrong = d.wrong(HERE)
            assert set(wrong) == set(range(d_size))
            assert all(np.array(list(wrong.values())) > 1000)
    finally:
        d.close()
        p.close()


def caches_of(nbytes: int) -> dict[str, torch.Tensor]:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    return {"a": memory.view(4, 1, 2, -1), "b": memory.view(4, 1, 2, -1)}


def test_a_host_that_is_too_small_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked, what is there, and what to do; and no worker has started by then."""
    room = host_memory.Available(512, "this machine's")
    monkeypatch.setattr(host_memory, "available", lambda: room)
    started: list[Any] = []
    monkeypatch.setattr(kvferry, "Worker", started.append)
    said = r"as its KV cache: \S+ GiB.* 0\.00 GiB are left of this machine's memory.*--kv-cache-memory-bytes"
    with pytest.raises(MemoryError, match=said):
        mini_ranks.Engine("p", mini_ranks.model(tmp_path), 1, monkeypatch, holds=Stateful("GDN_ATTN"), host_buffer=True)
    assert not started


def test_memory_that_others_take_meanwhile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a storage that is counted once, though two layers share it. Ranks start at the same time."""
    gib = host_memory.GIB
    monkeypatch.setattr(host_buffer, "_PIECE", 1024)
    rooms = iter([4096, 3072, 1024])
    monkeypatch.setattr(host_memory, "available", lambda: host_memory.Available(next(rooms), "this machine's"))
    layers = {"a": Layer(0, None), "b": Layer(0, None)}
    with pytest.raises(MemoryError, match=r"0\.00 GiB\. It has 0\.00 GiB of that, and 0\.00 GiB"):
        HostBuffer(caches_of(4096), layers, 4, zeroed=False)
    assert next(rooms, None) is None
    # Where it is enough to the last byte, and where nothing tells.
    exact = iter([4096, 3072, 2048, 1024])
    monkeypatch.setattr(host_memory, "available", lambda: host_memory.Available(next(exact), "this machine's"))
    assert not HostBuffer(caches_of(4096), layers, 4, zeroed=False).caches["a"].any()
    assert next(exact, None) is None
    monkeypatch.setattr(host_memory, "available", lambda: None)
    assert HostBuffer(caches_of(4096), layers, 4, zeroed=False).caches["b"].shape == (4, 1, 2, 512)
    assert host_buffer._gib(3 * gib // 2) == "1.50 GiB"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  900 kB\nMemAvailable:  700 kB\n"}
GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemAvailable: many kB"}, None),
        (MEMINFO, 700 * 1024),
        # Version 2: the least of the process's group and those that it is in; pages that are only cached count as free.
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/pod/container\n",
                f"{GROUP}/pod/container/memory.max": "max\n",
                f"{GROUP}/pod/container/memory.current": "10\n",
                f"{GROUP}/pod/memory.max": "50000\n",
                f"{GROUP}/pod/memory.current": "40000\n",
                f"{GROUP}/pod/memory.stat": "anon 5\ninactive_file 2500\nactive_file 7\n",
            },
            12_507,
        ),
        # In a container, which sees the top only.
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/../host/path\n",
                f"{GROUP}/memory.max": "3000\n",
                f"{GROUP}/memory.current": "4000\n",
            },
            0,
        ),
        # Version 1.
        (
            MEMINFO
            | {
                "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/job\n",
                f"{GROUP}/memory/job/memory.limit_in_bytes": "9000\n",
                f"{GROUP}/memory/job/memory.usage_in_bytes": "1000\n",
                f"{GROUP}/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 250\ntotal_active_file 50\n",
            },
            8_300,
        ),
        # More than the machine has is no limit.
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/\n",
                f"{GROUP}/memory.max": "9000000\n",
                f"{GROUP}/memory.current": "1\n",
            },
            700 * 1024,
        ),
    ],
    ids=["nothing", "unreadable", "machine", "groups", "container", "version-1", "large-limit"],
)
def test_what_memory_is_available(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    found = host_memory.available(tree(tmp_path, files))
    assert (None if found is None else found.nbytes) == expected


def test_this_machine_tells_what_is_available() -> None:
    found = host_memory.available()
    assert found is not None
    assert found.nbytes > 0
