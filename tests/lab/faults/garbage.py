"""Mutated messages to a listener and to an agent, with normal clients beside: `scripts/chaos garbage`."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import struct
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kvferry
import msgpack

from lab.engines.engine import RemoteEngine, engines
from lab.faults.series import (
    LONG,
    Options,
    Requests,
    Tally,
    grown,
    hand_over,
    resources,
    settle,
    setup_of,
    wait_level,
    wait_unpinned,
)
from lab.faults.zmtp import GREETING, Client, command, frame, ready

CROWD = 10_000
"""Connections that are open at a time."""
PER_CONNECTION = 2000
"""Mutated requests over one connection."""


def _envelope(kind: str, body: object) -> bytes:
    return bytes(msgpack.packb({"magic": "kvferry", "version": 4, "kind": kind, "body": body}))


def _query(number: int, engine: str | None = "prefill", ranks: list[dict[str, int]] | None = None) -> bytes:
    return _envelope("handshake_request", {"query": {"id": number, "engine": engine, "ranks": ranks or []}})


@dataclass
class _Dice:
    random: random.Random
    old: list[bytes] = field(default_factory=list)

    def mutated(self, message: bytes) -> bytes:
        """A message with something changed, or an old one again."""
        dice = self.random
        if self.old and dice.random() < 0.1:
            return dice.choice(self.old)
        data = bytearray(message)
        for _ in range(dice.randint(1, 4)):
            what = dice.randrange(9)
            at = dice.randrange(len(data)) if data else 0
            if what <= 2 and data:
                data[at] ^= 1 << dice.randrange(8)
            elif what == 3 and data:
                data[at] = dice.choice(b"\x00\x7f\x80\x90\xc0\xc1\xc6\xcf\xdb\xdd\xdf\xff")
            elif what == 4:
                del data[at:]
            elif what == 5:
                data[at:at] = dice.randbytes(dice.randint(1, 40))
            elif what == 6:
                # Deeply nested, and lengths that promise more than there is.
                many = (b"\x91" * 500, b"\x81" * 64, b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff")
                data[at:at] = dice.choice(many)
            elif what == 7 and len(data) > 8:
                data += data[at : at + 8]
            elif dice.random() < 0.01:
                data += bytes(dice.choice((1 << 16, 1 << 18, 1 << 20)))
        if len(self.old) < 64:
            self.old.append(bytes(data))
        return bytes(data)


class _Attack(threading.Thread):
    """Something that goes on in the background; what it raised is raised by `end`."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        super().__init__(daemon=True)
        self.work, self.arguments = work, arguments
        self.result: Any = None
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self.work(*self.arguments)
        except Exception as problem:
            self.problem = problem

    def end(self) -> Any:
        """Its result."""
        self.join()
        if self.problem is not None:
            raise self.problem
        return self.result


