"""Engines with a key, and strangers: another key, none, what was captured, what was damaged, and who listens.

Everything that a stranger tries must fail with a cause that says so, engines with the key beside it must go on, and
the wire must show nothing of them. The same wire without a key must show it, so that the capture is one.
"""

from __future__ import annotations

import random
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
from kvferry.cli.key import write_key

from lab.engines.engine import RemoteEngine, Setup, engines
from lab.faults.series import LONG, Options, Requests, Tally, hand_over, settle, setup_of
from lab.network import Network, enter

TRANSPORTS = ("tcp", "shm")
DAMAGED = 200
"""Damaged copies of captured handshakes per round and transport."""

_ETH_P_ALL = 0x0003
_AGAIN = b"KVFS\x01\x05"
"""How a listener's word begins that a request's channel is gone."""


class _Tap:
    """Stands between clients and a listener, and keeps what the clients send, connection by connection."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.to = to
        self.sent: list[bytearray] = []
        self.front = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.front.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.front.accept()
            except OSError:
                return
            server = socket.create_connection(self.to)
            kept = bytearray()
            self.sent.append(kept)
            threading.Thread(target=self._pump, args=(client, server, kept), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, None), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        try:
            while data := source.recv(1 << 16):
                if kept is not None:
                    kept += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        """No further clients."""
        self.front.close()


def _say(to: tuple[str, int], data: bytes, until: bytes | None) -> bytes:
    """Sends bytes as ZMQ would, its greeting first, and gives what comes back: until `until` has come, or, without
    one, until half a second passes in silence or the listener hangs up."""
    back = bytearray()
    with socket.create_connection(to, timeout=LONG) as stream:
        try:
            stream.sendall(data[:64])
            while len(back) < 64:
                more = stream.recv(1 << 16)
                if not more:
                    return bytes(back)
                back += more
            stream.sendall(data[64:])
            if until is None:
                stream.settimeout(0.5)
            while until is None or until not in back:
                more = stream.recv(1 << 16)
                if not more:
                    break
                back += more
        except (TimeoutError, ConnectionError):
            pass
    return bytes(back)


def _secrets(metadata: bytes) -> dict[str, bytes]:
    """What of an engine's metadata nobody else should see, by name."""
    body: dict[str, Any] = msgpack.unpackb(metadata)["body"]
    agent = body["agent"]
    # UCX's own bytes, without the envelope's 12 before and 8 after them.
    found = {"engine": body["engine"].encode(), "worker address": agent["address"][12:-8]}
    for index, region in enumerate(agent["regions"]):
        found[f"rkey {index}"] = region["rkey"][12:-8]
        found[f"base {index}"] = region["base"].to_bytes(8, "big")
    return found


LEASE_MS = 60_000
"""Leases are not what is tried here: none runs out while a process starts on a busy machine."""


def _setup(name: str, transport: str, serves: bool, key: str, **more: Any) -> Setup:
    return setup_of(name, serves, transport, lease_ms=LEASE_MS, key_file=key, blocks=512, block_bytes=8192, **more)


