"""Prefills that are read while they are computed: vLLM's scheduler in two processes, every byte checked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mini_config import BLOCK, LIMIT
from test_vllm_engines import REMOTE_DECODE, Pair, prompt

CHUNK = 4 * BLOCK
TOKENS = 11 * CHUNK + 9


class Portions(Pair):
    """A pair whose decode engine reads every block as soon as it is written."""

    def __init__(self, folder: Path, policy: str, hybrid: bool, child: bool, more: dict[str, Any], runner: Any) -> None:
        # A prompt and another one have room, not more: blocks that are given away are soon used again.
        prefill, reads = {**more, "blocks": 224}, {"chunk_tokens": BLOCK}
        super().__init__(folder, policy, hybrid, child, prefill, more, runner, reads)
        first = self.prefilled("first", prompt(1, 20))
        self.place = {key: first[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
        self.decoded("first", prompt(1, 20), first)
        self.prefill.call("chunk", CHUNK)

    def both(self, name: str, words: list[int]) -> None:
        """Both engines are asked at once; the decode engine waits, and the prefill engine knows."""
        params = {**self.place, "do_remote_prefill": True, "transfer_id": f"x-{name}"}
        self.decode.call("add", name, words, 4, params)
        self.decode.call("run_until", f"'WAITING_FOR_REMOTE_KVS' in str(e.scheduler.requests['{name}'].status)")
        self.prefill.call("add", f"p-{name}", words, 1, {**REMOTE_DECODE, "transfer_id": f"x-{name}"})
        # The load goes out with the step after the one that schedules it.
        self.decode.call("step")
        self.until(lambda: self.prefill.call("is_followed", f"p-{name}"))

    def until(self, condition: Any) -> None:
        """Waits until a condition holds, as long as a working wait can take many times over."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def chunks(self, number: int) -> None:
        for _ in range(number):
            self.prefill.call("step")

    def ends(self, name: str) -> dict[str, Any]:
        """The prefill goes on to its end, and the decode engine with it."""
        self.prefill.start("run_until", f"'p-{name}' not in e.scheduler.requests")
        self.decode.call("run_until", f"'reason' in e.answers.get('{name}', {{}})")
        self.prefill.result("run_until")
        answer: dict[str, Any] = self.decode.call("answer", name)
        return answer


@pytest.fixture(
    scope="module",
    params=[
        ("fail", True, False, "mixin", {}),
        ("recompute", False, True, "active", {}),
        ("recompute", False, False, "active", {"states": "align"}),
        ("fail", True, False, "active", {"chunk": 48}),
    ],
    ids=["hybrid-mixin", "child-active", "states-active", "chunked-active"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portions]:
    policy, hybrid, child, runner, more = request.param
    pair = Portions(tmp_path_factory.mktemp("model"), policy, hybrid, child, more, runner)
    yield pair
    pair.close()


def ahead(pair: Portions) -> int:
    figures: dict[str, int] = pair.decode.call("state")["figures"]
    return figures.get("ahead_bytes", 0)


def test_every_chunk_is_read_while_the_next_ones_are_computed(pair: Portions) -> None:
    words = prompt(2, TOKENS)
    before = ahead(pair)
    pair.both("chunks", words)
    for number in range(1, 11):
        pair.chunks(1)
        pair.until(lambda: pair.decode.call("missing", "chunks", number * CHUNK) == 0)  # noqa: B023
    answer = pair.ends("chunks")
    assert (answer["reason"], len(answer["tokens"])) == ("length", 4)
    p, d = pair.quiesce()
    assert d["wrong_bytes"]["chunks"] == 0
    assert d["starts"]["chunks"][0] == TOKENS - 1
    assert p["figures"]["sends_read"] >= 1
    assert ahead(pair) > before


def test_several_prompts_and_prefixes_in_common(pair: Portions) -> None:
    shared = prompt(3, 3 * CHUNK)
    words = {f"many-{i}": (shared if i % 2 else []) + prompt(30 + i, 150 + 40 * i) for i in range(4)}
    for name, tokens in words.items():
        pair.both(name, tokens)
    for name in words:
        assert pair.ends(name)["reason"] == "length"
    _, d = pair.quiesce()
    assert {name: d["wrong_bytes"][name] for name in words} == dict.fromkeys(words, 0)
    assert {name: d["starts"][name][0] for name in words} == {name: len(tokens) - 1 for name, tokens in words.items()}


def reused(pair: Portions, name: str) -> None:
    """A prefill whose first portion the decode engine reads when the blocks are others': it stood still meanwhile."""
    words = prompt(4, TOKENS)
    pair.both(name, words)
    pair.decode.freeze()
    pair.chunks(3)
    pair.prefill.call("preempt")
    pair.prefill.call("pause")
    pair.prefill.call("fill_free")
    pair.decode.thaw()
    # What it reads is wrong, and it has no other blocks to read yet.
    pair.until(lambda: pair.decode.call("untouched", name, BLOCK) < 64)
    assert pair.decode.call("missing", name, BLOCK) > 0
    pair.prefill.call("wake_up")


@pytest.mark.parametrize("silent", [False, True])
def test_blocks_that_are_given_away_between_chunks_are_read_anew(
    tmp_path_factory: pytest.TempPathFactory, silent: bool
) -> None:
    """Also where the prefill engine does not take back what it told: its library sees that the blocks are others."""
    pair = Portions(tmp_path_factory.mktemp("model"), "fail", False, False, {"prefix_caching": False}, "active")
    if silent:
        pair.prefill.call("keep_silent_of_preemptions")
    reused(pair, "reused")
    assert pair.ends("reused")["reason"] == "length"
    _, d = pair.quiesce()
    assert d["wrong_bytes"]["reused"] == 0
    pair.close()


def test_a_prefill_that_is_aborted_between_chunks(pair: Portions, request: pytest.FixtureRequest) -> None:
    pair.both("aborted", prompt(5, TOKENS))
    pair.chunks(5)
    pair.prefill.call("abort", "p-aborted")
    pair.prefill.call("run_while_needed")
    pair.decode.call("run_until", "'reason' in e.answers.get('aborted', {})")
    policy = request.node.callspec.params["pair"][0]
    assert pair.decode.call("answer", "aborted")["reason"] == ("error" if policy == "fail" else "length")
    pair.quiesce()


@pytest.mark.parametrize("chunks", [0, 1, 6, 11])
def test_a_client_that_leaves_between_chunks(pair: Portions, chunks: int) -> None:
    name = f"leaves-{chunks}"
    pair.both(name, prompt(6 + chunks, TOKENS))
    pair.chunks(chunks)
    pair.decode.call("abort", name)
    pair.prefill.start("run_until", f"'p-{name}' not in e.scheduler.requests")
    pair.decode.call("run_while_needed")
    pair.prefill.result("run_until")
    pair.quiesce()
