"""Two kvferry agents in one process: one reads scattered blocks from the other's array."""

import numpy as np

import kvferry
from kvferry import Agent, Segment

BLOCKS, BLOCK_BYTES = 64, 4096

source = np.random.default_rng(7).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
target = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)

with Agent({"name": "producer"}) as producer, Agent({"name": "consumer"}) as consumer:
    producer.register(source)
    consumer.register(target)
    # In practice the metadata travels between hosts by any means; it is a few hundred bytes per registered region.
    peer = consumer.connect(producer.metadata())

    # Block i of the lists copies BLOCK_BYTES from the producer's block remote[i] to the consumer's block local[i].
    whole_block = Segment(
        list=0,
        local_region=0,
        remote_region=0,
        local_offset=0,
        remote_offset=0,
        local_stride=BLOCK_BYTES,
        remote_stride=BLOCK_BYTES,
        length=BLOCK_BYTES,
    )
    local, remote = [3, 1, 4, 15, 9], [26, 5, 35, 8, 60]
    done = consumer.read(peer, [whole_block], [(local, remote)]).wait(timeout=60)

    assert np.array_equal(target[local], source[remote])
    print(f"kvferry {kvferry.version()}: {done.bytes} bytes in {done.operations} operations, every byte right")