class _Series:
    """What was tried and what came of it."""

    def __init__(self, options: Options) -> None:
        self.random = random.Random(options.seed)
        self.requests = Requests(options.seed, most=16)
        self.tally = Tally()
        self.tried: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.zeros = {
            "let_in": 0,
            "unclear_refusals": 0,
            "learned": 0,
            "listeners_lost": 0,
            "seen_with_a_key": 0,
            "not_seen_without_a_key": 0,
        }

    def count(self, what: str, refused: bool) -> None:
        self.tried[what] = self.tried.get(what, 0) + 1
        self.refused[what] = self.refused.get(what, 0) + refused

    def good(self, producer: RemoteEngine, consumer: RemoteEngine) -> None:
        """A hand-over that must work, every byte of it."""
        before = self.tally.good
        settle(consumer, hand_over(producer, consumer, self.requests.make(2)), self.tally, may_fail=False)
        self.count("right key", False)
        if self.tally.good != before + 2:
            self.tally.bad("unexpected", "a hand-over with the right key did not work")

    def stranger(self, what: str, producer: RemoteEngine, consumer: RemoteEngine, text: str) -> None:
        """A hand-over that must fail in the handshake, by name."""
        waiting = hand_over(producer, consumer, self.requests.make(1))
        deadline = time.monotonic() + LONG
        while waiting and time.monotonic() < deadline:
            for done in consumer.take_done(0.05):
                waiting.discard(done.request)
                self.count(what, done.cause is not None)
                if done.cause is None:
                    self.zeros["let_in"] += 1
                elif done.cause != "handshake_failed" or text not in done.message:
                    self.zeros["unclear_refusals"] += 1
                    self.tally.notes.append(f"{what}: {done.cause}: {done.message}")
        self.tally.zeros["unreported"] += len(waiting)

    def replays(self, what: str, to: tuple[str, int], captures: Sequence[bytes], secrets: dict[str, bytes]) -> None:
        """Captured bytes, sent again: an answer must come that says no, and it must tell nothing."""
        for capture in captures:
            back = _say(to, capture, _AGAIN)
            self.count(what, _AGAIN in back)
            self.zeros["unclear_refusals"] += _AGAIN not in back
            self.zeros["learned"] += any(secret in back for secret in secrets.values())

    def damaged(self, to: tuple[str, int], captures: Sequence[bytes], secrets: dict[str, bytes]) -> None:
        """Captured bytes with one byte changed or the end missing."""
        for _ in range(DAMAGED):
            data = bytearray(self.random.choice(captures))
            # Behind ZMQ's greeting, whose damage ZMQ itself deals with.
            at = self.random.randrange(64, len(data))
            if self.random.random() < 0.7:
                data[at] ^= 1 << self.random.randrange(8)
            else:
                del data[at:]
            try:
                with socket.create_connection(to, timeout=LONG) as stream:
                    stream.sendall(data)
                    stream.shutdown(socket.SHUT_WR)
                    back = bytearray()
                    while more := stream.recv(1 << 16):
                        back += more
            except ConnectionRefusedError:
                self.zeros["listeners_lost"] += 1
                continue
            except (TimeoutError, ConnectionError):
                continue
            finally:
                self.count("damaged capture", False)
            self.zeros["learned"] += any(secret in back for secret in secrets.values())


def _strangers(series: _Series, transport: str, keys: tuple[str, str], round_: int) -> None:
    right, wrong = keys

    def name(role: str) -> str:
        return f"{role}-{transport}-{round_}"

    with engines(
        _setup(name("prefill"), transport, True, right),
        _setup(name("decode"), transport, False, right),
        _setup(name("stranger"), transport, False, wrong),
        _setup(name("keyless"), transport, False, ""),
        _setup(name("open-prefill"), transport, True, ""),
    ) as (producer, consumer, stranger, keyless, open_producer):
        series.good(producer, consumer)
        series.stranger("wrong key", producer, stranger, "different keys")
        series.stranger("no key", producer, keyless, "key_file")
        series.stranger("downgrade", open_producer, consumer, "has no key")
        series.good(producer, consumer)
        # Without any key the engines work as ever.
        series.good(open_producer, keyless)

        secrets = _secrets(producer.ask("rank_metadata")[0, 0])
        to = tuple(producer.ask("address"))
        tap = _Tap(to)
        wanted = series.requests.make(2)
        params = dict(producer.ask("prefill", wanted))
        # A consumer that has not shaken hands yet.
        with engines(_setup(name("fresh"), transport, False, right)) as (fresh,):
            loads = [(n, k, size, {**(params[n] or {}), "remote_port": tap.port}, 0.0) for n, k, size in wanted]
            waiting = {n for n, *_ in wanted} - set(fresh.ask("load", loads))
            settle(fresh, waiting, series.tally, may_fail=False)
        tap.close()
        captures = [bytes(kept) for kept in tap.sent if len(kept) > 100]
        if not captures:
            series.tally.bad("unexpected", "no handshake was captured")
            return
        series.replays("replayed capture", to, captures, secrets)
        series.damaged(to, captures, secrets)
        series.good(producer, consumer)
        producer.ask("restart_listener")
        series.replays("replay after a restart", tuple(producer.ask("address")), captures, secrets)
        series.good(producer, consumer)


