"""`scripts/bench-link`: hand-overs of long prompts between two hosts whose link is limited.

The hosts are network namespaces. What leaves the prefill engine's is limited by a token bucket filter to a rate at
which moving a prompt's whole cache takes a given share of the time that its prefill takes. Variants take turns, prompt
by prompt; families of engines take turns, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kvferry.bench.plot import svg

from lab.common import DEPS, make_folder, say
from lab.link.engines import CHUNK, CHUNKED, FAMILIES, LONGEST, TOKEN_BYTES, Engines, Variant
from lab.network import Network, why_not
from lab.process import preload
from lab.servers.client import Prompt, complete, complete_through
from lab.servers.forked import IMPORTED
from lab.servers.model import VOCAB, make_model
from lab.servers.proxy import open_session
from lab.servers.server import ServerFailed, ServerGroup
from lab.servers.specs import server_environment

RATIOS = (0.0, 0.1, 0.5, 1.0)
"""Of the time that the whole cache takes on the link to that of the prefill; 0: the link is as it is."""
LENGTHS = (2048, LONGEST)
OUTPUT_TOKENS = 4
LIMIT_S = 120.0
SHORT = 64
"""Tokens of a prompt whose hand-over is hardly more than the decode engine's own step, and what HTTP takes."""


@dataclass
class Sample:
    """One hand-over."""

    round: int
    variant: str
    tokens: int
    ratio: float
    # From the prefill engine's answer to the decode engine's first token, and from the request to that.
    handover_ms: float
    first_token_ms: float


