"""What an agent counts of each peer, and the file that shows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kvferry
import numpy as np
import pytest
from kvferry import Agent, Segment, nixl, stats
from kvferry.doctor import side, transfer
from lab.process import GENEROUS
from pair import until
from prometheus_client.parser import text_string_to_metric_families

BLOCK, BLOCKS = 4096, 256
WHOLE = Segment(0, 0, 0, 0, 0, BLOCK, BLOCK, BLOCK)
PATHS = ("copied_bytes", "device_copied_bytes", "one_sided_bytes", "served_bytes")


def of(agent: Agent, name: str) -> dict[str, Any]:
    (found,) = (peer for peer in agent.peers() if peer["name"] == name)
    return found


def cache() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros(BLOCK * BLOCKS, dtype=np.uint8)


def test_every_path_is_named_where_people_read_of_paths() -> None:
    paths = tuple(one.key for one in stats.metrics() if one.scope == "peer" and one.key.endswith("_bytes"))
    assert paths == PATHS == side._PATHS == tuple(transfer._NAMES) == tuple(f"{way}_bytes" for way in nixl._WAYS)


@pytest.mark.parametrize(("transport", "paths"), [("shm", PATHS[:1]), ("tcp", PATHS[3:])])
def test_bytes_count_per_peer_and_path(transport: str, paths: tuple[str, ...]) -> None:
    numbers = list(range(BLOCKS))
    configs = [{"name": name, "transport": transport} for name in ("reader", "b", "c")]
    with Agent(configs[0]) as reader, Agent(configs[1]) as b, Agent(configs[2]) as c:
        for agent in (reader, b, c):
            agent.register(cache())
        peers = {"b": reader.connect(b.metadata()), "c": reader.connect(c.metadata())}
        reader.read(peers["b"], [WHOLE], [(numbers, numbers)]).wait(GENEROUS)
        reader.read(peers["b"], [WHOLE], [([1], [2])]).wait(GENEROUS)
        reader.write(peers["c"], [WHOLE], [([1, 5], [2, 9])]).wait(GENEROUS)
        for name, read, written, done in (("b", BLOCKS + 1, 0, 2), ("c", 0, 2, 1)):
            found = of(reader, name)
            assert found["connected"] == 1
            assert "tcp/" in found["lanes"]
            assert found["host"] == reader.route(peers[name]).host  # type: ignore[union-attr]
            assert (found["bytes_read"], found["bytes_written"]) == (read * BLOCK, written * BLOCK)
            assert (found["transfers_done"], found["transfers_failed"]) == (done, 0)
            assert sum(found[path] for path in paths) == (read + written) * BLOCK
        totals = reader.stats()
        for key in (*PATHS, "bytes_read", "bytes_written", "transfers_done", "transfers_failed"):
            assert totals[key] == sum(peer[key] for peer in reader.peers()), key  # type: ignore[misc]
        # The side that is read from has started nothing.
        assert of(b, "reader")["bytes_read"] == of(b, "reader")["transfers_done"] == 0


def test_the_figures_of_a_lost_peer_stay_and_go_on_under_its_name() -> None:
    config: dict[str, object] = {"transport": "tcp", "gather_below": 0}
    with Agent({"name": "reader", **config}) as reader:
        reader.register(cache())

        def read(*, succeeds: bool) -> None:
            with Agent({"name": "b", **config}) as b:
                b.register(cache())
                peer = reader.connect(b.metadata())
                reader.read(peer, [WHOLE], [([1], [2])]).wait(GENEROUS)
                if not succeeds:
                    # Of a region that is not there.
                    failing = reader.read(peer, [WHOLE._replace(remote_region=7)], [([1], [2])])
                    with pytest.raises(kvferry.KvferryError):
                        failing.wait(GENEROUS)
            until("the peer is lost", lambda: of(reader, "b")["connected"] == 0)

        read(succeeds=False)
        read(succeeds=True)
        found = of(reader, "b")
        assert (found["transfers_done"], found["transfers_failed"], found["bytes_read"]) == (2, 1, 2 * BLOCK)
        assert (found["lanes"], found["host"]) == ("", "")
        assert reader.stats()["transfers_failed"] == 1


def samples(path: Path) -> dict[tuple[str, str], float]:
    """Values by metric and peer."""
    families = text_string_to_metric_families(path.read_text())
    return {(one.name, one.labels.get("peer", "")): one.value for family in families for one in family.samples}


def test_a_file_shows_them_while_the_agent_runs_and_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Agent({"name": "b", "transport": "tcp"}) as b:
        b.register(cache())
        monkeypatch.setenv("KVFERRY_METRICS_FILE", str(tmp_path / "%a-%p.prom"))
        path = tmp_path / f"reader_1-{os.getpid()}.prom"
        with Agent({"name": "reader/1", "transport": "tcp"}) as reader:
            assert samples(path)["kvferry_agent_regions", ""] == 0
            reader.register(cache())
            peer = reader.connect(b.metadata())
            reader.read(peer, [WHOLE], [([1], [2])]).wait(GENEROUS)
            key = ("kvferry_peer_bytes_read_total", "b")
            until("the file has the read", lambda: samples(path).get(key) == BLOCK)
            shown = next(line for line in path.read_text().splitlines() if line.startswith("kvferry_peer_connected{"))
            assert 'agent="reader/1",peer="b",lanes="tcp/' in shown
            reader.read(peer, [WHOLE], [([1], [2])]).wait(GENEROUS)
        assert samples(path)[key] == 2 * BLOCK
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
        text = stats.prometheus([{"labels": {"agent": "b"}, "agent": b.stats(), "peers": b.peers()}])
    families = {family.name for family in text_string_to_metric_families(text)}
    assert families == {f"kvferry_{metric.name}" for metric in stats.metrics() if metric.scope in ("agent", "peer")}


def test_a_file_that_cannot_be_made_keeps_an_agent_from_starting(tmp_path: Path) -> None:
    with pytest.raises(kvferry.KvferryError, match=r"metrics_file .*none/x: it cannot be written"):
        Agent({"metrics_file": str(tmp_path / "none" / "x")})
    Agent({"metrics_file": ""}).shutdown()


def writers(path: Path) -> set[str]:
    """The agents whose figures the file has."""
    found = {
        one.labels["agent"] for family in text_string_to_metric_families(path.read_text()) for one in family.samples
    }
    assert found
    return found


def test_agents_with_their_names_in_a_pattern_write_files_of_their_own(tmp_path: Path) -> None:
    config = {"transport": "tcp", "metrics_file": str(tmp_path / "%a.prom")}
    with Agent({"name": "first", **config}), Agent({"name": "second", **config}):
        for name in ("first", "second"):
            assert writers(tmp_path / f"{name}.prom") == {name}
    # The next agent replaces the file that one has left.
    with Agent({"name": "third", **config, "metrics_file": str(tmp_path / "first.prom")}):
        assert writers(tmp_path / "first.prom") == {"third"}
    assert {file.name for file in tmp_path.iterdir()} == {"first.prom", "second.prom"}