class _Wire:
    """All that crosses an interface, from construction to `take`."""

    def __init__(self, netns: str) -> None:
        self.kept = bytearray()
        self.ended = threading.Event()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(netns,), daemon=True)
        self.thread.start()
        if not self.ready.wait(LONG):
            raise OSError(f"no capture in the network namespace {netns}")

    def _run(self, netns: str) -> None:
        enter(netns)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as tap:
            tap.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), 64 << 20)
            tap.bind(("eth0", _ETH_P_ALL))
            tap.settimeout(0.1)
            self.ready.set()
            while not self.ended.is_set():
                try:
                    frame = tap.recv(1 << 17)
                except TimeoutError:
                    continue
                # Ethernet, IPv4, TCP: the data alone, so that what two frames share is in one piece.
                header = 14 + (frame[14] & 15) * 4 if len(frame) > 54 else 0
                if header and frame[12:14] == b"\x08\x00" and frame[23] == socket.IPPROTO_TCP:
                    self.kept += frame[header + (frame[header + 12] >> 4) * 4 :]

    def take(self) -> bytes:
        """Ends it; what was seen."""
        # What was sent last is still in the socket's queue.
        time.sleep(0.3)
        self.ended.set()
        self.thread.join(LONG)
        return bytes(self.kept)


def _seen_on_the_wire(series: _Series, key: str) -> dict[str, bool]:
    """Which of the engines' secrets a hand-over between two hosts shows to who listens between them."""
    with Network() as network:
        places = [{"host": host.address, "netns": host.netns} for host in (network.prefill, network.decode)]
        wire = _Wire(str(network.prefill.netns))
        with engines(
            _setup("seen-prefill", "tcp", True, key, **places[0]),
            _setup("seen-decode", "tcp", False, key, **places[1]),
        ) as (producer, consumer):
            series.good(producer, consumer)
            secrets = _secrets(producer.ask("rank_metadata")[0, 0])
            mine = _secrets(consumer.ask("rank_metadata")[0, 0])
        secrets |= {f"decode {name}": mine[name] for name in ("engine", "worker address")}
        seen = wire.take()
    return {name: secret in seen for name, secret in secrets.items()}


def run(options: Options) -> dict[str, Any]:
    """`options.rounds` times, over TCP and shared memory: strangers of every kind; then the wire."""
    series = _Series(options)
    with tempfile.TemporaryDirectory() as folder:
        right, wrong = Path(folder, "right.key"), Path(folder, "wrong.key")
        write_key(right)
        write_key(wrong)
        for number in range(options.rounds):
            for transport in TRANSPORTS:
                _strangers(series, transport, (str(right), str(wrong)), number)
            options.progress(number + 1, options.rounds)
        clear, sealed = _seen_on_the_wire(series, ""), _seen_on_the_wire(series, str(right))
    series.zeros["not_seen_without_a_key"] = sum(not seen for seen in clear.values())
    series.zeros["seen_with_a_key"] = sum(sealed.values())
    tally = series.tally
    return {
        "zeros": {
            **series.zeros,
            **tally.zeros,
        },
        "tried": series.tried,
        # Damaged captures are not among them: some get no reply at all. What they brought is under "learned".
        "refused": series.refused,
        "good": tally.good,
        "on_the_wire_without_a_key": clear,
        "on_the_wire_with_a_key": sealed,
        "notes": tally.notes,
    }
