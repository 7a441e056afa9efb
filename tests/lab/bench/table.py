"""What is asked, line by line, and how a line is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from kvferry.bench.figures import Row, number, percentile

from .measure import SHM, TCP, Measurements, Shape


@dataclass(frozen=True)
class Verdict:
    """What came out. `met` is None where there was nothing to compare with. `mooncake` is kvferry's time divided by
    Mooncake's, "not here" where that is not installed, and empty for lines in which it has no part."""

    got: str
    met: bool | None
    mooncake: str = ""


@dataclass(frozen=True)
class Line:
    """A line of the table. `real`: it needs real vLLM servers."""

    name: str
    asked: str
    judge: Callable[[Measurements], Verdict]
    real: bool = False


def _at_most(value: float | None, most: float, text: str | None = None) -> Verdict:
    if value is None:
        return Verdict("not measured", None)
    return Verdict(text or number(value), value <= most)


def _ratio(shape: Shape, most: float) -> Callable[[Measurements], Verdict]:
    def judge(taken: Measurements) -> Verdict:
        one = taken.transfer(shape)
        verdict = _at_most(one["ratio_peer"], most)
        if one["transport"] != "tcp":
            return verdict
        mooncake = one["ratio_mooncake"]
        return replace(verdict, mooncake="not here" if mooncake is None else number(mooncake))

    return judge


def _limit(shapes: list[Shape]) -> Callable[[Measurements], Verdict]:
    def judge(taken: Measurements) -> Verdict:
        rows = [taken.transfer(shape) for shape in shapes]
        parts = [(one["ratio_limit"], one["work"]) for one in rows if one["ratio_limit"] is not None]
        if len(parts) < len(rows):
            return Verdict("not measured", None)
        least, work = min(parts)
        return Verdict(f"{number(least)} ({work})", least >= 0.8)

    return judge


def _cpu(shapes: list[Shape]) -> Callable[[Measurements], Verdict]:
    def judge(taken: Measurements) -> Verdict:
        worst, what = 0.0, ""
        for one in map(taken.transfer, shapes):
            ours, peer = one["cpu_s_per_gb"], one["peer_cpu_s_per_gb"]
            if ours is None or peer is None:
                return Verdict("not measured", None)
            if ours / peer > worst:
                worst, what = ours / peer, f"{one['work']}, {one['transport']}"
        return Verdict(f"{number(worst)} of NIXL's ({what})", worst <= 1)

    return judge


def _caller(transport: str) -> Callable[[Measurements], Verdict]:
    def judge(taken: Measurements) -> Verdict:
        one = taken.caller(transport)
        ours, peer = one["caller_us"], one["peer_caller_us"]
        assert ours is not None
        text = f"{number(ours)} us"
        if peer is None:
            return Verdict(text, None if ours <= 100 else False)
        return Verdict(f"{text}, 1/{number(peer / ours)} of NIXL's", ours <= 100 and ours <= peer / 100)

    return judge


def _notify(transport: str) -> Callable[[Measurements], Verdict]:
    def judge(taken: Measurements) -> Verdict:
        one = taken.notify(transport)
        ours, peer = one["notify_us"], one["peer_notify_us"]
        beside = "" if peer is None else f" (NIXL {number(peer / 1e3)})"
        return _at_most(ours, 1000, None if ours is None else f"{number(ours / 1e3)} ms{beside}")

    return judge


def _behind(transport: str) -> Callable[[Measurements], Verdict]:
    def judge(taken: Measurements) -> Verdict:
        part = taken.behind(transport)["ratio_limit"]
        assert part is not None
        return _at_most(1 / part, 3, f"{number(1 / part)} times")

    return judge


def _listener(taken: Measurements) -> Verdict:
    visits = taken.listener()
    text = f"{visits.rate_of_a_core:,.0f} a second of its core's time, {visits.rate:,.0f} a second by the clock"
    return Verdict(text, visits.rate_of_a_core >= 5000)


