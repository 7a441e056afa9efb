"""Two engines, a process per rank, hand over requests through workers and schedulers."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kvferry
import numpy as np
import pytest
from kvferry import Aggregator, Scheduler, Worker
from lab.process import GENEROUS, Remote
from numpy.typing import NDArray
from pair import until

pytestmark = pytest.mark.slow

TP, LAYERS, BLOCKS, TOKENS, HEADS, CONTENT = 2, 3, 20, 4, 2, 32
HEAD = TOKENS * CONTENT
ALL_HEADS = TP * HEADS
"""Of the model; `HEADS` are those of a rank of two."""
GROUPS = [{"kind": "full", "block_size": TOKENS}, {"kind": {"sliding_window": {"window": 6}}, "block_size": TOKENS}]
GROUP_OF = [0, 1, 0]
"""The KV-cache group of each layer."""


def cache_of(tag: int, rank: int, tp: int = TP) -> NDArray[np.uint8]:
    """A rank's cache, [layer, block, head, byte], with bytes that differ by engine, layer, block, head and offset."""
    number = LAYERS * BLOCKS * ALL_HEADS * HEAD
    words = np.arange(number, dtype=np.uint64) * np.uint64(0x9E3779B1) + np.uint64(tag * 1009)
    cut: NDArray[np.uint8] = (words >> np.uint64(9)).astype(np.uint8)
    heads = ALL_HEADS // tp
    whole = cut.reshape(LAYERS, BLOCKS, ALL_HEADS, HEAD)
    return np.ascontiguousarray(whole[:, :, rank * heads : (rank + 1) * heads])


def geometry(rank: int, tp: int) -> dict[str, object]:
    heads = ALL_HEADS // tp
    block = heads * HEAD
    area = {
        "part": "kv",
        "region": 0,
        "num_blocks": BLOCKS,
        "block_stride": block,
        "heads": heads,
        "first_head": rank * heads,
        "total_heads": ALL_HEADS,
        "head_stride": HEAD,
        "tokens": TOKENS,
        "token_stride": CONTENT,
        "content": CONTENT,
    }
    areas = [
        {**area, "layer": f"layer.{layer}", "group": GROUP_OF[layer], "offset": layer * BLOCKS * block}
        for layer in range(LAYERS)
    ]
    return {"groups": GROUPS, "areas": areas}


def config_of(engine: str, rank: int, tp: int = TP, **more: object) -> dict[str, object]:
    return {
        "engine_id": engine,
        "tp_rank": rank,
        "tp_size": tp,
        "transport": "tcp",
        "compat": [["model", "tiny"], ["dtype", "uint8"]],
        **more,
    }


class Rank:
    """One rank: tells every report as soon as there is one."""

    def __init__(self, engine: str, rank: int, tp: int, tag: int, more: dict[str, object]) -> None:
        self.cache, self.events = cache_of(tag, rank, tp), []  # type: ignore[var-annotated]
        self.worker = Worker(config_of(engine, rank, tp, **more))
        assert self.worker.register(self.cache.ctypes.data, self.cache.nbytes) == 0
        self.worker.set_geometry(geometry(rank, tp))
        self.metadata, self.submit, self.stats = self.worker.metadata, self.worker.submit, self.worker.stats
        self.close = self.worker.shutdown

    def turn(self, called: bool) -> float:
        report = self.worker.poll_encoded()
        self.events += [] if report is None else [report]
        return 0.01

    def bytes(self) -> NDArray[np.uint8]:
        return self.cache


