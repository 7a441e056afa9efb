"""Request ids that clients and proxies choose, of any length and with any characters: engines in two processes, every
byte checked. vLLM sees its own ids only, and nothing of a long one is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mini_config import BLOCK
from test_vllm_engines import REMOTE_DECODE, Pair, prompt

LONG = "cmpl-" + "x" * 600
IDS = {
    "512 bytes": "a" * 512,
    "513 bytes": "b" * 513,
    "600 bytes": "c" * 600,
    "512 bytes, not ASCII": "ä" * 256,
    "514 bytes, 257 characters": "ö" * 257,
    "a null byte": "n\0ull",
    "a line break": "line\nbreak",
    "half a surrogate pair": "half-\ud800",
}
PLACE = ("remote_engine_id", "remote_host", "remote_port")


class Named(Pair):
    """A pair that is given requests by their whole ids."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        first = self.handed_over("place", prompt(1, 20))
        self.place = {key: first[key] for key in PLACE}

    def prefilled_as(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """The prefill engine's answer to a request of this very id."""
        self.prefill.call("add", name, tokens, 1, REMOTE_DECODE)
        self.prefill.call("run_until", f"'reason' in e.answers.get({name!r}, {{}})")
        params: dict[str, Any] = self.prefill.call("answer", name)["params"]
        assert params, "the prefill engine kept nothing"
        # The lease goes out with the next step, which vLLM makes because the request is still kept.
        self.prefill.call("step")
        return params

    def answered(self, name: str) -> dict[str, Any]:
        """The decode engine's answer, while the prefill engine steps."""
        self.prefill.start("run_while_needed")
        self.decode.call("run_until", f"'reason' in e.answers.get({name!r}, {{}})")
        self.prefill.result("run_while_needed")
        answer: dict[str, Any] = self.decode.call("answer", name)
        return answer

    def handed_over(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """One request, first to the prefill engine; returns what that answered."""
        params = self.prefilled_as(name, tokens)
        self.decode.call("add", name, tokens, 4, params)
        self.loaded(name, tokens)
        return params

    def loaded(self, name: str, tokens: list[int]) -> None:
        """The request was loaded whole, and every byte is right."""
        assert self.answered(name)["reason"] == "length"
        _, d = self.quiesce()
        assert (d["starts"][name][0], d["wrong_bytes"][name]) == (len(tokens) - 1, 0)

    def quiesce(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Nothing is left of long ids either, on both sides of both engines."""
        states = super().quiesce()
        for engine in (self.prefill, self.decode):
            # The workers hear of a request's end with the next step.
            engine.call("step")
            assert engine.call("long_ids") == []
        return states


BUFFERED = {"host_buffer": "copied"}


@pytest.fixture(
    scope="module",
    params=[("fail", True, False, {}, "mixin"), ("recompute", False, True, BUFFERED, "active")],
    ids=["fail-hybrid-mixin", "recompute-child-buffered-active"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    policy, hybrid, child, more, runner = request.param
    pair = Named(tmp_path_factory.mktemp("model"), policy, hybrid, child, more, more, runner)
    yield pair
    pair.close()


@pytest.mark.parametrize("name", IDS.values(), ids=IDS)
def test_hand_over(pair: Named, name: str) -> None:
    pair.handed_over(name, prompt(len(name), 3 * BLOCK + 5))


def test_two_ids_that_differ_after_the_512th_byte(pair: Named) -> None:
    """At the same time, in both engines."""
    words = {f"{LONG}-{at}": prompt(10 + at, 60 + 20 * at) for at in range(2)}
    answers = {name: pair.prefilled_as(name, tokens) for name, tokens in words.items()}
    # A prefill engine with a host buffer answers with the other one.
    key = "remote_request_id" if answers[f"{LONG}-0"].get("remote_block_ids") else "transfer_id"
    assert len({params[key] for params in answers.values()}) == 2
    for name, tokens in words.items():
        pair.decode.call("add", name, tokens, 4, answers[name])
    for name, tokens in words.items():
        pair.loaded(name, tokens)


@pytest.mark.parametrize("way", ["header", "transfer_id"])
def test_both_engines_are_asked_at_once(pair: Named, way: str) -> None:
    """They make one name of what the proxy has given to both."""
    header, words = f"{way}-{'h' * 600}", prompt(20 + len(way), 70)
    given = {"remote_request_id": header} if way == "header" else {"transfer_id": header}
    name = f"cmpl-{header}-0"
    load = {**pair.place, **given, "do_remote_prefill": True}
    pair.decode.call("add", f"{name}-00000001", words, 4, load)
    for _ in range(5):
        pair.decode.call("step")
    asked = given if way == "transfer_id" else {}
    pair.prefill.call("add", f"{name}-00000002", words, 1, {**REMOTE_DECODE, **asked})
    pair.loaded(f"{name}-00000001", words)


def test_a_load_that_fails(pair: Named) -> None:
    """vLLM is told by its own id, and which blocks are invalid."""
    name, words = f"{LONG}-fails", prompt(30, 70)
    params = pair.prefilled_as(name, words)
    pair.decode.call("add", f"{name}-given-back", words, 4, params)
    pair.decode.call("abort", f"{name}-given-back")
    pair.quiesce()
    pair.decode.call("add", name, words, 4, params)
    answer = pair.answered(name)
    _, d = pair.quiesce()
    failed = d["failed"][name]
    # Reports of a child of `MultiConnector` are not seen here.
    assert failed["cause"] == ("lease_expired" if pair.hybrid else None)
    assert failed["told"] == ([] if pair.hybrid else failed["held"])
    assert answer["reason"] == ("error" if pair.hybrid else "length")


def test_a_load_that_is_refused(pair: Named) -> None:
    """Without a port, nobody can be asked."""
    name, words = f"{LONG}-refused", prompt(31, 70)
    params = {**pair.place, "do_remote_prefill": True, "transfer_id": "x", "remote_port": None}
    pair.decode.call("add", name, words, 4, params)
    assert pair.answered(name)["reason"] == ("error" if pair.hybrid else "length")
    pair.quiesce()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_clients_that_leave(pair: Named, steps: int) -> None:
    """Before anything is scheduled, and under or after the load; and on the prefill engine."""
    name, words = f"{LONG}-leaves-{steps}", prompt(40 + steps, 200)
    params = pair.prefilled_as(name, words)
    pair.decode.call("add", name, words, 4, params)
    for _ in range(steps):
        pair.decode.call("step")
    pair.decode.call("abort", name)
    pair.prefill.call("add", f"{name}-p", words, 1, REMOTE_DECODE)
    pair.prefill.call("abort", f"{name}-p")
    pair.quiesce()


def test_a_request_that_is_preempted(pair: Named) -> None:
    """After its load: what it had is computed again, and nothing is loaded."""
    name, words = f"{LONG}-preempted", prompt(50, 90)
    pair.decode.call("add", name, words, 20, pair.prefilled_as(name, words))
    pair.prefill.start("run_while_needed")
    pair.decode.call("run_until", f"len(e.answers.get({name!r}, {{}}).get('tokens', ())) > 2")
    pair.prefill.result("run_while_needed")
    pair.decode.call("preempt")
    assert pair.answered(name)["reason"] == "length"
    pair.quiesce()
