"""What travels between the two sides: it pickles, and worker metadata aggregates by its laws."""

from __future__ import annotations

import itertools
import pickle

import cloudpickle
import pytest
from kvferry.vllm.metadata import (
    KvferryConnectorMetadata,
    KvferryHandshakeMetadata,
    KvferryWorkerMetadata,
    RefusedLoad,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

A, B, C = (KvferryWorkerMetadata((name,)) for name in (b"rank 0", b"rank 1", b"rank 2"))


@pytest.mark.release
@pytest.mark.parametrize(
    "value",
    [
        KvferryHandshakeMetadata(b"\x00\xffbytes"),
        KvferryConnectorMetadata(b"step", {"r": RefusedLoad("why", (1, 2))}),
        KvferryConnectorMetadata(),
        KvferryWorkerMetadata((b"a", b"b")),
    ],
)
def test_pickles(value: object) -> None:
    # vLLM's message queue uses pickle, Ray uses cloudpickle.
    for dump in (pickle.dumps, cloudpickle.dumps):
        assert pickle.loads(dump(value)) == value


def test_aggregate_is_associative_and_commutative_with_the_empty_one_as_identity() -> None:
    results = set()
    for x, y, z in itertools.permutations((A, B, C)):
        assert x.aggregate(y) == y.aggregate(x)
        assert x.aggregate(y).aggregate(z) == x.aggregate(y.aggregate(z))
        results.add(x.aggregate(y).aggregate(z))
    assert results == {KvferryWorkerMetadata((b"rank 0", b"rank 1", b"rank 2"))}
    assert A.aggregate(KvferryWorkerMetadata()) == A == KvferryWorkerMetadata().aggregate(A)


def test_equal_reports_both_count() -> None:
    assert A.aggregate(A).reports == (b"rank 0", b"rank 0")


def test_foreign_metadata_is_refused() -> None:
    class Foreign(KVConnectorWorkerMetadata):
        def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
            return self

    with pytest.raises(TypeError, match="cannot be combined with Foreign"):
        A.aggregate(Foreign())


@pytest.mark.release
def test_as_a_child_of_multiconnector() -> None:
    left = MultiKVConnectorWorkerMetadata((None, A))
    right = MultiKVConnectorWorkerMetadata((None, B))
    assert left.aggregate(right).metadata == (None, KvferryWorkerMetadata((b"rank 0", b"rank 1")))
    assert left.aggregate(MultiKVConnectorWorkerMetadata((None, None))).metadata == (None, A)


@pytest.mark.release
def test_vllms_aggregator_over_ranks_of_which_some_have_nothing() -> None:
    def output(metadata: KvferryWorkerMetadata | None) -> ModelRunnerOutput:
        return ModelRunnerOutput.with_kv_conn_output_only(KVConnectorOutput(kv_connector_worker_meta=metadata))

    merged = KVOutputAggregator(4).aggregate([output(None), output(C), output(None), output(A)])
    assert merged is not None
    assert merged.kv_connector_output is not None
    assert merged.kv_connector_output.kv_connector_worker_meta == KvferryWorkerMetadata((b"rank 0", b"rank 2"))
