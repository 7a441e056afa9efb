"""The configuration is judged before vLLM's executor loads a model."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvferry.vllm
import pytest
from kvferry import InvalidArgumentError
from mini_config import Settings, vllm_config, write_model
from vllm.v1.executor.abstract import Executor


class ModelLoaded(Exception):
    """What the executor was made for."""


class Loader(Executor):
    """An executor that gets no further than the model."""

    def _init_executor(self) -> None:
        raise ModelLoaded

    def collective_rpc(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def check_health(self) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "__init__", Executor.__init__)
    kvferry.vllm.register()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def load(folder: Path, role: str = "kv_producer", **changes: Any) -> None:
    Loader(vllm_config(Settings(role, write_model(folder), 1, **changes)))


def test_a_good_configuration_loads_the_model(tmp_path: Path) -> None:
    for child in (False, True):
        with pytest.raises(ModelLoaded):
            load(tmp_path, child=child)


@pytest.mark.parametrize("child", [False, True], ids=["alone", "child"])
def test_a_wrong_option_stops_before_the_model(child: bool, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape("both a transport (tcp) and the UCX setting TLS")):
        load(tmp_path, child=child, extra={"transport": "tcp", "ucx": {"TLS": "tcp"}})


def test_a_port_in_use_stops_before_the_model(tmp_path: Path) -> None:
    with taken_port() as port:
        with pytest.raises(InvalidArgumentError, match=str(port)):
            load(tmp_path, extra={"port": port})
        # A decode engine has no listener.
        with pytest.raises(ModelLoaded):
            load(tmp_path, "kv_consumer", extra={"port": port})


def test_a_second_hand_over_connector_stops_before_the_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has 2 KvferryConnectors"):
        load(tmp_path, child=True, beside="KvferryConnector")


def test_processes_without_executors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.executor.abstract")
    kvferry.vllm.register()