def _requests_over_zmq(address: tuple[str, int], count: int, seed: int) -> dict[str, int]:
    """Well-framed messages with wrong contents."""
    dice = _Dice(random.Random(seed))
    push = {"push": {"id": 1, "expected": 1, "metadata": b"metadata" * 20}}
    valid = [
        _query(1),
        _query(2, None, [{"pp": 0, "tp": 0}]),
        _query(3, "other"),
        _query(4, "prefill", [{"pp": 0, "tp": n} for n in range(300)]),
        _envelope("handshake_request", push),
        _envelope("handshake_request", {"await": {"id": 5, "engine": "prefill", "requests": ["x-1", "x-2"]}}),
        _envelope("handshake_reply", {"refused": {"id": 1, "code": "version", "message": "x"}}),
    ]
    sent = cut = 0
    while sent < count:
        with suppress(OSError):
            client = Client(address, 30)
            try:
                for _ in range(min(PER_CONNECTION, count - sent) // 20 + 1):
                    parts = []
                    for _ in range(min(20, count - sent)):
                        body = dice.mutated(dice.random.choice(valid))
                        many = dice.random.random() < 0.05
                        parts.append(frame(b"", True) + frame(body, True) * dice.random.randrange(8) if many else b"")
                        parts.append(frame(body))
                        sent += 1
                    client.socket.sendall(b"".join(parts))
                    client.drain()
            except OSError:
                cut += 1
            finally:
                client.close()
    return {"sent": sent, "cut_off": cut}


def _raw_bytes(address: tuple[str, int], count: int, seed: int) -> dict[str, int]:
    """Broken greetings, commands and frames, each over a connection of its own."""
    dice = _Dice(random.Random(seed))
    valid = [
        GREETING + ready() + frame(_query(1)),
        GREETING + ready(b"REQ") + frame(b"", True) + frame(_query(2)),
        GREETING + ready(b"PUB") + frame(_query(2)),
        GREETING + ready() + command(b"PING", b"\0\x64abc") + command(b"ERROR", b"\x03why"),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        GREETING + ready() + b"\x02\x7f" + b"\xff" * 7,
        GREETING[:30],
    ]
    linger = struct.pack("ii", 1, 0)
    sent = failed = 0
    slow: list[socket.socket] = []
    while sent < count:
        sent += 1
        connection = socket.socket()
        connection.settimeout(30)
        try:
            connection.bind((f"127.0.0.{2 + sent % 200}", 0))
            connection.connect(address)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.sendall(dice.mutated(dice.random.choice(valid)))
        except OSError:
            failed += 1
        # Some stay open and say nothing more.
        slow.append(connection)
        if len(slow) > 200:
            slow.pop(0).close()
    for connection in slow:
        connection.close()
    return {"sent": sent, "cut_off": failed}


def _sender(metadata: Path, count: int, seed: int) -> dict[str, int]:
    program = Path("target/debug/examples/garbage_sender")
    limit = 600 + count / 100
    arguments = [str(program), str(metadata), str(count), str(seed)]
    environment = {**os.environ, "KVFERRY_UCX_LIB": str(kvferry.ucx_info()["path"])}
    out = subprocess.run(arguments, stdout=subprocess.PIPE, check=True, text=True, timeout=limit, env=environment)
    # UCX may have said something before.
    found: dict[str, int] = json.loads(out.stdout.splitlines()[-1])
    return found


def _crowd(address: tuple[str, int], stop: threading.Event, up: threading.Event) -> dict[str, int]:
    """Opens as many connections as there may be, keeps them open until `stop`, and opens those anew that are closed."""
    held: list[socket.socket] = []
    opened = failed = most = 0
    hello = GREETING + ready()
    try:
        while not stop.is_set():
            if len(held) >= CROWD:
                up.set()
                stop.wait(1)
                continue
            connection = socket.socket()
            connection.settimeout(10)
            try:
                connection.bind((f"127.0.0.{2 + opened % 200}", 0))
                connection.connect(address)
                # Most become ZMQ clients that never ask, the others say nothing at all.
                if opened % 3:
                    connection.sendall(hello)
                held.append(connection)
                opened += 1
                most = max(most, len(held))
            except OSError:
                connection.close()
                failed += 1
                if failed > CROWD:
                    break
    finally:
        up.set()
        for connection in held:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    return {"opened": opened, "open_at_once": most, "failed": failed}


@dataclass
class _Beside:
    """The normal clients: one asks the listener, each time over a new connection, and a pair of engines works."""

    address: tuple[str, int]
    producer: RemoteEngine
    consumer: RemoteEngine
    requests: Requests
    tally: Tally = field(default_factory=Tally)
    answers: int = 0
    unanswered: int = 0
    wrong: int = 0
    worst: float = 0.0
    expected: bytes | None = None

    def turn(self) -> None:
        """One question to the listener, and some requests through the engines."""
        begin = time.monotonic()
        reply = b""
        while not reply and time.monotonic() < begin + LONG:
            # A client asks again, as ours does, if the connection is closed.
            with suppress(OSError):
                client = Client(self.address, 10)
                try:
                    reply = client.ask(_query(7))
                finally:
                    client.close()
        self.worst = max(self.worst, time.monotonic() - begin)
        self.expected = self.expected or reply
        if not reply:
            self.unanswered += 1
        elif reply != self.expected:
            self.wrong += 1
        else:
            self.answers += 1
        settle(
            self.consumer, hand_over(self.producer, self.consumer, self.requests.make(8)), self.tally, may_fail=False
        )

    def until(self, attacks: list[_Attack]) -> None:
        """Turns as long as one of the attacks goes on, and at least three."""
        turns = 0
        while turns < 3 or any(attack.is_alive() for attack in attacks):
            self.turn()
            turns += 1


def run(options: Options) -> dict[str, Any]:
    """Half of `rounds` messages to a listener (a tenth of those as raw bytes), half to an agent; then the crowd.

    All that is done in two halves, and the level after the second is held against the one after the first: what a crowd
    of ten thousand needs at once, and what the allocator keeps of it, is no leak, and a leak would go on in the second.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    subprocess.run(
        ["cargo", "build", "--quiet", "--locked", "--features", "fuzzing", "--example", "garbage_sender"], check=True
    )
    setup = setup_of("decode", False, lease_ms=30_000)
    rounds, seed = options.rounds, options.seed
    with engines(replace(setup, name="prefill", serves=True), setup) as (producer, consumer):
        listener, agent_metadata = _where(producer)
        beside = _Beside(listener, producer, consumer, Requests(seed))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "metadata"
            file.write_bytes(agent_metadata)
            halves: list[dict[str, Any]] = []
            levels: list[dict[str, int]] = []
            for part in (0, 1):
                begin = time.monotonic()
                sent = _assault(beside, file, (rounds + part) // 2, seed + 1000 * part)
                seconds = time.monotonic() - begin
                crowd = _crowded(beside)
                _quiet(producer, beside.tally)
                levels.append(resources(producer))
                halves.append({"attack": sent, "seconds": round(seconds, 1), "crowd": crowd, **levels[-1]})
        after, over = wait_level(producer, levels[0])
        stats = producer.ask("state")["agent"]
        dead = sum(engine.child.poll() is not None for engine in (producer, consumer))
    tally = beside.tally
    return {
        "zeros": {
            "dead": dead,
            **tally.zeros,
            "unanswered": beside.unanswered,
            "wrong_answers": beside.wrong,
            "grown": sum(over.values()),
            "not_sent": rounds - sum(half["attack"][part]["sent"] for half in halves for part in half["attack"]),
        },
        "halves": halves,
        "beside": {
            "listener_answers": beside.answers,
            "worst_answer_ms": round(beside.worst * 1e3, 1),
            "requests_good": tally.good,
            "worst_request_ms": round(max(tally.seconds) * 1e3, 1),
        },
        "agent": {key: stats[key] for key in ("messages_received", "messages_dropped", "peers_lost", "peers")},
        "after": after,
        "over": grown(levels[0], after),
        "notes": tally.notes,
    }


def _where(producer: RemoteEngine) -> tuple[tuple[str, int], bytes]:
    """The listener's address, and the agent's metadata as a message of its own."""
    [(_, params)] = producer.ask("prefill", [("where", 0, 1)])
    address = (params["remote_host"], params["remote_port"])
    client = Client(address, 30)
    reply = msgpack.unpackb(client.ask(_query(1)))
    client.close()
    rank = msgpack.unpackb(reply["body"]["ranks"]["ranks"][0]["metadata"])
    return address, _envelope("agent_metadata", rank["body"]["agent"])


def _assault(beside: _Beside, metadata: Path, rounds: int, seed: int) -> dict[str, Any]:
    to_agent = rounds // 2
    raw = (rounds - to_agent) // 10
    attacks = {
        "listener": _Attack(_requests_over_zmq, beside.address, rounds - to_agent - raw, seed),
        "raw": _Attack(_raw_bytes, beside.address, raw, seed + 1),
        "agent": _Attack(_sender, metadata, to_agent, seed + 2),
    }
    for attack in attacks.values():
        attack.start()
    beside.until(list(attacks.values()))
    return {name: attack.end() for name, attack in attacks.items()}


def _crowded(beside: _Beside) -> dict[str, Any]:
    stop, up = threading.Event(), threading.Event()
    crowd = _Attack(_crowd, beside.address, stop, up)
    crowd.start()
    answers = beside.answers
    while not up.is_set():
        beside.turn()
    for _ in range(50):
        beside.turn()
    stop.set()
    return {**crowd.end(), "answers_beside": beside.answers - answers}


def _quiet(producer: RemoteEngine, tally: Tally) -> None:
    """Until what was sent is dealt with and what is remembered for a while is forgotten."""
    time.sleep(12)
    wait_unpinned(producer, tally, LONG)
