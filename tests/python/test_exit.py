"""A program that ends while its agents move bytes ends as it says, whatever the interpreter frees first."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Connection

import kvferry
import numpy as np
import pytest
from lab.process import GENEROUS, process, receive

pytestmark = pytest.mark.slow

SIZE = 64 << 20
EXITS = 20
STATUS, TOO_LATE = 7, 8

PROGRAM = f"""
import functools, sys, time
import kvferry
import numpy as np

target = np.zeros({SIZE}, np.uint8)
# The interpreter lets go of these in their order, and a moment passes between the memory and the agent.
slow = type("Slow", (), {{"__del__": functools.partial(time.sleep, 0.05)}})()
agent = kvferry.Agent({{"name": "reader", "transport": "tcp"}})
if sys.argv[2] == "kept":
    kvferry.kept = agent
agent.register((target.ctypes.data, target.nbytes))
peer = agent.connect(bytes.fromhex(sys.argv[1]))
whole = kvferry.Segment(0, 0, 0, 0, 0, {SIZE}, {SIZE}, {SIZE})
reads = [agent.read(peer, [whole], [([0], [0])]) for _ in range(50)]
while not target[:4096].any():
    time.sleep(0.001)
agent.poll()
sys.exit({STATUS} if reads[-1].done is None else {TOO_LATE})
"""


def serve(pipe: Connection) -> None:
    """The peer: lets its memory be read."""
    memory = np.full(SIZE, 5, np.uint8)
    with kvferry.Agent({"name": "owner", "transport": "tcp"}) as agent:
        agent.register(memory)
        pipe.send(agent.metadata())
        assert receive(pipe) == "end"


def test_a_program_that_exits_while_it_reads_ends_with_its_own_status() -> None:
    with process(serve) as pipe:
        metadata = receive(pipe).hex()
        ends = set()
        for number in range(EXITS):
            # Let go of by the interpreter, or never.
            way = "kept" if number % 2 else "freed"
            command = [sys.executable, "-c", PROGRAM, metadata, way]
            done = subprocess.run(command, capture_output=True, text=True, timeout=2 * GENEROUS)
            assert done.returncode in (STATUS, TOO_LATE), (number, way, done.returncode)
            assert done.stderr == "", (number, way)
            ends.add((way, done.returncode))
        # With reads under way, at least once.
        assert ends >= {("kept", STATUS), ("freed", STATUS)}
        pipe.send("end")