class Engine:
    """A scheduler side and the ranks. One that does not serve can only receive."""

    def __init__(
        self, stack: ExitStack, name: str, tag: int, tp: int = TP, serves: bool = True, **more: object
    ) -> None:
        self.tp = tp
        self.ranks = [stack.enter_context(Remote(Rank, name, rank, tp, tag, more)) for rank in range(tp)]
        self.scheduler = stack.enter_context(
            Scheduler({"engine_id": name, "tp_size": tp, "groups": GROUPS, "host": "127.0.0.1", "port": 0})
        )
        self.metadata = {(0, rank): remote.ask("metadata") for rank, remote in enumerate(self.ranks)}
        if serves:
            self.scheduler.serve(self.metadata)
        else:
            self.scheduler.set_engine(self.metadata)
        self.outcomes: list[Any] = []

    def step(self) -> None:
        step = self.scheduler.step()
        for remote in self.ranks:
            remote.tell("submit", step)

    def ask(self, order: str) -> list[Any]:
        """What each rank answers."""
        return [remote.ask(order) for remote in self.ranks]

    def until(self, side: str, request: str) -> None:
        """Takes in reports until every rank is done with the request."""
        deadline = time.monotonic() + GENEROUS
        while not any(request in outcome[side] for outcome in self.outcomes):
            assert time.monotonic() < deadline, f"{request} is not in {side}: {self.outcomes}"
            for remote in self.ranks:
                remote.take(0.02)
                self.outcomes += map(self.scheduler.report, remote.events)
                remote.events.clear()

    def prefilled(self, request: str, blocks: list[list[int]], tokens: int) -> dict[str, Any]:
        keep, params = self.scheduler.finished(request, {"do_remote_decode": True}, "complete", blocks, tokens)
        assert keep
        assert params is not None
        self.step()
        # What a proxy does: the params cross as JSON.
        crossed: dict[str, Any] = json.loads(json.dumps(params))
        return crossed

    def load(self, request: str, params: dict[str, Any], blocks: list[list[int]], tokens: int) -> None:
        self.scheduler.arrived(request, params)
        self.step()
        assert self.scheduler.matched(request, params, tokens, 0) == (tokens, True)
        self.scheduler.allocated(request, params, blocks, tokens, tokens)
        assert self.scheduler.has_pending()
        self.step()
        assert not self.scheduler.has_pending()


# (the producer's blocks, ours, tokens) per request; the second group's window clips what came before.
REQUESTS = {
    "a": ([[3, 4, 5], [0, 6, 7]], [[9, 10, 2], [0, 4, 5]], 12),
    "b": ([[8], [9]], [[15], [16]], 4),
    "c": ([[11, 10, 12, 19], [0, 0, 13, 14]], [[17, 18, 19, 1], [0, 0, 11, 12]], 16),
}


def received(folder: Path) -> list[str]:
    """The requests that the traces in `folder` tell were received, one per rank."""
    lines = [line for file in folder.iterdir() for line in file.read_text().split(",\n")[:-1]]
    events = [json.loads(line.removeprefix("[\n")) for line in lines]
    return sorted(event["name"] for event in events if event.get("args", {}).get("outcome") == "received")


def test_requests_are_handed_over_with_every_byte(tmp_path: Path) -> None:
    # By the former name of `trace`.
    log = tmp_path / "requests.json"
    with ExitStack() as stack:
        prefill, decode = Engine(stack, "prefill", 1), Engine(stack, "decode", 2, request_log=str(log))
        for name, (theirs, ours, tokens) in REQUESTS.items():
            decode.load(f"d-{name}", prefill.prefilled(f"p-{name}", theirs, tokens), ours, tokens)
        for name in REQUESTS:
            decode.until("finished_recving", f"d-{name}")
            prefill.until("finished_sending", f"p-{name}")
        assert not any(outcome["failed_recving"] for outcome in decode.outcomes)
        moved = 0
        for rank, found in enumerate(decode.ask("bytes")):
            expected, source = cache_of(2, rank), cache_of(1, rank)
            for theirs, ours, _ in REQUESTS.values():
                for layer, group in enumerate(GROUP_OF):
                    for here, there in zip(ours[group], theirs[group], strict=True):
                        if here != 0:
                            expected[layer, here] = source[layer, there]
                            moved += HEADS * HEAD
            np.testing.assert_array_equal(found, expected)
        for rank, found in enumerate(prefill.ask("bytes")):
            np.testing.assert_array_equal(found, cache_of(1, rank))
        stats: dict[str, object] = {}
        for outcome in decode.outcomes:
            stats = kvferry.stats.merge(stats, outcome["stats"])
        assert (stats["recvs"], stats["bytes"]) == (len(REQUESTS) * TP, moved)
        totals = [answer["totals"]["bytes"] for answer in decode.ask("stats")]
        assert sum(totals) == moved
        expected_names = sorted(f"d-{name}" for name in REQUESTS for _ in range(TP))
        until("the traces have an end of each", lambda: received(tmp_path) == expected_names)


