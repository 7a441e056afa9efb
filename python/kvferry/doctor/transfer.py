"""Real transfers between two processes, and whether one may read the other's memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..bench.errors import BenchError
from ..bench.remote import ANSWER_S, Remote
from ..bench.sizes import size_text
from . import system
from .child import left, memory_file
from .findings import Finding, found
from .side import BLOCK_BYTES, Neighbour, Side

ROUNDS = 3
"""The best counts: connections and caches are cold in the first."""
MOST_SAID = 4
"""Lines of UCX that are told of a transfer that failed."""
_NAMES = {
    "copied_bytes": "copied between the processes (process_vm_readv)",
    "device_copied_bytes": "copied by the device (CUDA IPC)",
    "one_sided_bytes": "one-sided (UCX)",
    "served_bytes": "served by messages",
}


class Failure(Exception):
    """A transfer that did not succeed: the error, and what UCX said, a line each."""


def _limit() -> float:
    """How long an answer may take."""
    return min(ANSWER_S, left())


def _move(config: Mapping[str, object], kind: str) -> list[dict[str, Any]]:
    # UCX prints its own reasons, which stand in no error; on a terminal they would stand between the findings.
    with memory_file() as said:
        sides = (config, kind, f"/proc/{os.getpid()}/fd/{said.fileno()}")
        try:
            with (
                Remote("served side", Side, *sides, answer_s=_limit) as served,
                Remote("reading side", Side, *sides, answer_s=_limit) as reading,
            ):
                reading.ask("meet", served.ask("serve"))
                return [reading.ask("read", number) for number in range(ROUNDS)]
        except BenchError as error:
            # The last line of the traceback; an error of kvferry's stands there with its class.
            last = str(error).strip().splitlines()[-1].removeprefix("kvferry._errors.")
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise Failure(last, *dict.fromkeys(lines[-MOST_SAID:])) from None


def _text(rounds: list[dict[str, Any]]) -> list[str]:
    best = min(rounds, key=lambda one: float(one["seconds"]))
    ways = [f"{size_text(best[way])} {name}" for way, name in _NAMES.items() if best[way]]
    speed = best["bytes"] / best["seconds"] / 1e9
    return [
        f"{size_text(best['bytes'])} in blocks of {size_text(BLOCK_BYTES)} at {speed:.2f} GB/s "
        f"(best of {len(rounds)}), every byte compared",
        "; ".join(ways),
        f"lanes: {best['lanes']}",
    ]


def moved(id: str, config: Mapping[str, object], fast: tuple[str, ...], kind: str = "host") -> Finding:
    """The finding `id`: blocks moved between two processes. `fast`: the paths that it should take, any if empty."""
    try:
        rounds = _move(config, kind)
    except Failure as failure:
        return found(id, "failed", failure.args)
    evidence = _text(rounds)
    wrong = sum(one["wrong"] for one in rounds)
    if wrong:
        return found(id, "wrong", [f"{wrong} blocks are wrong", *evidence])
    if fast and not any(rounds[-1][way] for way in fast):
        return found(id, "slow", evidence)
    return found(id, "moved", evidence)


def same_host() -> Finding:
    """True if a process may read one that is not its child."""
    copied, number, right, why = None, 0, False, ""
    try:
        with (
            Remote("read process", Neighbour, answer_s=_limit) as other,
            Remote("reading process", Neighbour, answer_s=_limit) as reader,
        ):
            pid, address = other.ask("place")
            copied, number = reader.ask("read", pid, address)
            right = copied == other.ask("content")
    except BenchError as error:
        # A filter may also end the process that calls what it does not allow.
        why = str(error).strip().splitlines()[-1]
    scope, filtered = system.yama(), system.seccomp()
    facts = [
        f"kernel.yama.ptrace_scope is {scope}" if scope is not None else "no Yama",
        f"seccomp mode {filtered}" if filtered != "0" else "no seccomp filter",
    ]
    if right:
        return found("same-host", "allowed", ["4096 bytes of a sibling process were read and compared", *facts])
    why = why or (os.strerror(number) if copied is None else "the bytes read are not those of the process")
    case = "refused"
    if copied is None and scope not in (None, "0"):
        case = "yama"
    elif copied is None and filtered == "2":
        case = "seccomp"
    return found("same-host", case, [f"process_vm_readv: {why}", *facts])
