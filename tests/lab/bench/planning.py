"""Sets the planning of a request by kvferry beside that of vLLM's NixlConnector, in alternating rounds.

vLLM's side is the installed code from the point where a request's remote engine is known
(`NixlPullConnectorWorker._read_blocks_for_req`) to the one where NIXL is called: per remote rank, the block lists, the
prefix-cache trimming, and `_compute_desc_ids` for both sides. The worker stands alone: what its constructor and the
handshake would have set is set here, and NIXL does nothing. Not counted: what vLLM prepares once per remote engine, its
scheduler side, and what NIXL does with the descriptors.

kvferry's side is benches/planning.rs: `RankPlan::request` for each of the remote ranks.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec

# As in benches/planning.rs.
LAYERS, BLOCKS, BLOCK_SIZE, REMOTE_TP, HEADS = 64, 2000, 16, 4, 8
REMOTE, LOCAL = "remote", "local"


class NoNixl:
    """Takes the prepared transfer and notes how many descriptors it has."""

    def __init__(self) -> None:
        self.descriptors = 0
        self.bytes = 0

    def make_prepped_xfer(self, _op: str, _local: int, local_ids: Any, _remote: int, remote_ids: Any, **_: Any) -> int:
        assert len(local_ids) == len(remote_ids)
        self.descriptors += len(local_ids)
        self.bytes += local_ids.nbytes + remote_ids.nbytes
        return 1

    def transfer(self, _handle: int) -> None:
        pass


class Worker(NixlPullConnectorWorker):
    """A decode worker of TP 1 after its handshake with a prefill engine of TP 4, without an engine around it."""

    def __init__(self) -> None:
        self.nixl_wrapper = NoNixl()
        self.engine_id, self.block_size = LOCAL, BLOCK_SIZE
        self.transfer_topo = TransferTopology(
            tp_rank=0,
            tp_size=1,
            block_size=BLOCK_SIZE,
            engine_id=LOCAL,
            is_mla=False,
            is_mamba=False,
            total_num_kv_heads=HEADS,
            attn_backends=[],
        )
        info = EngineTransferInfo(
            remote_tp_size=REMOTE_TP,
            remote_block_len=1,
            remote_block_size=BLOCK_SIZE,
            remote_physical_blocks_per_logical=1,
        )
        self.transfer_topo.register_remote_engine(REMOTE, info)
        self._group_spec_types = (FullAttentionSpec,)
        self.tp_mappings = {REMOTE: compute_tp_mapping(self.transfer_topo, REMOTE_TP, self._group_spec_types)}
        self.kv_cache_config = SimpleNamespace(transfer_groups=[None])
        self.use_mla = self._has_mamba = self._mixed_mem_types = self._uses_region_group_mapping = False
        self._bidirectional_kv_xfer_enabled = False
        self.dcp_size = self._physical_blocks_per_logical_kv_block = 1
        # One region per layer, K and V together in it.
        self.num_regions = LAYERS
        self.block_len_per_layer = [1] * LAYERS
        self.region_group_ids = [0] * LAYERS
        self._transfer_layer_group_ids = ()
        engines = (LOCAL, REMOTE)
        self.dst_num_blocks = dict.fromkeys(engines, 4 * BLOCKS)
        self.dst_region_num_blocks = {engine: [4 * BLOCKS] * LAYERS for engine in engines}
        self.dst_region_group_ids = {engine: [0] * LAYERS for engine in engines}
        self.dst_uses_region_group_mapping = dict.fromkeys(engines, False)
        self.src_xfer_handles_by_tp_ratio = {(-REMOTE_TP, BLOCK_SIZE): [1] * REMOTE_TP}
        self.dst_xfer_side_handles = {REMOTE: dict.fromkeys(range(REMOTE_TP), 1)}
        self._remote_agents = {REMOTE: {(0, rank): "agent" for rank in range(REMOTE_TP)}}
        self._invalid_remote_engines: dict[str, float] = {}
        self._engine_last_active: dict[str, float] = {}
        self._recving_transfers: defaultdict[str, list[int]] = defaultdict(list)
        self._recv_failures: set[str] = set()

    def __del__(self) -> None:
        """There is nothing to shut down."""


def request(local: list[int], remote: list[int]) -> ReqMeta:
    """What the scheduler side hands to the worker."""
    metadata = NixlConnectorMetadata()
    params = {
        "remote_block_ids": [list(remote)],
        "remote_engine_id": REMOTE,
        "remote_request_id": "request",
        "remote_host": "host",
        "remote_port": 1,
        "tp_size": REMOTE_TP,
    }
    metadata.add_new_req_to_recv("request", [list(local)], params, (0,), True)
    return metadata.reqs_to_recv["request"]


def main(arguments: list[str]) -> None:
    """Prints both medians and their ratio. `arguments`: the rounds."""
    rounds = int(arguments[0])
    ids = random.Random(7)
    local, remote = (ids.sample(range(4 * BLOCKS), BLOCKS) for _ in range(2))
    worker = Worker()
    command = ["cargo", "bench", "--quiet", "--locked", "--bench", "planning"]
    ours: list[tuple[int, ...]] = []
    theirs: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdin is not None
        assert bench.stdout is not None
        # The first rounds of either are not counted: caches and allocators are cold.
        for index in range(rounds + 5):
            bench.stdin.write("\n")
            bench.stdin.flush()
            line = bench.stdout.readline()
            meta = request(local, remote)
            worker.nixl_wrapper = NoNixl()
            start = time.perf_counter_ns()
            worker._read_blocks_for_req("request", meta)
            took = time.perf_counter_ns() - start
            assert worker.nixl_wrapper.descriptors == REMOTE_TP * LAYERS * BLOCKS
            assert worker._recving_transfers.pop("request") == [1] * REMOTE_TP
            if index >= 5:
                ours.append(tuple(map(int, line.split())))
                theirs.append(took)
        bench.stdin.close()
    planned, expanded = (statistics.median(one[column] for one in ours) / 1e3 for column in (0, 1))
    stock = statistics.median(theirs) / 1e3
    nixl = worker.nixl_wrapper
    best = min(theirs) / min(one[0] for one in ours)
    print(
        f"one request, {LAYERS} layers x {BLOCKS} scattered blocks, TP {REMOTE_TP} to TP 1; medians of {rounds} rounds"
    )
    for what, took_us in (
        (f"kvferry, plans for {REMOTE_TP} ranks", planned),
        (f"kvferry, plans and all {ours[0][2]} operations", planned + expanded),
        (f"NixlConnector, {nixl.descriptors} pairs of descriptor numbers", stock),
    ):
        print(f"  {what:<55}{took_us:>10.1f} us")
    print(
        f"  plans against descriptor numbers: {stock / planned:.1f} times faster; by each one's best round {best:.1f}"
    )
    print(f"  bytes per block: plans {ours[0][3] / BLOCKS:.0f}, descriptor numbers {nixl.bytes / BLOCKS:.0f}")
