"""The firewall of the fault matrix: what it lets through, and that it counts what it drops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from commands import ROOT, skip
from lab.network import dropped_packets

LISTING = """\
Chain INPUT (policy DROP 7 packets, 420 bytes)
    pkts      bytes target     prot opt in     out     source               destination
      11      660 ACCEPT     6    --  eth0   *       0.0.0.0/0            0.0.0.0/0            tcp dpt:9000
       3      180 DROP       6    --  eth0   *       0.0.0.0/0            0.0.0.0/0            multiport dports  !9000
       4      240 DROP       tcp  --  eth0   *       0.0.0.0/0            0.0.0.0/0            multiport dports  !9000
"""

PROBE = """
import json, socket, subprocess, sys
from pathlib import Path
from lab.network import Network, why_not

CONNECT = '''
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.5)
except OSError as problem:
    print(type(problem).__name__, end="")
'''

def connect(network, port):
    words = ("ip", "netns", "exec", network.decode.netns, sys.executable, "-c", CONNECT)
    words = (*words, network.prefill.address, str(port))
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout, network.dropped()

if (reason := why_not()) is not None:
    print(json.dumps({"why_not": reason}))
    sys.exit()
try:
    network = Network(Path(sys.argv[1]))
except (OSError, subprocess.CalledProcessError) as problem:
    print(json.dumps({"why_not": repr(problem)}))
    sys.exit()
try:
    network.firewall([9000, 9001])
    shut = [("before", network.dropped()), connect(network, 9001), connect(network, 9002)]
    network.restore()
    print(json.dumps({"shut": shut, "open": [connect(network, 9002)]}))
finally:
    network.close()
"""


def test_packets_of_rules_that_drop_are_counted() -> None:
    assert dropped_packets(LISTING) == 7
    assert dropped_packets(LISTING[: LISTING.index("       3")]) == 0


def test_the_firewall_drops_what_it_should_and_counts_it(tmp_path: Path) -> None:
    # In a process of its own, which goes into another network namespace.
    words = (sys.executable, "-c", PROBE, str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "why_not" in found:
        skip("netns", found["why_not"])
    before, through, (how, dropped) = found["shut"]
    # Nobody listens: whoever comes through is refused.
    assert (before, through) == (["before", 0], ["ConnectionRefusedError", 0])
    assert how == "TimeoutError"
    assert dropped >= 1
    assert found["open"] == [["ConnectionRefusedError", 0]]
