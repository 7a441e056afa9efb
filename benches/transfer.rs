//! How fast one agent reads another's host memory, in two processes: `cargo bench --bench transfer`.
//!
//! With `-- runs`: short runs, as between different layouts, in an operation each and gathered in messages.
//!
//! Prints, per transport and block size, the rate of reads of 64 MiB in scattered blocks, the operations they took, and
//! the time from starting a read of one block to its event. Every byte of every read is compared.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvferry::agent::{Agent, AgentConfig, Direction, Event, PeerId, Transport, decode_metadata, encode_metadata};
use kvferry::mem::MemoryRange;
use kvferry::proto::plan::{BlockPair, CopyPlan, GATHER_BELOW, Segment};
use kvferry::proto::wire::MemoryKind;

const ROLE: &str = "KVFERRY_BENCH_ROLE";
const TOTAL: usize = 64 << 20;
const ROUNDS: u32 = 5;
/// What is read in short runs, and how often.
const RUN_BYTES: usize = 8 << 20;
const RUN_ROUNDS: usize = 9;

fn agent(transport: Transport, gather_below: u64, memory: &mut [u8]) -> Agent {
    let agent = Agent::start(AgentConfig { transport, gather_below, ..AgentConfig::default() }).unwrap();
    let addr = memory.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the memory outlives the agent, and is only looked at while no transfer runs.
    let range = unsafe { MemoryRange::new(addr, memory.len() as u64, MemoryKind::Host) }.unwrap();
    agent.register(range).unwrap();
    agent
}

/// Bytes of 8 that differ at every place.
fn fill(memory: &mut [u8], seed: u64) {
    for (i, word) in memory.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed).to_le_bytes());
    }
}

fn transport() -> Transport {
    Transport::parse(&std::env::var(ROLE).unwrap()).unwrap()
}

/// The other process: exports its memory and lives until its input ends.
fn owner() {
    let mut memory = vec![0; TOTAL];
    fill(&mut memory, 1);
    let agent = agent(transport(), GATHER_BELOW, &mut memory);
    let metadata = encode_metadata(&agent.metadata().unwrap()).unwrap();
    let text: String = metadata.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{text}");
    std::io::stdin().lock().lines().for_each(drop);
    agent.shutdown(Duration::from_secs(10)).unwrap();
}

fn read(agent: &Agent, peer: PeerId, block: usize, ids: &[u32]) -> (u64, Duration) {
    let segment = Segment {
        list: 0,
        local_region: 0,
        remote_region: 0,
        local_offset: 0,
        remote_offset: 0,
        local_stride: block as u64,
        remote_stride: block as u64,
        len: block as u64,
    };
    let lists = vec![BlockPair { local: ids.into(), remote: ids.into() }];
    let start = Instant::now();
    agent.transfer(peer, Direction::Read, CopyPlan { segments: [segment].into(), lists }, 0).unwrap();
    loop {
        match agent.wait_event(Duration::from_secs(60)).expect("the read ends") {
            Event::TransferDone { result, operations, .. } => {
                result.unwrap();
                return (operations, start.elapsed());
            }
            Event::PeerLost { error, .. } => panic!("{error}"),
            Event::Message { .. } | Event::PeerConnected { .. } => {}
        }
    }
}

/// Starts the other process; its metadata.
fn start_owner(name: &str) -> (Child, Vec<u8>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(ROLE, name)
        .env("KVFERRY_BENCH_OWNER", "1")
        // UCX would else write its messages before the metadata.
        .env("UCX_LOG_FILE", "stderr")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let digits = line.trim().as_bytes().chunks(2);
    let metadata = digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect();
    (child, metadata)
}

/// Short runs over CMA: an operation each against gathering, in alternating rounds.
fn measure_runs() {
    let (mut child, metadata) = start_owner("shm");
    let mut expected = vec![0; TOTAL];
    fill(&mut expected, 1);
    let mut memories = [vec![0; TOTAL], vec![0; TOTAL]];
    let [direct, gathered] = &mut memories;
    let agents = [agent(Transport::Shm, 0, direct), agent(Transport::Shm, u64::MAX, gathered)];
    let peers = agents.each_ref().map(|agent| agent.connect(&decode_metadata(&metadata).unwrap()).unwrap());
    println!(
        "bytes per run   direct GB/s   gathered GB/s   gathered / direct (medians of {RUN_ROUNDS} alternating rounds)"
    );
    for run in [128usize, 256, 512, 1024, 2048, 4096, 8192] {
        let count = (RUN_BYTES / run) as u32;
        let ids: Vec<u32> = (0..count).map(|i| (u64::from(i) * 7919 % u64::from(count)) as u32).collect();
        let mut times = [vec![], vec![]];
        for round in 0..=RUN_ROUNDS {
            for (side, agent) in agents.iter().enumerate() {
                fill(&mut memories[side][..RUN_BYTES], round as u64 + 2);
                let (_, time) = read(agent, peers[side], run, &ids);
                assert!(memories[side][..RUN_BYTES] == expected[..RUN_BYTES], "bytes differ");
                if round > 0 {
                    times[side].push(time.as_secs_f64());
                }
            }
        }
        let rates = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            RUN_BYTES as f64 / times[times.len() / 2] / 1e9
        });
        println!("{run:>13} {:>13.3} {:>15.3} {:>19.2}", rates[0], rates[1], rates[1] / rates[0]);
    }
    for agent in agents {
        agent.shutdown(Duration::from_secs(10)).unwrap();
    }
    let _ = child.stdin.take().unwrap().flush();
    child.wait().unwrap();
}

fn measure(name: &str) {
    let (mut child, metadata) = start_owner(name);
    let mut expected = vec![0; TOTAL];
    fill(&mut expected, 1);
    let mut memory = vec![0; TOTAL];
    let agent = agent(Transport::parse(name).unwrap(), GATHER_BELOW, &mut memory);
    let peer = agent.connect(&decode_metadata(&metadata).unwrap()).unwrap();
    for block in [4 << 10, 16 << 10, 64 << 10, 1 << 20, TOTAL] {
        // A stride through all blocks, so that no two neighbours merge.
        let count = (TOTAL / block) as u32;
        let ids: Vec<u32> = (0..count).map(|i| (u64::from(i) * 7919 % u64::from(count)) as u32).collect();
        read(&agent, peer, block, &ids);
        let (mut best, mut operations) = (Duration::MAX, 0);
        for round in 0..ROUNDS {
            fill(&mut memory, u64::from(round) + 2);
            let (posted, time) = read(&agent, peer, block, &ids);
            assert!(memory == expected, "bytes differ");
            (best, operations) = (best.min(time), posted);
        }
        let one = (0..20).map(|_| read(&agent, peer, block, &[0]).1).min().unwrap();
        println!(
            "{name:>5} {block:>9} {:>9.2} GB/s {operations:>7} operations {:>9.1} us for one block",
            TOTAL as f64 / best.as_secs_f64() / 1e9,
            one.as_secs_f64() * 1e6
        );
    }
    agent.shutdown(Duration::from_secs(10)).unwrap();
    let _ = child.stdin.take().unwrap().flush();
    child.wait().unwrap();
}

fn main() {
    if std::env::var_os("KVFERRY_BENCH_OWNER").is_some() {
        return owner();
    }
    if std::env::args().any(|argument| argument == "runs") {
        return measure_runs();
    }
    for name in ["tcp", "shm"] {
        measure(name);
    }
}