def _idle(taken: Measurements) -> Verdict:
    one: Row = taken.idle("tcp")
    ours, peer = one["ours_ms"], one["peer_ms"]
    assert ours is not None
    beside = "" if peer is None else f" (NIXL {number(peer)})"
    # Half of what a clock of 100 ticks a second can tell.
    return Verdict(f"{number(ours)} ms{beside}", ours < 5)


def _vllm(connector: str) -> Callable[[Measurements], Verdict]:
    def judge(taken: Measurements) -> Verdict:
        times = taken.vllm()
        ours = times[connector]
        parts, met = [], True
        for peer, middle, tail in (("stock", 0.5, 0.1), ("stock-quiet", 0.9, 0.9)):
            theirs = times[peer]
            p50, p99 = median(ours) / median(theirs), percentile(ours, 0.99) / percentile(theirs, 0.99)
            parts.append(f"p50 {number(p50)} and p99 {number(p99)} of {peer}'s")
            met = met and p50 <= middle and p99 <= tail
        return Verdict("; ".join(parts), met)

    return judge


LINES = [
    Line("shm-16k: 2,048 blocks of 16 KiB at random, same host", "at most 0.55 of NIXL's", _ratio(SHM[0], 0.55)),
    Line("shm-4k: 8,192 blocks of 4 KiB at random, same host", "at most 0.5", _ratio(SHM[1], 0.5)),
    Line("shm-64k: 2,048 blocks of 64 KiB at random, same host", "at most 0.75", _ratio(SHM[2], 0.75)),
    Line("shm-contiguous: contiguous 32 MiB, same host", "at most 1.05", _ratio(SHM[3], 1.05)),
    Line("shm-limit: any of them", "at least 0.8 of batched copying", _limit(SHM)),
    Line("tcp-16k: 2,048 blocks of 16 KiB at random, TCP", "at most 0.3 of NIXL's", _ratio(TCP[0], 0.3)),
    Line("tcp-4k: 8,192 blocks of 4 KiB at random, TCP", "at most 0.25", _ratio(TCP[1], 0.25)),
    Line("tcp-64k: 2,048 blocks of 64 KiB at random, TCP", "at most 0.2", _ratio(TCP[2], 0.2)),
    Line("tcp-limit: any of them", "at least 0.8 of UCX's 1 MiB messages", _limit(TCP)),
    Line("caller-shm: 262,144 block-layers, same host", "at most 100 us and 1/100 of NIXL's", _caller("shm")),
    Line("caller-tcp: 262,144 block-layers, TCP", "at most 100 us and 1/100 of NIXL's", _caller("tcp")),
    Line("notify-shm: producer knows, consumer polls every 50 ms, same host", "at most 1 ms", _notify("shm")),
    Line("notify-tcp: producer knows, consumer polls every 50 ms, TCP", "at most 1 ms", _notify("tcp")),
    Line("behind-shm: 1 block behind 512 MiB, same host", "at most 3 times its time alone", _behind("shm")),
    Line("behind-tcp: 1 block behind 512 MiB, TCP", "at most 3 times its time alone", _behind("tcp")),
    Line(
        "cold-1: first contact to first byte, 1 rank",
        "at most 0.5 of the stock way",
        lambda taken: _at_most(taken.cold(1)["ratio_peer"], 0.5),
    ),
    Line(
        "cold-64: first contact to first byte, 64 ranks",
        "at most 0.1 of the stock way",
        lambda taken: _at_most(taken.cold(64)["ratio_peer"], 0.1),
    ),
    Line("listener: 1,000 clients at once", "5,000 handshakes a second on one core", _listener),
    Line("idle: 10 s with 100 peers connected", "no processor time", _idle),
    Line("cpu: seconds per GB, both sides", "at most NIXL's", _cpu([*SHM, *TCP])),
    Line(
        "vllm: 200 real requests over TCP",
        "p50 0.5 and p99 0.1 of stock's, 0.9 and 0.9 of stock-quiet's",
        _vllm("kvferry"),
        real=True,
    ),
    Line(
        "vllm-at-once: the same, where the proxy asks both engines at the same time",
        "p50 0.5 and p99 0.1 of stock's, 0.9 and 0.9 of stock-quiet's",
        _vllm("kvferry-at-once"),
        real=True,
    ),
]
