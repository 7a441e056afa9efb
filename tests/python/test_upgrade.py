"""Engines of this release and of the previous protocol version hand requests over to each other, every byte of them."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kvferry
import numpy as np
import pytest
from commands import ROOT, skip
from kvferry.cli import main
from upgrade_engine import GENEROUS, Remote, cache_of, release

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


def until_over(engine: Remote, side: str, request: str) -> None:
    deadline = time.monotonic() + GENEROUS
    while not engine.is_over(side, request):
        assert time.monotonic() < deadline, f"{request} is not in {side}"
        time.sleep(0.01)


def engines(
    stack: ExitStack, previous: Path, old_produces: bool, shapes: tuple[int, int], lease_ms: int, **worker: object
) -> tuple[Remote, Remote, Any]:
    """A producer and a consumer, one of them old, and where the producer listens."""
    producer = stack.enter_context(release(previous if old_produces else None))
    consumer = stack.enter_context(release(None if old_produces else previous))
    for engine, old in ((producer, old_produces), (consumer, not old_produces)):
        package, library = engine.where()
        assert [Path(part).is_relative_to(previous) for part in (package, library)] == [old, old], (package, library)
    address = producer.start("prefill", 1, shapes[0], lease_ms, {**PATIENT, **worker})
    consumer.start("decode", 2, shapes[1], lease_ms, {**PATIENT, **worker})
    return producer, consumer, address


def check(producer: Remote, consumer: Remote, shapes: tuple[int, int], moved: dict[int, int]) -> None:
    """Every byte of both caches: the consumer's blocks `moved` (from the producer's) and all others."""
    for rank in range(shapes[0]):
        np.testing.assert_array_equal(producer.cache(rank), cache_of(1, rank, shapes[0]))
    for rank in range(shapes[1]):
        expected, source = cache_of(2, rank, shapes[1]), cache_of(1, rank, shapes[1])
        for here, there in moved.items():
            expected[:, here] = source[:, there]
        np.testing.assert_array_equal(consumer.cache(rank), expected)


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
    worker: dict[str, object] = {"transport": transport}
    if keyed:
        worker["key_file"] = str(tmp_path / "key")
        assert main(["key", str(tmp_path / "key")]) == 0
    with ExitStack() as stack:
        lease_ms = SHORT_LEASE_MS if waits else LEASE_MS
        producer, consumer, (host, port) = engines(stack, previous, old_produces, shapes, lease_ms, **worker)
        # Two that are read at once, and one that waits for its blocks.
        held = producer.prefill("p-held", [1, 2, 3])
        since = time.monotonic()
        consumer.arrive("d-held", held)
        consumer.load("d-long", producer.prefill("p-long", list(range(4, 36))), list(range(40, 8, -1)))
        consumer.load("d-one", producer.prefill("p-one", [40]), [1])
        # Asked of both engines at once: the consumer awaits the prefill by its name.
        names = {"remote_engine_id": "prefill", "remote_host": host, "remote_port": port}
        consumer.load("d-name", {"do_remote_prefill": True, "transfer_id": "x-1", **names}, [41, 42])
        # And one whose prefill ends in another way.
        consumer.load("d-gone", {"do_remote_prefill": True, "transfer_id": "x-2", **names}, [43])
        for request in ("d-long", "d-one"):
            until_over(consumer, "finished_recving", request)
        assert not consumer.is_over("finished_recving", "d-name")
        producer.prefill("p-name", [41, 47], transfer_id="x-1")
        producer.abort("p-gone", "x-2")
        for request in ("d-name", "d-gone"):
            until_over(consumer, "finished_recving", request)
        if waits:
            # Without heartbeats that the other side understands, the lease would be over.
            time.sleep(max(0.0, since + 1.5 * lease_ms / 1000 - time.monotonic()))
            assert not producer.is_over("finished_sending", "p-held")
        consumer.load("d-held", held, [44, 45, 46])
        until_over(consumer, "finished_recving", "d-held")
        failures = consumer.failures()
        causes = {request: cause for request, (cause, _) in failures.items()}
        assert causes == {"d-gone": "lease_expired"}, "\n".join(map(str, failures.items()))
        # The producer frees its blocks: it understood what it was told, and its verdicts were understood.
        for request in ("p-held", "p-long", "p-one", "p-name"):
            until_over(producer, "finished_sending", request)
        moved = dict(zip(range(40, 8, -1), range(4, 36), strict=True)) | {1: 40, 41: 41, 42: 47, 44: 1, 45: 2, 46: 3}
        check(producer, consumer, shapes, moved)


def test_each_release_understands_the_others_listener(previous: Path) -> None:
    with ExitStack() as stack:
        producer, consumer, (host, port) = engines(stack, previous, True, (2, 1), LEASE_MS, transport="tcp")
        survey = consumer.survey(host, port)
        assert (survey["protocol"], survey["engine"], len(survey["ranks"])) == (OLD, "prefill", 2)
        assert kvferry.protocol_versions() == (OLD, NEW)
    with ExitStack() as stack:
        producer, consumer, (host, port) = engines(stack, previous, False, (2, 1), LEASE_MS, transport="tcp")
        survey = consumer.survey(host, port)
        assert (survey["protocol"], survey["engine"], len(survey["ranks"])) == (OLD, "prefill", 2)
        own = producer.survey(host, port)
        assert own["protocol"] == NEW


def test_one_engine_of_two_releases_is_refused_by_name(previous: Path) -> None:
    with ExitStack() as stack:
        old, new = (stack.enter_context(release(tree)) for tree in (previous, None))
        for engine in (old, new):
            engine.start("prefill", 1, 1, LEASE_MS, {"transport": "tcp"})
        text = new.refusal(old.metadata())
        assert text.startswith("incompatible: "), text
        assert "rank (pp 0, tp 0) of engine prefill speaks protocol version 4" in text
        assert "need the same kvferry release" in text
        for engine, other, versions in (
            (new, old, ("version 4 arrived", "this build version 5")),
            (old, new, ("version 5 arrived", "version 4")),
        ):
            text = engine.refused_step(other.next_step())
            assert text.startswith("version_mismatch: "), text
            assert all(part in text for part in versions), text
