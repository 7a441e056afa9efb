"""Two prefill engines and a decode engine for each `kv_load_failure_policy`, for the tests of what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mini_config import Settings, write_model
from mini_remote import Remote
from mini_runner import RunnerName

POLICIES = ("fail", "recompute")
P_SALT, FRAIL_SALT = 1, 4
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

STEADY_LEASE_MS = 30_000
FRAIL_LEASE_MS = 1_000
TIMEOUT_MS = 10_000
"""A lease that outlasts what a request takes on a busy machine, one that a test waits for, and the decode engines'
limits: a working load takes milliseconds."""

FIRST_SEED = 100
"""Tests take their prompts from here on."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens that other seeds do not begin with."""
    return [seed % 499, *((seed * 7919 + i * 31 + i * i) % 499 for i in range(1, tokens))]


def _done(name: str) -> str:
    return f"'reason' in e.answers.get('{name}', {{}})"


class Trio:
    """The engines, with what a proxy does: those of one group under the calls of vLLM's older model runner, the others
    under those of the newer one, so that each case is driven through both.

    `frail` is there for leases to run out and to be killed, and is started again when it is next asked for; `steady`
    must go on.
    """

    def __init__(self, folder: Path, hybrid: bool) -> None:
        self.hybrid, self.model = hybrid, write_model(folder)
        self._good = 0
        # Over TCP, a peer that does not move stops the reads; by shared memory only its word is missing.
        self._transport = {"transport": "tcp"} if hybrid else {}
        self._runner: RunnerName = "active" if hybrid else "mixin"
        self.steady = self._producer(P_SALT, STEADY_LEASE_MS)
        self._frail: Remote | None = self._producer(FRAIL_SALT, FRAIL_LEASE_MS)
        limits = {f"{what}_timeout_ms": TIMEOUT_MS for what in ("transfer", "verdict")}
        # Digests change nothing where the bytes are right.
        extra = {**limits, **self._transport, "verify": True}
        self.decode = {
            policy: Remote(
                Settings("kv_consumer", self.model, 10 + at, policy, hybrid, extra=extra, runner=self._runner)
            )
            for at, policy in enumerate(POLICIES)
        }
        for engine in (self.steady, self._frail, *self.decode.values()):
            engine.wait_started()
        for engine in self.decode.values():
            engine.call("loaded_from", P_SALT)

    def _producer(self, salt: int, lease_ms: int) -> Remote:
        extra = {"lease_ms": lease_ms, **self._transport}
        settings = Settings("kv_producer", self.model, salt, "fail", self.hybrid, extra=extra, runner=self._runner)
        return Remote(settings)

    def add_producer(self, salt: int, lease_ms: int) -> Remote:
        """One more prefill engine, which is the caller's."""
        return self._producer(salt, lease_ms).wait_started()

    @property
    def frail(self) -> Remote:
        """The prefill engine with the short lease."""
        if self._frail is None:
            self._frail = self._producer(FRAIL_SALT, FRAIL_LEASE_MS).wait_started()
        return self._frail

    def kill_frail(self) -> None:
        """It dies at once."""
        self.frail.kill()
        self._frail = None

    def prefilled(self, producer: Remote, name: str, tokens: list[int]) -> dict[str, Any]:
        """The params that a prefill engine answers with."""
        producer.call("add", f"p-{name}", tokens, 1, REMOTE_DECODE)
        producer.call("run_until", _done(f"p-{name}"))
        # The lease goes out with the next step, which vLLM makes because the request is still kept.
        producer.call("step")
        params: dict[str, Any] = producer.call("answer", f"p-{name}")["params"]
        return params

    def answer(self, consumer: Remote, name: str) -> dict[str, Any]:
        """The answer to a request that was added."""
        consumer.call("run_until", _done(name))
        answer: dict[str, Any] = consumer.call("answer", name)
        return answer

    def decoded(self, consumer: Remote, name: str, tokens: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
        """A decode engine's answer."""
        consumer.call("add", name, tokens, 4, params)
        return self.answer(consumer, name)

    def loading(self, consumer: Remote, name: str) -> None:
        """Returns when the load of a request that was added has been handed to the worker, and has not ended."""
        consumer.call("run_until", f"'WAITING_FOR_REMOTE_KVS' in e.state()['requests'].get('{name}', '')")
        consumer.call("step")

    def whole(self, *engines: Remote) -> list[dict[str, Any]]:
        """Steps engines until nothing is left to do; then no request and no block may be left behind."""
        states = []
        for engine in engines:
            engine.call("run_while_needed")
            state = engine.call("state")
            assert state["requests"] == {}
            assert state["leaked_blocks"] == 0
            states.append(state)
        return states

    def works(self, consumer: Remote) -> None:
        """A hand-over of a new prompt from the steady engine goes well, and every byte is right."""
        self._good += 1
        assert self._good < FIRST_SEED
        name, words = f"good-{self._good}", prompt(self._good, 70)
        params = self.prefilled(self.steady, name, words)
        assert self.decoded(consumer, name, words, params)["reason"] == "length"
        _, d = self.whole(self.steady, consumer)
        assert d["starts"][name][0] == len(words) - 1
        assert d["wrong_bytes"][name] == 0

    def close(self) -> None:
        """Ends all."""
        for engine in (*self.decode.values(), self.steady, *([self._frail] if self._frail else [])):
            engine.close()
