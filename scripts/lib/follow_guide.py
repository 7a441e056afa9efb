"""Runs the commands of a guide: `follow_guide.py GUIDE FOLDER`, where FOLDER/venv is the environment that is used.

A comment before a shell block says what to do with it: `follow: values` (replaced by values for this machine), `follow:
run` (must end well), `follow: server` (runs until the end).
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from lab.common import DEPS, ROOT, free_port
from lab.process import Child
from lab.servers.model import make_model
from lab.servers.specs import KV_CACHE_BYTES, MAX_MODEL_LEN, server_environment

LIMIT_S = 600
"""For each block, on a slow machine."""


class Block(NamedTuple):
    """A shell block and what to do with it."""

    kind: str
    text: str


def blocks(guide: str) -> list[Block]:
    """The guide's blocks in their order. Raises `ValueError` for a shell block that does not say what to do with it."""
    found = [Block(*match) for match in re.findall(r"^<!-- follow: (\w+) -->\n```sh\n(.*?)^```$", guide, re.M | re.S)]
    shells = len(re.findall(r"^```sh$", guide, re.MULTILINE))
    kinds = [block.kind for block in found]
    if shells != len(found) or kinds[:1] != ["values"] or set(kinds[1:]) != {"run", "server"}:
        raise ValueError(f"{shells} shell blocks, of which these say what to do with them: {kinds}; first come values")
    return found


def values(block: Block, here: dict[str, str]) -> str:
    """The first block with this machine's values. Raises `ValueError` if it sets other names than `here`."""
    names = re.findall(r"(\w+)=", block.text)
    if sorted(names) != sorted(here):
        raise ValueError(f"the guide's values are {names}, expected {sorted(here)}")
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in here.items())


def environment(venv: Path) -> dict[str, str]:
    """As after `source venv/bin/activate`, with what vLLM needs on a machine without a GPU or a network."""
    found = server_environment()
    for name in [name for name in found if name.startswith(("KVFERRY_", "PYTHON"))]:
        if name != "KVFERRY_PYTHON":
            del found[name]
    found.update(VIRTUAL_ENV=str(venv), PATH=f"{venv / 'bin'}:{os.environ['PATH']}")
    # The listener's port of the guide may be taken here.
    found["KVFERRY_PORT"] = str(free_port())
    return found


class Follower:
    """Runs blocks, and ends the servers that they started."""

    def __init__(self, folder: Path, setting: str) -> None:
        self._setting = setting
        self._folder = folder
        self._environment = environment(folder / "venv")
        self._servers: list[tuple[Child, Path]] = []

    def follow(self, number: int, block: Block) -> None:
        """Does what the block says. Raises `SystemExit` with the end of the log if it fails or takes too long."""
        log = self._folder / f"{number}.log"
        begin = time.monotonic()
        # In the checkout, as the guide says. A block fails with its first command that does.
        command = ["bash", "-e", "-o", "pipefail", "-c", f"{self._setting}\n{block.text}"]
        process = Child.program(command, log, self._environment, ROOT)
        if block.kind == "server":
            self._servers.append((process, log))
            print(f"[{number}] server started: {block.text.strip()}", flush=True)
            return
        while (status := process.poll()) is None:
            died = [log for server, log in self._servers if server.poll() is not None]
            if died or time.monotonic() - begin > LIMIT_S:
                process.kill()
                for server_log in died or [log for _, log in self._servers]:
                    print(server_log.read_text(errors="replace")[-4000:], file=sys.stderr)
                sys.exit(f"block {number} of the guide: {'a server ended' if died else 'took too long'}:\n{block.text}")
            time.sleep(0.1)
        text = log.read_text(errors="replace")
        if status != 0:
            sys.exit(f"block {number} of the guide failed:\n{block.text}\n{text[-4000:]}")
        print(f"[{number}] {time.monotonic() - begin:.1f} s: {block.text.strip().splitlines()[0]}", flush=True)
        for line in text.strip().splitlines()[-3:]:
            print(f"      {line[:150]}", flush=True)

    def close(self) -> None:
        """Ends the servers."""
        for server, _ in self._servers:
            server.signal_group(signal.SIGTERM)
        for server, _ in self._servers:
            server.stop(20)


def main() -> int:
    """The command line."""
    guide, folder = Path(sys.argv[1]), Path(sys.argv[2])
    found = blocks(guide.read_text(encoding="utf-8"))
    options = (
        f"--dtype float32 --max-model-len {MAX_MODEL_LEN} --kv-cache-memory-bytes {KV_CACHE_BYTES} --enforce-eager"
    )
    here = {
        "MODEL": str(make_model("llama", DEPS / "models")),
        "OPTIONS": options,
        "PREFILL": str(free_port()),
        "DECODE": str(free_port()),
    }
    follower = Follower(folder, values(found[0], here))
    try:
        for number, block in enumerate(found[1:], 2):
            follower.follow(number, block)
    finally:
        follower.close()
    print(f"{guide.name}: every command of it ended well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
