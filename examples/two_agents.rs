//! Two kvferry agents in one process: one reads scattered blocks from the other's memory.

use std::time::Duration;

use kvferry::agent::{Agent, AgentConfig, Direction, Event};
use kvferry::mem::MemoryRange;
use kvferry::proto::plan::{BlockPair, CopyPlan, Segment};
use kvferry::proto::wire::MemoryKind;

const BLOCK_BYTES: usize = 4096;
const BLOCKS: usize = 64;

fn main() -> kvferry::Result<()> {
    let source: Vec<u8> = (0..BLOCKS * BLOCK_BYTES).map(|i| (i / BLOCK_BYTES * 31 + i % 251) as u8).collect();
    let mut target = vec![0u8; BLOCKS * BLOCK_BYTES];

    let producer = Agent::start(AgentConfig { name: "producer".into(), ..AgentConfig::default() })?;
    let consumer = Agent::start(AgentConfig { name: "consumer".into(), ..AgentConfig::default() })?;
    // SAFETY: both vectors outlive the agents' shutdown, and nobody else touches them until the transfer is done.
    let (from, to) = unsafe {
        (
            MemoryRange::new(source.as_ptr() as u64, source.len() as u64, MemoryKind::Host)?,
            MemoryRange::new(target.as_mut_ptr() as u64, target.len() as u64, MemoryKind::Host)?,
        )
    };
    producer.register(from)?;
    let region = consumer.register(to)?;
    // Between hosts, send `encode_metadata(..)` by any means and give `decode_metadata(..)` to `connect`.
    let peer = consumer.connect(&producer.metadata()?)?;

    // Block i of the lists copies BLOCK_BYTES from the producer's block remote[i] to the consumer's block local[i].
    let whole_block = Segment {
        list: 0,
        local_region: region.index(),
        remote_region: 0,
        local_offset: 0,
        remote_offset: 0,
        local_stride: BLOCK_BYTES as u64,
        remote_stride: BLOCK_BYTES as u64,
        len: BLOCK_BYTES as u64,
    };
    let (local, remote) = ([3u32, 1, 4, 15, 9], [26u32, 5, 35, 8, 60]);
    let lists = vec![BlockPair { local: local.to_vec().into(), remote: remote.to_vec().into() }];
    let id = consumer.transfer(peer, Direction::Read, CopyPlan { segments: [whole_block].into(), lists }, 0)?;
    while let Some(event) = consumer.wait_event(Duration::from_secs(60)) {
        if let Event::TransferDone { id: done, result, bytes, operations, .. } = event {
            assert_eq!(done, id);
            result?;
            println!("{bytes} bytes in {operations} operations");
            break;
        }
    }
    // After the shutdown no operation touches the memory.
    consumer.shutdown(Duration::from_secs(10))?;
    producer.shutdown(Duration::from_secs(10))?;

    let block = |memory: &[u8], n: u32| memory.chunks(BLOCK_BYTES).nth(n as usize).map(<[u8]>::to_vec);
    assert!(local.iter().zip(remote).all(|(&to, from)| block(&target, to) == block(&source, from)));
    println!("every byte right");
    Ok(())
}
