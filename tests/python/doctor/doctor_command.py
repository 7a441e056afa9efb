"""`kvferry doctor` as tests run it, and what it said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kvferry

SCHEMA = json.loads((Path(kvferry.__file__).parent / "doctor" / "schema.json").read_text())
LIMIT_S = 300
TIMEOUT_S = 240
"""What the command has for all of its stages here: a busy machine takes longer than the minute of its default."""
STATES_OF_TROUBLE = ("warning", "problem")


class Told:
    """What a run of the command said."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.stdout, done.stderr
        self.code, self.text = done.returncode, done.stdout + done.stderr
        self.map: dict[str, Any] = json.loads(done.stdout)
        jsonschema.validate(self.map, SCHEMA)
        problems = any(finding["state"] == "problem" for finding in self.map["findings"])
        assert self.code == int(problems), self.troubles

    def __getitem__(self, id: str) -> dict[str, Any]:
        (finding,) = (finding for finding in self.map["findings"] if finding["id"] == id)
        return finding

    def cases(self, *ids: str) -> list[str]:
        return [self[id]["case"] for id in ids]

    @property
    def troubles(self) -> dict[str, str]:
        found = self.map["findings"]
        return {one["id"]: one["case"] for one in found if one["state"] in STATES_OF_TROUBLE}


BASE = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("UCX_", "KVFERRY_UCX_LIB", "KVFERRY_KEY_FILE"))
}
"""Whatever the one who runs the tests has set for UCX."""


def doctor(*words: str, within: Sequence[str] = (), **environment: str | None) -> Told:
    """Runs the command, by default without transfers; `within` is a command that runs it, None unsets a variable."""
    changed = {**BASE, **{name: value for name, value in environment.items() if value is not None}}
    for name in (name for name, value in environment.items() if value is None):
        changed.pop(name, None)
    transfers = () if "--transfers" in words else ("--no-transfers",)
    words = tuple(word for word in words if word != "--transfers")
    if "--timeout" not in words:
        words = ("--timeout", str(TIMEOUT_S), *words)
    command = [*within, sys.executable, "-m", "kvferry", "doctor", "--json", *transfers, *words]
    return Told(subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=changed))