@pytest.mark.parametrize(("producers", "consumers"), [(2, 1), (1, 2), (4, 2), (1, 4)])
def test_engines_of_different_sizes(producers: int, consumers: int) -> None:
    with ExitStack() as stack:
        prefill = Engine(stack, "prefill", 1, producers)
        decode = Engine(stack, "decode", 2, consumers, serves=False)
        for name, (theirs, ours, tokens) in REQUESTS.items():
            decode.load(f"d-{name}", prefill.prefilled(f"p-{name}", theirs, tokens), ours, tokens)
        for name in REQUESTS:
            decode.until("finished_recving", f"d-{name}")
            # Every rank of the other engine frees its blocks, however many have read from it.
            prefill.until("finished_sending", f"p-{name}")
        assert not any(outcome["failed_recving"] for outcome in decode.outcomes)
        for rank, found in enumerate(decode.ask("bytes")):
            expected, source = cache_of(2, rank, consumers), cache_of(1, rank, consumers)
            for theirs, ours, _ in REQUESTS.values():
                for layer, group in enumerate(GROUP_OF):
                    for here, there in zip(ours[group], theirs[group], strict=True):
                        if here != 0:
                            expected[layer, here] = source[layer, there]
            np.testing.assert_array_equal(found, expected)
        for rank, found in enumerate(prefill.ask("bytes")):
            np.testing.assert_array_equal(found, cache_of(1, rank, producers))


def test_blocks_out_of_range_fail_that_request_with_its_blocks_and_no_other() -> None:
    with ExitStack() as stack:
        prefill, decode = Engine(stack, "prefill", 1), Engine(stack, "decode", 2)
        theirs, ours, tokens = REQUESTS["a"]
        bad = prefill.prefilled("p-bad", theirs, tokens)
        bad["remote_block_ids"][0][1] = BLOCKS + 5
        decode.load("d-bad", bad, ours, tokens)
        decode.until("finished_recving", "d-bad")
        failed = [failure for outcome in decode.outcomes for failure in outcome["failed_recving"]]
        assert [failure["request"] for failure in failed] == ["d-bad"]
        assert failed[0]["cause"] == "invalid_request"
        assert str(BLOCKS + 5) in failed[0]["message"]
        assert failed[0]["invalid_blocks"] == sorted({block for blocks in ours for block in blocks if block != 0})
        theirs, ours, tokens = REQUESTS["b"]
        decode.load("d-good", prefill.prefilled("p-good", theirs, tokens), ours, tokens)
        decode.until("finished_recving", "d-good")
        assert len([failure for outcome in decode.outcomes for failure in outcome["failed_recving"]]) == 1


def test_an_unreachable_head_ends_in_a_failed_receive() -> None:
    with ExitStack() as stack:
        decode = Engine(stack, "decode", 2, handshake_timeout_ms=1500)
        with ExitStack() as other:
            engine = Engine(other, "prefill", 1)
            params = engine.prefilled("p", REQUESTS["b"][0], 4)
        decode.load("d", params, REQUESTS["b"][1], 4)
        decode.until("finished_recving", "d")
        failed = [failure for outcome in decode.outcomes for failure in outcome["failed_recving"]]
        assert [(failure["request"], failure["cause"]) for failure in failed] == [("d", "handshake_failed")]


GOOD: dict[str, object] = {"engine_id": "e", "groups": GROUPS, "host": "127.0.0.1", "port": 0}


