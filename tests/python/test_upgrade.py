"""Engines of this release and of the previous protocol version hand requests over to each other, every byte of them."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kvferry
import pytest
from commands import ROOT, skip
from kvferry.cli import main
from lab.engines.engine import Done, RemoteEngine, Setup
from upgrade_engine import GENEROUS, release

pytestmark = pytest.mark.slow

OLD, NEW = 4, 5
SHORT_LEASE_MS, LEASE_MS = 15_000, 100_000
PATIENT = {"handshake_timeout_ms": 100_000}


@pytest.fixture(scope="module")
def previous() -> Path:
    """The folder of the previous release, built if it is not there yet."""
    done = subprocess.run([ROOT / "scripts/build-previous"], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        skip("history", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def setup(name: str, tp: int, transport: str, lease_ms: int = LEASE_MS, key: str | None = None) -> Setup:
    shape = {"tp": tp, "heads": 2, "blocks": 48, "block_bytes": 65_536, "scattered": True}
    return Setup(name, True, transport, lease_ms=lease_ms, key_file=key, worker=PATIENT, **shape)  # type: ignore[arg-type]


def engines(
    stack: ExitStack, previous: Path, old_produces: bool, shapes: tuple[int, int], transport: str, **more: Any
) -> tuple[RemoteEngine, RemoteEngine]:
    """A producer and a consumer, one of them old."""
    producer = release(stack, previous if old_produces else None, setup("prefill", shapes[0], transport, **more))
    consumer = release(stack, None if old_produces else previous, setup("decode", shapes[1], transport, **more))
    for engine, old in ((producer, old_produces), (consumer, not old_produces)):
        package, library = engine.ask("where")
        assert [Path(part).is_relative_to(previous) for part in (package, library)] == [old, old], (package, library)
    return producer, consumer


def load(consumer: RemoteEngine, wanted: list[tuple[str, int, int]], params: dict[str, Any]) -> None:
    loads = [(name, key, count, params[name], 0.0) for name, key, count in wanted]
    assert consumer.ask("load", loads) == []


def until_done(consumer: RemoteEngine, names: set[str]) -> dict[str, Done]:
    """How the loads ended, when these have, and no others."""
    deadline, found = time.monotonic() + GENEROUS, {}
    while set(found) != names:
        assert time.monotonic() < deadline, f"{names} are not over, but {found}"
        found.update({done.request: done for done in consumer.take_done(0.1)})
    return found


@pytest.mark.parametrize("old_produces", [True, False], ids=["old_to_new", "new_to_old"])
@pytest.mark.parametrize(
    ("transport", "keyed", "shapes", "waits"),
    [
        ("tcp", False, (2, 1), True),
        ("tcp", True, (1, 2), False),
        ("auto", False, (1, 1), False),
        ("auto", True, (2, 2), False),
    ],
    ids=["tcp", "tcp-key", "host", "host-key"],
)
def test_requests_are_handed_over_between_neighbouring_versions(
    previous: Path,
    tmp_path: Path,
    old_produces: bool,
    transport: str,
    keyed: bool,
    shapes: tuple[int, int],
    waits: bool,
) -> None:
    """`waits`: a request waits for its blocks for longer than the lease lasts."""
    key = ""
    if keyed:
        key = str(tmp_path / "key")
        assert main(["key", key]) == 0
    with ExitStack() as stack:
        lease_ms = SHORT_LEASE_MS if waits else LEASE_MS
        producer, consumer = engines(stack, previous, old_produces, shapes, transport, lease_ms=lease_ms, key=key)
        # Two that are read at once, and one that waits for its blocks.
        params = dict(producer.ask("prefill", [("held", 1, 3), ("long", 2, 32), ("one", 3, 1)]))
        since = time.monotonic()
        assert consumer.ask("arrive", "held", 3, params["held"])
        load(consumer, [("long", 2, 32), ("one", 3, 1)], params)
        # Asked of both engines at once: the consumer awaits the prefill by its name. And one that ends in another way.
        params |= {name: producer.ask("awaited", name) for name in ("name", "gone")}
        load(consumer, [("name", 4, 2), ("gone", 5, 1)], params)
        ends = until_done(consumer, {"long", "one"})
        producer.ask("prefill", [("name", 4, 2)], awaited=True)
        producer.ask("abort", "gone")
        ends |= until_done(consumer, {"name", "gone"})
        freed: set[str] = set()
        if waits:
            # Without heartbeats that the other side understands, the lease would be over.
            time.sleep(max(0.0, since + 1.5 * lease_ms / 1000 - time.monotonic()))
            freed = {name for name, _ in producer.ask("state")["freed"]}
            assert "held" not in freed
        load(consumer, [("held", 1, 3)], params)
        ends |= until_done(consumer, {"held"})
        causes = {name: done.cause for name, done in ends.items() if done.cause is not None}
        assert causes == {"gone": "lease_expired"}, ends
        # Every byte, of all ranks; and those of blocks that nobody asked for.
        assert not any(done.wrong_bytes for name, done in ends.items() if name != "gone"), ends
        assert consumer.ask("strays") == 0
        # The producer frees its blocks: it understood what it was told, and its verdicts were understood.
        deadline = time.monotonic() + GENEROUS
        while freed != {"held", "long", "one", "name"}:
            assert time.monotonic() < deadline, freed
            freed |= {name for name, _ in producer.ask("state")["freed"]}
            time.sleep(0.01)


def test_each_release_understands_the_others_listener(previous: Path) -> None:
    for old_produces in (True, False):
        with ExitStack() as stack:
            producer, consumer = engines(stack, previous, old_produces, (2, 1), "tcp")
            survey = consumer.ask("survey", *producer.ask("address"))
            assert (survey["protocol"], survey["engine"], len(survey["ranks"])) == (OLD, "prefill", 2)
            if not old_produces:
                assert producer.ask("survey", *producer.ask("address"))["protocol"] == NEW
    assert kvferry.protocol_versions() == (OLD, NEW)


def test_one_engine_of_two_releases_is_refused_by_name(previous: Path) -> None:
    with ExitStack() as stack:
        old, new = (release(stack, tree, setup("prefill", 1, "tcp")) for tree in (previous, None))
        text = new.ask("refusal", old.ask("rank_metadata"))
        assert text.startswith("incompatible: "), text
        assert "rank (pp 0, tp 0) of engine prefill speaks protocol version 4" in text
        assert "need the same kvferry release" in text
        for engine, other, versions in (
            (new, old, ("version 4 arrived", "this build version 5")),
            (old, new, ("version 5 arrived", "version 4")),
        ):
            text = engine.ask("refused_step", other.ask("next_step"))
            assert text.startswith("version_mismatch: "), text
            assert all(part in text for part in versions), text
