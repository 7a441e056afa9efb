"""The prompts of a run: lengths, shared prefixes, and what is sent together with what."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from lab.servers.client import FIRST_TOKEN, Prompt
from lab.servers.model import VOCAB

SHORTEST = 100
LONGEST = 1500
# The aborted requests ask for more than they will read.
ABORT_OUTPUT_TOKENS = 300
# Lengths that a block boundary may fall on, one token before it, or one after it, spread over the range.
_LENGTHS = (100, 1500, 512, 777, 256, 1025, 333, 1279, 160, 640, 1408, 901)


@dataclass(frozen=True)
class Workload:
    """Everything that one run sends."""

    # Each wave is sent at once and waited for before the next.
    waves: tuple[tuple[Prompt, ...], ...]
    # Two prompts of equal length for the negative control: each is decoded with the other's KV blocks.
    control: tuple[Prompt, Prompt]
    # Pairs that differ in their first token only: a single server must answer them differently.
    probes: tuple[tuple[Prompt, Prompt], ...]
    # For engines that must not get their first request cold.
    warm_up: Prompt = field(default=Prompt("warm-up", ()))

    @property
    def checked(self) -> list[Prompt]:
        """The prompts whose output counts, in the order of sending."""
        return [prompt for wave in self.waves for prompt in wave if prompt.abort is None]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(count))


def _other(token: int) -> int:
    return token + 1 if token + 1 < VOCAB else FIRST_TOKEN


def make_workload(count: int, seed: int = 7) -> Workload:
    """`count` prompts in waves, plus the aborted ones, the control and the probes; the same for the same arguments.

    The first wave is one prompt, which meets both engines cold. After that come single prompts and waves of up to
    four. Every third prompt continues the beginning of an earlier one.
    """
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for index in range(count):
        length = _LENGTHS[index % len(_LENGTHS)]
        if index >= len(_LENGTHS):
            length = rng.randrange(SHORTEST, LONGEST + 1)
        base = prompts[rng.randrange(len(prompts))] if index % 3 == 2 else None
        shared = 0
        tokens = _tokens(rng, length)
        if base is not None:
            shared = min(len(base.tokens), length) * 2 // 3
            tokens = (*base.tokens[:shared], _other(base.tokens[shared]), *tokens[shared + 1 :])
        prompts.append(Prompt(f"p{index:02}", tokens, shared=shared))

    waves: list[tuple[Prompt, ...]] = []
    rest = list(prompts)
    sizes = [1, 1, 4, 2, 4]
    while rest:
        size = sizes[min(len(waves), len(sizes) - 1)]
        waves.append(tuple(rest[:size]))
        rest = rest[size:]
    in_decode = Prompt("abort-decode", _tokens(rng, 1200), max_tokens=ABORT_OUTPUT_TOKENS, abort="decode")
    in_load = Prompt("abort-load", _tokens(rng, 1500), max_tokens=ABORT_OUTPUT_TOKENS, abort="load")
    place = min(2, len(waves) - 1)
    waves[place] = (in_decode, *waves[place])
    place = min(3, len(waves) - 1)
    waves[place] = (in_load, *waves[place])

    control = (Prompt("control-a", _tokens(rng, 700)), Prompt("control-b", _tokens(rng, 700)))
    probes = []
    for number, length in enumerate((SHORTEST, 600, LONGEST)):
        tokens = _tokens(rng, length)
        changed = (_other(tokens[0]), *tokens[1:])
        probes.append((Prompt(f"probe-{number}a", tokens), Prompt(f"probe-{number}b", changed)))
    return Workload(
        waves=tuple(waves),
        control=control,
        probes=tuple(probes),
        warm_up=Prompt("warm-up", _tokens(rng, 50), max_tokens=4),
    )