class Bench:
    """One run."""

    def __init__(self, options: argparse.Namespace, network: Network, session: aiohttp.ClientSession) -> None:
        self._options, self._network, self._session = options, network, session
        self._random = random.Random(11)
        self.samples: list[Sample] = []
        # Rounds of other connectors that ended early, and why.
        self.failed: list[str] = []
        # How long a prefill takes, by its tokens.
        self.prefill_s: dict[int, float] = {}
        self._answers: dict[str, list[int]] = {}
        self._sent = 0

    def _prompt(self, tokens: int) -> Prompt:
        self._sent += 1
        words = tuple(self._random.randrange(4, VOCAB) for _ in range(tokens))
        return Prompt(f"l{self._sent}", words, max_tokens=OUTPUT_TOKENS)

    async def _hand_over(self, engines: Engines, variant: Variant, prompt: Prompt) -> tuple[float, float]:
        proxy = engines.proxies[variant.name]
        name = f"{prompt.name}-{variant.name.replace(' ', '-').replace(',', '')}"
        try:
            answer = await asyncio.wait_for(complete_through(self._session, proxy, prompt, name), LIMIT_S)
        except TimeoutError:
            raise ServerFailed(f"{variant.name}: no answer within {LIMIT_S:.0f} s") from None
        if answer.error is not None:
            raise ServerFailed(f"{variant.name}: {answer.error}")
        record = proxy.record(name)
        assert record.handover_ms is not None
        assert record.first_token_ms is not None
        known = self._answers.setdefault(prompt.name, answer.tokens)
        if known != answer.tokens or len(known) != OUTPUT_TOKENS:
            raise ServerFailed(f"{variant.name} answered {answer.tokens}, others {known}: the cache that came is wrong")
        return record.handover_ms, record.first_token_ms

    async def warm_up(self, engines: Engines) -> None:
        """First hand-overs, which do not count; and how long a prefill takes, as the prefill engine alone answers."""
        self._network.restore()
        for variant in engines.family.variants:
            for tokens in (SHORT, SHORT, 2 * CHUNK):
                await self._hand_over(engines, variant, self._prompt(tokens))
        for tokens in self._options.lengths:
            # Anew in each round, as a shared machine's speed changes; once in it, so that all have the same link.
            if tokens in self.prefill_s and not engines.family.is_kvferry:
                continue
            times = []
            for _ in range(5):
                prompt = self._prompt(tokens)
                begin = time.monotonic()
                answer = await complete(
                    self._session, engines.url("prefill"), Prompt(prompt.name, prompt.tokens, max_tokens=1), prompt.name
                )
                times.append(time.monotonic() - begin)
                if answer.error is not None:
                    raise ServerFailed(f"a prefill failed: {answer.error}")
            self.prefill_s[tokens] = statistics.median(times)
            say(f"  a prefill of {tokens} tokens takes {self.prefill_s[tokens]:.2f} s")

    def rate(self, tokens: int, ratio: float) -> float:
        """Bits a second at which the cache of so many tokens takes `ratio` of their prefill's time."""
        return tokens * TOKEN_BYTES * 8 / (ratio * self.prefill_s[tokens])

    def limit(self, tokens: int, ratio: float) -> None:
        """Sets the link."""
        self._network.restore()
        if ratio > 0:
            self._network.slow(round(self.rate(tokens, ratio)))

    async def measure(self, engines: Engines, number: int) -> None:
        """One round of a family."""
        cells = [(tokens, ratio) for tokens in self._options.lengths for ratio in self._options.ratios]
        for tokens, ratio in [(SHORT, 0.0), *cells]:
            self.limit(tokens, ratio)
            for _ in range(self._options.requests):
                prompt = self._prompt(tokens)
                for variant in engines.family.variants:
                    handover, first = await self._hand_over(engines, variant, prompt)
                    self.samples.append(Sample(number, variant.name, tokens, ratio, handover, first))
            if tokens != SHORT:
                say(f"  {engines.family.name}: {tokens} tokens, ratio {ratio}")
        self._network.restore()

    async def draw(self, engines: Engines, folder: Path) -> None:
        """The link's use during a hand-over of the longest prompt at ratio 1, for each variant of the family."""
        tokens = max(self._options.lengths)
        lines: dict[str, list[tuple[float, float]]] = {}
        for variant in engines.family.variants[:2]:
            self.limit(tokens, 1.0)
            watch = _Watch(self._network)
            begin = time.time()
            await self._hand_over(engines, variant, self._prompt(tokens))
            seen = watch.stop()
            steps = [json.loads(line) for line in engines.steps.read_text().splitlines()]
            if not lines:
                lines["computed"] = computed([step for step in steps if step["at"] >= begin], begin)
            name = f"on the wire, {variant.name.removeprefix('kvferry ')}"
            lines[name] = [(at - begin, sent / 2**20) for at, sent in seen[::5]]
        title = f"A prompt of {tokens:,} tokens over a link of {self.rate(tokens, 1.0) / 1e6:.0f} Mbit/s"
        (folder / "link-use.svg").write_text(svg(title, "seconds since the request", "MiB of cache", lines))
        self._network.restore()

    def table(self) -> str:
        """Medians, and the slowest, in milliseconds; and how long the last chunk's bytes take on the link."""
        variants = [variant.name for family in self._options.families for variant in family.variants]
        lines = ["| tokens | link / prefill | variant | hand-over p50 | max | first token p50 | max | last chunk |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        for tokens in (SHORT, *self._options.lengths):
            for ratio in self._options.ratios if tokens != SHORT else (0.0,):
                chunk = CHUNK * TOKEN_BYTES * 8e3 / self.rate(tokens, ratio) if ratio else 0.0
                for name in variants:
                    found = [self._of(name, tokens, ratio, what) for what in ("handover_ms", "first_token_ms")]
                    if not found[0]:
                        continue
                    figures = [f"{value:.0f}" for each in found for value in (statistics.median(each), max(each))]
                    lines.append(f"| {tokens} | {ratio} | {name} | {' | '.join(figures)} | {chunk:.0f} |")
        return "\n".join([*lines, *(["", *self.failed] if self.failed else [])])

    def _of(self, variant: str, tokens: int, ratio: float, what: str) -> list[float]:
        chosen = [each for each in self.samples if (each.variant, each.tokens, each.ratio) == (variant, tokens, ratio)]
        return [getattr(each, what) for each in chosen]


def computed(steps: list[dict[str, float]], begin: float) -> list[tuple[float, float]]:
    """MiB of cache over the time, at the end of each chunk, which is when the engine's next step begins."""
    points, done = [(0.0, 0.0)], 0.0
    for step, following in itertools.pairwise(steps):
        done += step["tokens"]
        if step["tokens"] > 1:
            points.append((following["at"] - begin, done * TOKEN_BYTES / 2**20))
    return points


class _Watch:
    """Looks at how many bytes have left the prefill engine's host, again and again."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._seen: list[tuple[float, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        first = self._network.bytes_from_prefill()
        while not self._end.wait(0.02):
            self._seen.append((time.time(), self._network.bytes_from_prefill() - first))

    def stop(self) -> list[tuple[float, int]]:
        self._end.set()
        self._thread.join()
        return self._seen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench-link", description=(__doc__ or "").partition("\n\n")[2])
    names = [family.name for family in FAMILIES]

    def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    parser.add_argument("--rounds", type=int, default=3, help="rounds in which the families take turns (default 3)")
    parser.add_argument("--requests", type=int, default=4, help="prompts per round, length and ratio (default 4)")
    parser.add_argument(
        "--lengths", type=numbers(int), default=list(LENGTHS), help="tokens of prompts, with commas between"
    )
    parser.add_argument(
        "--ratios", type=numbers(float), default=list(RATIOS), help="of link to prefill; 0: the free link"
    )
    parser.add_argument("--only", choices=names, help="one family of engines (default: all)")
    parser.add_argument(
        "--chunk-tokens", type=int, metavar="N", help="of the engine that reads in chunks (default: as shipped)"
    )
    parser.add_argument("--json", type=Path, help="also write all samples to this file")
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="also draw the link's use at ratio 1 in this folder"
    )
    return parser


async def _run(options: argparse.Namespace, folder: Path) -> int:
    if (reason := why_not()) is not None:
        say(f"error: {reason}")
        return 1
    os.environ.update(server_environment())
    preload(*IMPORTED)
    network, group = Network(folder), ServerGroup(folder, forked=True)
    try:
        model = make_model("llama", DEPS / "models")
        async with open_session() as session:
            bench = Bench(options, network, session)
            for number in range(options.rounds):
                for family in options.families:
                    say(f"round {number + 1} of {options.rounds}: {family.name}")
                    engines = Engines(family, network, group, model)
                    try:
                        await engines.start(session)
                        await bench.warm_up(engines)
                        await bench.measure(engines, number)
                        if options.plot is not None and number == 0 and family.is_kvferry:
                            await bench.draw(engines, options.plot)
                    except ServerFailed as problem:
                        if family.is_kvferry:
                            raise
                        # The others' rounds go on without it.
                        bench.failed.append(f"round {number + 1}: {problem}")
                        say(f"  {bench.failed[-1]}")
                    finally:
                        await engines.stop()
            print(bench.table())
            if options.json is not None:
                found = {"prefill_s": bench.prefill_s, "samples": [asdict(sample) for sample in bench.samples]}
                options.json.write_text(json.dumps(found) + "\n")
        return 0
    except ServerFailed as problem:
        say(f"error: {problem}")
        return 1
    finally:
        group.stop()
        network.close()


def main(arguments: list[str]) -> int:
    """The exit status."""
    options = _parser().parse_args(arguments)
    options.families = [family for family in FAMILIES if options.only in (None, family.name)]
    if options.chunk_tokens is not None:
        CHUNKED["chunk_tokens"] = options.chunk_tokens
    folder = make_folder("chaos", "link-")
    say(f"logs: {folder}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return asyncio.run(_run(options, folder))
    except KeyboardInterrupt:
        say("interrupted; all servers are ended")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
