"""A running engine, asked through its handshake listener."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..bench.sizes import size_text
from .child import ChildError, call, left
from .findings import Finding, found

ANSWER_S = 10.0
"""How long the listener may take, if that much time is left."""
HOLDER_S = 3.0
"""The same for what has this engine's own port."""
CONNECT_S = 15.0
"""The same for listener and ranks together; an agent gives a connection up after ten seconds."""
ENDING_S = 1.0
"""Kept back for the process that asks to start and end in."""
MOST_RANKS = 64
"""Ranks that are named one by one."""
_CASES = {
    "unreachable": "unreachable",
    "timeout": "silent",
    "incompatible": "key",
    "version_mismatch": "version",
    "corrupt": "foreign",
    "died": "silent",
}
_FAST = ("copied", "one-sided")


@dataclass(frozen=True)
class Asked:
    """Which listener to ask. `own` describes the side that asks, as
    `kvf_handshake_survey` takes it; `connects` is whether to connect to the ranks' agents."""

    host: str
    port: int
    own: Mapping[str, Any] | None = None
    connects: bool = True


@dataclass
class Answer:
    """The findings about a peer, and what it said."""

    findings: list[Finding]
    survey: dict[str, Any] | None


def findings(asked: Asked, agent: Mapping[str, Any], is_loaded: bool, can_connect: bool) -> Answer:
    """Asks the listener. `agent` is the configuration of an agent to connect with."""
    if not is_loaded:
        return Answer([found(id, "unknown") for id in ("peer", "peer-shape", "peer-path")], None)
    room = max(left() - ENDING_S, 0.1)
    config: dict[str, object] = {"timeout_ms": round(min(ANSWER_S, room) * 1e3)}
    if asked.own is not None:
        config["own"] = dict(asked.own)
    if "key_file" in agent:
        config["key_file"] = agent["key_file"]
    where = f"{asked.host} port {asked.port}"
    try:
        own_agent = dict(agent) if asked.connects and can_connect else None
        told = call("survey", asked.host, asked.port, config, own_agent, min(CONNECT_S, room))
    except ChildError as error:
        told = {"error": "died", "message": str(error)}
    if "error" in told:
        case = _CASES.get(told["error"], "refused")
        # Another engine in place of the one that listens, for instance, is incompatible too.
        if case == "key" and "key" not in told["message"]:
            case = "refused"
        first = found("peer", case, [where, told["message"]])
        return Answer([first, found("peer-shape", "unknown"), found("peer-path", "unknown")], None)
    survey = told["survey"]
    return Answer([_answered(where, survey), _shape(survey), _path(asked, survey, told.get("routes"))], survey)


def listening(host: str, port: int, agent: Mapping[str, Any]) -> str | None:
    """Which engine's handshake listener has the port, in words; None if something else has it or nothing answers."""
    config: dict[str, object] = {"timeout_ms": round(max(min(HOLDER_S, left() - ENDING_S), 0.1) * 1e3)}
    if "key_file" in agent:
        config["key_file"] = agent["key_file"]
    try:
        told = call("survey", host, port, config, None)
    except ChildError:
        return None
    if "error" not in told:
        return f"engine {told['survey']['engine']} listens at {host} port {port}"
    # A listener whose ranks have not reported yet, or with another key, is an engine's too.
    starting = "have not reported yet" in told["message"]
    if not starting and told["error"] not in ("incompatible", "version_mismatch"):
        return None
    return f"an engine's listener has {host} port {port}: {told['message']}"


def _answered(where: str, survey: Mapping[str, Any]) -> Finding:
    shape = survey["shape"]
    ranks = survey["ranks"]
    lines = [
        f"engine {survey['engine']} at {where}, incarnation {survey['incarnation']}, protocol version "
        f"{survey['protocol']}",
        f"tp {shape['tp']} x pp {shape['pp']} x dcp {shape['dcp']}: {_count(len(ranks), 'rank')}",
    ]
    lines += [
        f"{_rank(rank)}: layers {_ranges(rank['layers'])}, heads {_ranges(rank['heads'])}, "
        f"{'+'.join(map(str, rank['blocks']))} blocks, {size_text(rank['bytes'])} in "
        f"{_count(rank['regions'], 'region')} ({', '.join(rank['memory'])}), UCX {rank['ucx_version']}"
        for rank in ranks[:MOST_RANKS]
    ]
    return found("peer", "answered", lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _rank(rank: Mapping[str, Any]) -> str:
    return f"pp {rank['rank']['pp']} tp {rank['rank']['tp']}"


def _ranges(ranges: list[list[int]]) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) or "-"


def _shape(survey: Mapping[str, Any]) -> Finding:
    lines, wrong = [], []
    for field in survey["fields"]:
        if field["fits"] is None:
            lines.append(f"{field['name']}: {field['there']}")
            continue
        verdict = "fits" if field["fits"] else f"differs; {field['remedy']}"
        may = "" if field["must_match"] else " (may differ)"
        lines.append(f"{field['name']}: {field['here']} here, {field['there']} there: {verdict}{may}")
        if not field["fits"]:
            wrong.append(field["name"])
    if wrong:
        return found("peer-shape", "differs", lines, names=", ".join(wrong))
    compared = any(field["fits"] is not None for field in survey["fields"])
    return found("peer-shape", "fits" if compared else "described", lines)


def _path(asked: Asked, survey: Mapping[str, Any], routes: Mapping[str, Any] | None) -> Finding:
    if routes is None:
        return found("peer-path", "unknown" if asked.connects else "skipped")
    if "error" in routes:
        return found("peer-path", "unconnected", [routes["message"]])
    lines, failed, paths = [], False, set()
    for rank, route in zip(survey["ranks"], routes["ranks"], strict=True):
        if "error" in route:
            failed = True
            lines.append(f"{_rank(rank)}: {route['message']}")
            continue
        kind = "device" if any(memory.startswith("cuda") for memory in rank["memory"]) else "host"
        paths.add(route[kind])
        lines.append(f"{_rank(rank)}: {kind} memory {route[kind]}, lanes {route['lanes']}")
    if failed:
        return found("peer-path", "unconnected", lines)
    if all(path.startswith(_FAST) for path in paths):
        return found("peer-path", "fast", lines)
    # Of an engine on several hosts, those ranks that are here would be fast.
    served = not any(path.startswith(_FAST) for path in paths)
    return found("peer-path", "slow" if served and _is_here(asked.host) else "served", lines)


def _is_here(host: str) -> bool:
    """True if `host` is an address of this machine. Names are resolved elsewhere: that may take long."""
    try:
        return bool(call("is_here", host, limit_s=left() / 2))
    except ChildError:
        return False