def test_params_without_a_key_or_with_a_wrong_one_name_it() -> None:
    with Scheduler(GOOD) as scheduler:
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "p",
            "remote_request_id": "r",
            "remote_host": "127.0.0.1",
            "remote_port": 5000,
            "remote_block_ids": [[1], [2]],
            "remote_num_tokens": 4,
            "remote_lease_ms": 30000,
            "tp_size": 1,
            "pp_size": 1,
            "dcp_size": 1,
            "transfer_mode": "pull",
        }
        scheduler.arrived("fine", params)
        for key in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"):
            with pytest.raises(kvferry.InvalidArgumentError, match=key):
                scheduler.arrived("r", {k: v for k, v in params.items() if k != key})
            with pytest.raises(kvferry.InvalidArgumentError, match=key):
                scheduler.arrived("r", {**params, key: True})
        with pytest.raises(kvferry.InvalidArgumentError, match="remote_port"):
            scheduler.arrived("r", {**params, "remote_port": 70000})
        with pytest.raises(kvferry.InvalidArgumentError, match="request id"):
            scheduler.arrived("", params)
        with pytest.raises(kvferry.InvalidArgumentError, match="outcome"):
            scheduler.finished("r", params, "odd", [[], []], 0)  # type: ignore[arg-type]
        assert scheduler.matched("fine", params, 4, 0) == (4, True)


def test_bad_configs_and_a_taken_port_are_named() -> None:
    bad: list[tuple[dict[str, object], str]] = [
        ({"enginee": 1}, 'unknown key "enginee"; did you mean "engine_id"'),
        ({"engine_id": 7}, 'key "engine_id": invalid type'),
        ({"groups": []}, "groups is empty"),
        ({"groups": [{"kind": "full", "block_size": "x"}]}, r"groups\[0\]"),
        ({"port": 70000}, "port must be a whole number from 0 to 65535, not 70000"),
        ({"lease_ms": 1}, "lease_ms must be .*, not 1"),
        ({"tp_size": 0}, "tp_size must be .*, not 0"),
    ]
    for change, expected in bad:
        with pytest.raises(kvferry.InvalidArgumentError, match=expected):
            Scheduler({**GOOD, **change})
    bad = [({"windo": 1}, "windo"), ({"tp_rank": 5}, "tp_rank is 5"), ({"ucx": 3}, "ucx must be a map")]
    for change, expected in bad:
        with pytest.raises(kvferry.InvalidArgumentError, match=expected):
            Worker({**config_of("e", 0), **change})
    with kvferry.Listener({"engine_id": "e", "host": "127.0.0.1"}) as listener:
        port = listener.address[1]
        with pytest.raises(kvferry.AddressInUseError, match=f"port {port} is in use"):
            kvferry.Listener({"engine_id": "f", "host": "127.0.0.1", "port": port})
        for junk in (b"", b"junk", b"\x81\xa5magic\xa3foo"):
            with pytest.raises(kvferry.CorruptError):
                listener.offer(junk)


def test_metadata_of_wrong_ranks_and_damaged_bytes_are_refused() -> None:
    with ExitStack() as stack:
        engine = Engine(stack, "prefill", 1)
        config = {**GOOD, "engine_id": "prefill", "tp_size": TP}
        with Scheduler(config) as other:
            with pytest.raises(kvferry.InvalidArgumentError, match="missing"):
                other.serve({(0, 0): engine.metadata[0, 0]})
            with pytest.raises(kvferry.KvferryError, match="rank"):
                other.serve({(0, 0): engine.metadata[0, 1], (0, 1): engine.metadata[0, 0]})
            with pytest.raises(kvferry.CorruptError):
                other.serve({(0, 0): engine.metadata[0, 0][:-1], (0, 1): engine.metadata[0, 1]})
        with kvferry.Listener({"engine_id": "prefill", "tp_size": TP, "host": "127.0.0.1"}) as listener:
            assert [listener.offer(blob) for blob in engine.metadata.values()] == [1, 0]
        other_engine = {"engine_id": "other", "tp_size": TP, "host": "127.0.0.1"}
        with kvferry.Listener(other_engine) as listener, pytest.raises(kvferry.IncompatibleError, match="prefill"):
            listener.offer(engine.metadata[0, 0])


