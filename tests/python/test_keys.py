"""`kvferry key`, and what the Python side does with a key file."""

from __future__ import annotations

import logging
import re
import stat
from pathlib import Path

import kvferry
import numpy as np
import pytest
from kvferry import Agent, Listener, Scheduler, Segment, Worker, _lib, _wire
from kvferry.cli import main


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "kvferry.key"
    assert main(["key", str(path)]) == 0
    return path


def test_a_new_key_is_random_and_its_owners_only(tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = key.read_text()
    assert re.fullmatch("[0-9a-f]{64}\n", text)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    other = tmp_path / "other.key"
    assert main(["key", str(other)]) == 0
    assert other.read_text() != text
    assert text.strip() not in capsys.readouterr().out


def test_a_key_overwrites_nothing(tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = key.read_text()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path, why in ((key, "exists"), (link, "exists"), (tmp_path / "no" / "folder", "cannot be written")):
        with pytest.raises(SystemExit) as ended:
            main(["key", str(path)])
        assert ended.value.code == 2
        assert why in capsys.readouterr().err
    assert key.read_text() == before
    assert not (tmp_path / "elsewhere").exists()


def read(producer: Agent, consumer: Agent, timeout: float) -> bool:
    """Reads 4096 bytes; whether every byte arrived."""
    source, target = np.arange(4096, dtype=np.uint16).view(np.uint8), np.zeros(8192, np.uint8)
    producer.register(source)
    consumer.register(target)
    segment = Segment(0, 0, 0, 0, 0, 4096, 4096, 4096)
    peer = consumer.connect(producer.metadata())
    consumer.read(peer, [segment], [([0, 1], [1, 0])]).wait(timeout)
    return bool(np.array_equal(target, np.roll(source, 4096)))


def test_agents_with_one_key_work_and_others_do_not(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One by its configuration, one by the environment.
    with Agent({"name": "a", "key_file": str(key)}) as one:
        monkeypatch.setenv("KVFERRY_KEY_FILE", str(key))
        with Agent({"name": "b"}) as two:
            assert read(one, two, 60)
    other = tmp_path / "other.key"
    main(["key", str(other)])
    for theirs in (str(other), ""):
        # On a busy machine the peer may be given up before it is read from: then it gets longer.
        for doubled in range(8):
            with (
                Agent({"name": "a", "key_file": str(key)}) as one,
                Agent({"name": "b", "key_file": theirs, "connect_timeout_ms": 500 << doubled}) as two,
                pytest.raises(kvferry.KvferryError) as refused,
            ):
                read(one, two, 60)
            if not isinstance(refused.value, kvferry.NotFoundError):
                break
        assert "key_file" in str(refused.value)


@pytest.mark.parametrize("theirs", ["another key", "no key"])
def test_the_listener_logs_a_wrong_key(
    theirs: str, tmp_path: Path, key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other.key"
    main(["key", str(other)])
    caplog.set_level(logging.WARNING, logger="kvferry")
    kvferry.log.route("warn")
    try:
        with Listener({"engine_id": "p", "host": "127.0.0.1", "key_file": str(key)}) as listener:
            given = {"key_file": str(other) if theirs == "another key" else "", "timeout_ms": 60_000}
            host, port = listener.address
            packed = _wire.pack("config", given)
            with pytest.raises(kvferry.KvferryError, match="key"):
                _lib.ask("kvf_handshake_survey", _lib.text("host", host), port, packed)
    finally:
        kvferry.log.unroute()
    refused = [text for text in caplog.messages if "a request was refused" in text]
    assert any("key_file, KVFERRY_KEY_FILE" in text for text in refused), caplog.messages


def test_a_key_file_that_others_may_read_stops_everything_that_takes_one(key: Path) -> None:
    key.chmod(0o640)
    engine = {"engine_id": "e", "key_file": str(key)}
    groups = [{"kind": "full", "block_size": 16}]
    for start in (
        lambda: Agent({"key_file": str(key)}),
        lambda: Worker(engine),
        lambda: Scheduler({**engine, "groups": groups}),
        lambda: Listener({**engine, "host": "127.0.0.1"}),
    ):
        with pytest.raises(kvferry.KvferryError, match="chmod 600"):
            start()
