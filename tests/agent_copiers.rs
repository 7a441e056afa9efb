//! Transfers that several threads copy: every byte, and that nothing is copied any more when a transfer is over.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod agent_support;

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use agent_support::child::{Remote, serve};
use agent_support::{LIMIT, Node, Random, assert_same, config, model, pattern_bytes, plan, until};
use kvferry::ErrorKind;
use kvferry::agent::{AgentConfig, Direction, PeerId, TransferId, Transport};

#[test]
#[ignore = "the other process of this file's tests"]
fn child_process() {
    serve();
}

/// Large enough that copiers take part: they join a transfer after 200 us.
const LEN: usize = 12 << 20;
const BLOCK: usize = 4096;

/// The threads of this process are counted, so one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The copiers of this process.
fn copiers() -> usize {
    fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .filter(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "kvf-copy"))
        .count()
}

fn node(name: &str, copy_threads: u32, seed: u64) -> Node {
    Node::start(AgentConfig { copy_threads, ..config(name, Transport::Shm) }, seed, &[LEN])
}

/// All blocks, from and to places of no order.
fn shuffled(random: &mut Random) -> kvferry::proto::plan::CopyPlan {
    let blocks = LEN / BLOCK;
    let mut ids = || random.blocks(blocks, blocks as u32);
    plan(0, 0, BLOCK as u64, BLOCK as u64, ids(), ids())
}

#[test]
fn every_byte_arrives_and_the_threads_end_with_their_agent() {
    let _alone = alone();
    let processors = std::thread::available_parallelism().unwrap().get();
    let mut random = Random(41);
    for threads in [1, 2, 8] {
        let mut a = node("a", threads, 1);
        let b = node("b", threads, 2);
        let peer = a.connect(&b.agent.metadata().unwrap());
        // A short one needs nobody.
        a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![0]));
        assert_eq!(copiers(), 0);
        for direction in [Direction::Read, Direction::Write] {
            let (mut local, mut remote) = (a.contents(), b.contents());
            let plan = shuffled(&mut random);
            model(&plan, direction, &mut local, &mut remote);
            a.move_all(peer, direction, plan);
            assert_same("local", &a.contents(), &local);
            assert_same("remote", &b.contents(), &remote);
        }
        assert_eq!(copiers(), processors.min(threads as usize) - 1, "{threads} threads");
        let stats = a.agent.stats().unwrap();
        assert_eq!((stats.operations_in_flight, stats.bytes_in_flight), (0, 0));
        assert_eq!(stats.copied_bytes, 2 * LEN as u64 + 4096);
        a.agent.shutdown(LIMIT).unwrap();
        until("the threads' end", || copiers() == 0);
    }
}

/// A transfer that has begun to copy.
fn begun(a: &Node, peer: PeerId, random: &mut Random) -> TransferId {
    let before = a.agent.stats().unwrap().copied_bytes;
    let id = a.agent.transfer(peer, Direction::Read, shuffled(random)).unwrap();
    until("the first bytes", || a.agent.stats().unwrap().copied_bytes > before + (1 << 20));
    id
}

#[test]
fn nothing_is_copied_any_more_when_a_transfer_was_cancelled_or_its_memory_deregistered() {
    let _alone = alone();
    let mut random = Random(42);
    let mut a = node("a", 8, 1);
    let b = node("b", 8, 2);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let (mut cancelled, mut seed) = (0, 10);
    // On a machine that is busy enough a transfer can end before it is cancelled; not every time.
    while cancelled < 3 && seed < 200 {
        let id = begun(&a, peer, &mut random);
        let in_time = a.agent.cancel(id).is_ok();
        let (result, bytes, _) = a.wait_done(id);
        // Copies that were still made would overwrite this.
        seed += 1;
        a.buffers[0].fill(seed);
        if let Err(error) = result {
            assert!(in_time && error.kind() == ErrorKind::Cancelled, "{error}");
            // All of it where only what was in flight was left.
            assert!(bytes <= LEN as u64);
            cancelled += 1;
        }
        assert_same("after the end", &a.contents(), &[pattern_bytes(seed, LEN)]);
    }
    assert_eq!(cancelled, 3, "of many, three are cancelled in time");
    let id = begun(&a, peer, &mut random);
    a.agent.deregister(a.regions[0]).unwrap();
    a.buffers[0].fill(99);
    if let Err(error) = a.wait_done(id).0 {
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    }
    assert_same("deregistered", &a.contents(), &[pattern_bytes(99, LEN)]);
}

#[test]
fn a_shutdown_waits_for_what_is_being_copied() {
    let _alone = alone();
    let mut random = Random(43);
    for round in 0..5 {
        let a = node("a", 8, 1);
        let b = node("b", 8, 2);
        let peer = a.connect(&b.agent.metadata().unwrap());
        begun(&a, peer, &mut random);
        a.agent.shutdown(LIMIT).unwrap();
        a.buffers[0].fill(100 + round);
        until("the threads' end", || copiers() == 0);
        assert_same("after the shutdown", &a.contents(), &[pattern_bytes(100 + round, LEN)]);
    }
}

#[test]
fn a_peer_that_dies_while_its_memory_is_copied_fails_the_transfer_and_nothing_else() {
    let _alone = alone();
    let mut random = Random(44);
    let mut a = node("a", 8, 1);
    let mut died = 0;
    for round in 0..100 {
        if died == 2 {
            break;
        }
        let b = Remote::spawn(Transport::Shm, 50 + round, &[LEN]);
        let peer = a.connect(&b.metadata);
        a.wait_connected();
        let id = begun(&a, peer, &mut random);
        b.kill();
        if let Err(error) = a.wait_done(id).0 {
            assert!(matches!(error.kind(), ErrorKind::PeerDied | ErrorKind::Io), "{error}");
            died += 1;
        }
        let stats = a.agent.stats().unwrap();
        assert_eq!((stats.operations_in_flight, stats.bytes_in_flight, stats.transfers), (0, 0, 0));
    }
    assert_eq!(died, 2, "of many, two die in time");
    // The next one is served as if nothing had been.
    let mut b = Remote::spawn(Transport::Shm, 70, &[LEN]);
    let peer = a.connect(&b.metadata);
    let ids: Vec<u32> = (0..(LEN / BLOCK) as u32).collect();
    a.move_all(peer, Direction::Read, plan(0, 0, BLOCK as u64, BLOCK as u64, ids.clone(), ids));
    assert_same("local", &a.contents(), &[pattern_bytes(70, LEN)]);
    assert_eq!(b.ask("end"), "ended");
}