def test_a_worker_refuses_regions_that_overlap() -> None:
    cache = np.zeros(8192, dtype=np.uint8)
    with Worker({"engine_id": "e", "transport": "tcp"}) as worker:
        worker.register(cache.ctypes.data, 8192)
        with pytest.raises(kvferry.AlreadyExistsError, match="overlaps region 0"):
            worker.register(cache.ctypes.data + 4096, 8)


def test_steps_and_reports_of_strangers_are_refused() -> None:
    with Worker({"engine_id": "e", "transport": "tcp"}) as worker, Aggregator([(0, 0), (0, 1)]) as aggregator:
        for junk in (b"", b"junk", b"\xc1" * 300):
            with pytest.raises(kvferry.KvferryError):
                worker.submit(junk)
            with pytest.raises(kvferry.KvferryError):
                aggregator.add(junk)
        with pytest.raises(kvferry.NotFoundError, match="geometry"):
            worker.metadata()
        assert worker.poll() is None
        report: kvferry.Report = {
            "rank": {"pp": 0, "tp": 0},
            "finished_sending": ["s"],
            "finished_recving": ["r"],
            "failed_recving": [{"request": "r", "cause": "timeout", "message": "m", "invalid_blocks": [7, 3]}],
            "records": [],
            "stats": {"recvs": 1, "recv_failures": {"timeout": 2}},
        }
        encoded = kvferry.encode_report(report)
        with Scheduler({**GOOD, "tp_size": 2}) as scheduler:
            for junk in (b"", b"junk", b"\xc1" * 300, encoded[:-1]):
                for take in (scheduler.report, scheduler.note):
                    with pytest.raises(kvferry.CorruptError):
                        take(junk)
            with pytest.raises(kvferry.InvalidArgumentError, match=r"pp 3.*engine's 2"):
                scheduler.report(kvferry.encode_report({**report, "rank": {"pp": 3, "tp": 0}}))
            known = scheduler.report(encoded)
            assert (known["finished_sending"], known["failed_recving"]) == ([], [])
            assert known["stats"]["recvs"] == 1
            again = scheduler.report(encoded)
            assert (again["finished_sending"], again["stats"].get("recvs", 0)) == ([], 0)
            second = {**report, "rank": {"pp": 0, "tp": 1}, "finished_sending": [], "failed_recving": []}
            known = scheduler.report(kvferry.merge_reports(kvferry.encode_report(second), encoded))
            assert (known["finished_sending"], known["finished_recving"]) == ([], ["r"])
            (failure,) = known["failed_recving"]
            assert (failure["cause"], failure["message"]) == ("timeout", "rank (pp 0, tp 0): timeout: m")
            assert failure["invalid_blocks"] == [3, 7]
            # What the host knows by itself is told by no outcome any more.
            for _ in range(2):
                scheduler.over("s", "sending")
            late = kvferry.encode_report({**second, "finished_sending": ["s"], "finished_recving": []})  # type: ignore[typeddict-item]
            assert scheduler.report(late)["finished_sending"] == []
            scheduler.note(late)
            scheduler.over("", "sending")
        decoded = kvferry.decode_report(encoded)
        assert decoded["failed_recving"] == report["failed_recving"]
        other = kvferry.encode_report({**report, "rank": {"pp": 0, "tp": 1}, "failed_recving": []})
        aggregator.add(encoded)
        assert aggregator.take()["finished_recving"] == []
        aggregator.add(kvferry.merge_reports(other, encoded))
        outcome = aggregator.take()
        assert (outcome["finished_sending"], outcome["finished_recving"]) == (["s"], ["r"])
        assert [failure["invalid_blocks"] for failure in outcome["failed_recving"]] == [[3, 7]]
        with pytest.raises(kvferry.InvalidArgumentError, match="pp 3"):
            aggregator.add(kvferry.encode_report({**report, "rank": {"pp": 3, "tp": 0}}))
        with pytest.raises(kvferry.InvalidArgumentError, match="cause"):
            kvferry.encode_report({**report, "failed_recving": [{**report["failed_recving"][0], "cause": "odd"}]})
