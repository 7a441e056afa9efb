"""An engine of this tree's release or of the previous one, in a process of its own, for the tests of upgrades."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kvferry
from kvferry.doctor import inside
from lab.engines.engine import Engine, RemoteEngine, Setup

GENEROUS = 120.0
"""Seconds that anything may take on a busy machine."""


class UpgradeEngine(Engine):
    """What tests of upgrades ask beside."""

    def where(self) -> tuple[str, str]:
        return str(Path(kvferry.__file__).resolve()), str(kvferry.library_path())

    def survey(self, host: str, port: int) -> dict[str, Any]:
        """What the handshake with another engine's listener tells."""
        survey: dict[str, Any] = inside.survey(host, port, {}, None)["survey"]
        return survey

    def refusal(self, metadata: dict[tuple[int, int], bytes]) -> str:
        """What this engine's scheduler side says to these ranks."""
        try:
            self.scheduler.set_engine(metadata)
        except kvferry.KvferryError as error:
            return f"{error.name}: {error.message}"
        return ""

    def next_step(self) -> bytes:
        return self.scheduler.step()

    def refused_step(self, step: bytes) -> str:
        """What this engine's first worker says to a step."""
        try:
            self.workers[0].submit(step)
        except kvferry.KvferryError as error:
            return f"{error.name}: {error.message}"
        return ""


def release(stack: ExitStack, previous: Path | None, setup: Setup) -> RemoteEngine:
    """An engine of this tree's release, or of the one in the folder `previous` (see scripts/build-previous)."""
    more: dict[str, Any] = {}
    if previous is not None:
        more["path"] = [str(previous / "source/python")]
        more["environment"] = {"KVFERRY_LIBRARY": str(previous / "build/debug/libkvferry.so")}
    return stack.enter_context(RemoteEngine(setup, UpgradeEngine, limit_s=GENEROUS, **more))
