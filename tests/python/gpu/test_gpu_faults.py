"""The faults of scripts/gpu-faults still fit the sources that they are put into."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts" / "lib")
    return importlib.import_module("gpu_faults").FAULTS


def test_each_text_that_is_replaced_is_found_once(faults: Any) -> None:
    assert faults
    counts = {fault.name: (ROOT / fault.source).read_text().count(fault.right) for fault in faults}
    assert counts == dict.fromkeys((fault.name for fault in faults), 1)
    assert len(counts) == len(faults), "two faults have one name"


def test_each_fault_changes_something(faults: Any) -> None:
    assert [fault.name for fault in faults if fault.right == fault.wrong] == []
