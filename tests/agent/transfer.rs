//! Transfers between two agents, in one process and in two, with every byte of both sides checked.

use std::time::Duration;

use crate::common::agent::child::Remote;
use crate::common::agent::{
    LIMIT, Node, RICH, Random, assert_same, config, direct, model, plan, rich_plan, transports, until, ways, wire,
};
use crate::common::memory::pattern_bytes;
use kvferry::ErrorKind;
use kvferry::agent::{Agent, AgentConfig, Direction, Event, PeerId, TransferId, Transport, Window};
use kvferry::proto::plan::CopyPlan;

const DIRECTIONS: [Direction; 2] = [Direction::Read, Direction::Write];

/// Moves what the plan says and compares every byte of both sides. Returns the operations, at least one.
fn a_moves(a: &mut Node, b: &Node, peer: PeerId, direction: Direction, plan: CopyPlan) -> u64 {
    let (mut local, mut remote) = (a.contents(), b.contents());
    model(&plan, direction, &mut local, &mut remote);
    let operations = a.move_all(peer, direction, plan);
    assert!(operations > 0);
    assert_same("local", &a.contents(), &local);
    assert_same("remote", &b.contents(), &remote);
    operations
}

/// UCX itself writes a segment that is too long for its receiver over the receiver's memory, unless it was told.
#[test]
fn agents_whose_tcp_segments_differ_in_length_understand_each_other() {
    let mut random = Random(31);
    let short = |side: &str| {
        let mut config = config(side, wire());
        for name in ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"] {
            config.ucx.insert(name.to_owned(), "8k".to_owned());
        }
        config
    };
    for swap in [false, true] {
        let (first, second) = (short("a"), config("b", wire()));
        let (first, second) = if swap { (second, first) } else { (first, second) };
        let mut a = Node::start(first, 100, &RICH);
        let mut b = Node::start(second, 200, &RICH);
        let peer = a.connect(&b.agent.metadata().unwrap());
        for direction in DIRECTIONS {
            let plan = rich_plan(&mut random);
            a_moves(&mut a, &b, peer, direction, plan);
        }
        a.agent.send(peer, vec![7; 3_000_000]).unwrap();
        assert_eq!(b.wait_message().1, vec![7; 3_000_000]);
    }
}

#[test]
fn every_byte_of_rich_plans_arrives_within_one_process() {
    let mut random = Random(11);
    for ((transport, gather_below), verify) in ways().into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let mut a = Node::start(AgentConfig { gather_below, verify, ..config("a", transport) }, 100, &RICH);
        let b = Node::start(config("b", transport), 200, &RICH);
        let peer = a.connect(&b.agent.metadata().unwrap());
        for direction in [DIRECTIONS, DIRECTIONS].concat() {
            let plan = rich_plan(&mut random);
            a_moves(&mut a, &b, peer, direction, plan);
        }
        a.agent.shutdown(LIMIT).unwrap();
        b.agent.shutdown(LIMIT).unwrap();
    }
}

#[test]
fn every_byte_of_rich_plans_arrives_between_processes() {
    let mut random = Random(12);
    for (transport, gather_below) in ways() {
        let mut a = Node::start(AgentConfig { gather_below, ..config("a", transport) }, 300, &RICH);
        let mut b = Remote::spawn(transport, 400, &RICH);
        let peer = a.connect(&b.metadata);
        for direction in [DIRECTIONS, DIRECTIONS].concat() {
            let plan = rich_plan(&mut random);
            let (mut local, mut remote) = (a.contents(), b.contents());
            model(&plan, direction, &mut local, &mut remote);
            a.move_all(peer, direction, plan);
            assert_same("local", &a.contents(), &local);
            assert_same("remote", &b.contents(), &remote);
        }
        b.end();
        a.wait_lost(peer);
        a.agent.shutdown(LIMIT).unwrap();
    }
}

/// Contiguous blocks are one operation per bound, scattered ones one each.
#[test]
fn operations_are_merged_up_to_the_bound() {
    // Where each operation is one-sided; what the peer serves is counted in chunks.
    let settings = AgentConfig { max_operation_bytes: 64 << 10, ..config("a", direct()) };
    let mut a = Node::start(settings, 1, &[1 << 20]);
    let b = Node::start(config("b", direct()), 2, &[1 << 20]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let ids: Vec<u32> = (0..256).collect();
    assert_eq!(a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, ids.clone(), ids.clone())), 16);
    assert_same("merged", &a.contents(), &b.contents());
    let scattered: Vec<u32> = (0..128).map(|i| i * 2).collect();
    assert_eq!(a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, scattered.clone(), scattered)), 128);
    assert_same("scattered", &a.contents(), &b.contents());
    // Nothing to move is done at once, without an operation.
    assert_eq!(a.move_all(peer, Direction::Read, CopyPlan::default()), 0);
}

/// Runs under the limit travel in chunks of many, others in an operation each; the mean of a transfer decides.
#[test]
fn short_runs_are_gathered() {
    let settings = AgentConfig { gather_below: 100, ..config("a", direct()) };
    let mut a = Node::start(settings, 1, &[1 << 16]);
    let b = Node::start(config("b", direct()), 2, &[1 << 16]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let every_other: Vec<u32> = (0..128).map(|i| i * 2).collect();
    for (len, operations) in [(99, 1), (100, 128)] {
        let plan = plan(0, 0, 256, len, every_other.clone(), every_other.clone());
        assert_eq!((plan.runs(), plan.mean_run()), (128, Some(len)));
        assert_eq!(a_moves(&mut a, &b, peer, Direction::Read, plan), operations);
    }
    // Short blocks that merge into one run are not short.
    let ids: Vec<u32> = (0..64).collect();
    let plan = plan(0, 0, 64, 64, ids.clone(), ids);
    assert_eq!((plan.runs(), plan.mean_run()), (1, Some(4096)));
    assert_eq!(a.move_all(peer, Direction::Read, plan), 1);
    assert_eq!(CopyPlan::default().mean_run(), None);
}

/// The smallest window there is: every operation is over its byte limit and waits for the one before.
#[test]
fn a_window_of_one_moves_everything() {
    let settings = AgentConfig {
        peer_window: Window { operations: 1, bytes: 1 },
        total_window: Some(Window { operations: 1, bytes: 1 }),
        ..config("a", wire())
    };
    let mut a = Node::start(settings, 1, &[1 << 20]);
    let b = Node::start(config("b", wire()), 2, &[1 << 20]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let plan = plan(0, 0, 8192, 5000, Random(3).blocks(128, 128), Random(4).blocks(128, 128));
    a_moves(&mut a, &b, peer, Direction::Read, plan);
}

/// What the peer serves travels in chunks of many blocks, whatever their size: one is larger than a chunk, many fit
/// one, and their ends fall anywhere. Of long ones 15 at the most, which are sent from where they are;
/// short ones are gathered, half as many bytes to a chunk.
#[test]
fn served_chunks_hold_many_small_blocks_and_cut_large_ones() {
    let mut a = Node::start(config("a", Transport::Tcp), 1, &[3 << 20]);
    let b = Node::start(config("b", Transport::Tcp), 2, &[3 << 20]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let mut random = Random(9);
    for (stride, len, chunks) in
        [(3 << 20, (3 << 20) - 5, 6), (1 << 10, 1 << 10, 12), (64, 3, 17), (300_000, 299_999, 6), (20_000, 16_384, 11)]
    {
        let count = ((3 << 20) / stride) as u32;
        let ids = |random: &mut Random| random.blocks(count as usize, count);
        for direction in DIRECTIONS {
            let plan = plan(0, 0, stride, len, ids(&mut random), ids(&mut random));
            assert_eq!(a_moves(&mut a, &b, peer, direction, plan), chunks, "blocks of {len} bytes");
        }
    }
}

#[test]
fn a_region_that_its_owner_deregistered_is_refused_by_the_owner() {
    let mut a = Node::start(config("a", Transport::Tcp), 1, &[4096]);
    let mut b = Node::start(config("b", Transport::Tcp), 2, &[4096, 4096]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    // A hello would say it.
    a.wait_connected();
    b.wait_connected();
    b.agent.deregister(b.regions[0]).unwrap();
    for direction in DIRECTIONS {
        let id = a.agent.transfer(peer, direction, plan(0, 0, 4096, 4096, vec![0], vec![0]), 0).unwrap();
        let error = a.wait_done(id).0.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.message().contains("the peer refused"), "{error}");
    }
    let stats = a.agent.stats().unwrap();
    assert_eq!((stats.served_bytes, stats.bytes_read, stats.bytes_written), (0, 0, 0));
    assert_same("untouched", &a.contents(), &[pattern_bytes(1, 4096)]);
    assert_same("untouched there", &b.contents()[..1], &[pattern_bytes(2, 4096)]);
    a.move_all(peer, Direction::Read, plan(0, 1, 4096, 4096, vec![0], vec![0]));
    assert_same("the other region", &a.contents(), &b.contents()[1..]);
}

/// Threads spin for the next request or reply. A reader that has all that it asked for expects neither.
#[test]
fn a_reader_that_has_everything_sleeps_however_long_threads_spin() {
    let spins = AgentConfig { spin: Duration::from_secs(600), ..config("a", wire()) };
    let mut a = Node::start(spins, 1, &[1 << 20]);
    let b = Node::start(config("b", wire()), 2, &[1 << 20]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    for blocks in [1, 256] {
        a_moves(
            &mut a,
            &b,
            peer,
            Direction::Read,
            plan(0, 0, 4096, 4096, Random(5).blocks(blocks, 256), Random(6).blocks(blocks, 256)),
        );
        let before = a.agent.stats().unwrap().sleeps;
        until("the reader sleeps", || a.agent.stats().unwrap().sleeps > before);
    }
}

/// Replies are sent straight from the owner's memory. When its deregistration has returned, that memory is the owner's
/// again: what it writes there must not reach a reader whose transfer is good.
#[test]
fn a_deregistration_waits_for_the_replies_that_are_sent_from_the_region() {
    const LEN: usize = 16 << 20;
    let mut refused = 0;
    for round in 0..12u64 {
        let mut a = Node::start(config("a", Transport::Tcp), 1, &[LEN]);
        let b = Node::start(config("b", Transport::Tcp), 100 + round, &[LEN]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        let (mut local, mut remote) = (a.contents(), b.contents());
        let ids = Random(round + 1).blocks(LEN >> 14, (LEN >> 14) as u32);
        let plan = plan(0, 0, 1 << 14, 1 << 14, ids.clone(), ids);
        model(&plan, Direction::Read, &mut local, &mut remote);
        // Once before the first request, and then at different moments: at once, or when it has been asked for blocks.
        let id = if round == 0 {
            b.agent.deregister(b.regions[0]).unwrap();
            a.agent.transfer(peer, Direction::Read, plan, 0).unwrap()
        } else {
            let id = a.agent.transfer(peer, Direction::Read, plan, 0).unwrap();
            until("the first request", || round < 3 || a.agent.stats().unwrap().operations > 0);
            b.agent.deregister(b.regions[0]).unwrap();
            id
        };
        b.buffers[0].fill(999);
        match a.wait_done(id).0 {
            Ok(()) => assert_same("read", &a.contents(), &local),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
                refused += 1;
                // Blocks that came are the old ones.
                for (now, (old, new)) in a.contents()[0]
                    .chunks(1 << 14)
                    .zip(pattern_bytes(1, LEN).chunks(1 << 14).zip(local[0].chunks(1 << 14)))
                {
                    assert!(now == old || now == new, "a block that is neither what was here nor what was asked for");
                }
            }
        }
    }
    assert!(refused > 0, "no deregistration came before the last reply");
}

/// The order in which transfers end.
fn order(node: &mut Node, count: usize) -> Vec<TransferId> {
    (0..count)
        .map(|_| {
            node.wait_for("the end of a transfer", |event| match event {
                Event::TransferDone { id, result, .. } => {
                    result.as_ref().unwrap();
                    Some(*id)
                }
                _ => None,
            })
        })
        .collect()
}

#[test]
fn a_small_transfer_does_not_wait_for_a_large_one_before_it() {
    // The large one has 16 chunks of which 2 may be in flight.
    let settings = AgentConfig { peer_window: Window { operations: 2, bytes: 1 << 20 }, ..config("a", wire()) };
    let mut a = Node::start(settings, 1, &[8 << 20, 4096]);
    // It stands still until both are given.
    let b = Remote::spawn(wire(), 5, &[8 << 20, 4096]);
    b.signal("STOP");
    let peer = a.connect(&b.metadata);
    let ids: Vec<u32> = (0..4096).collect();
    let large = a.agent.transfer(peer, Direction::Read, plan(0, 0, 2048, 2000, ids.clone(), ids), 0).unwrap();
    let small = a.agent.transfer(peer, Direction::Read, plan(1, 1, 4096, 4096, vec![0], vec![0]), 0).unwrap();
    b.signal("CONT");
    assert_eq!(order(&mut a, 2), [small, large]);
    let there = [pattern_bytes(5, 8 << 20), pattern_bytes(6, 4096)];
    assert_same("small", &a.contents()[1..], &there[1..]);
    let (here, before) = (a.contents(), pattern_bytes(1, 8 << 20));
    for from in (0..8 << 20).step_by(2048) {
        assert_eq!(here[0][from..from + 2000], there[0][from..from + 2000], "block at {from}");
        assert_eq!(here[0][from + 2000..from + 2048], before[from + 2000..from + 2048], "gap at {from}");
    }
}

#[test]
fn the_end_of_a_transfer_has_what_was_given_with_it() {
    let mut a = Node::start(config("a", wire()), 1, &[1 << 20]);
    let b = Node::start(config("b", wire()), 2, &[1 << 20]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    // The second one is refused.
    for (user_data, region) in [(u64::MAX, 0), (7, 5), (7, 0), (0, 0)] {
        let plan = plan(0, region, 4096, 4096, vec![1], vec![2]);
        let id = a.agent.transfer(peer, Direction::Read, plan, user_data).unwrap();
        let (told, is_good) = a.wait_for("the end of a transfer", |event| match event {
            Event::TransferDone { id: ended, user_data, result, .. } if *ended == id => {
                Some((*user_data, result.is_ok()))
            }
            _ => None,
        });
        assert_eq!((told, is_good), (user_data, region == 0));
    }
}

#[test]
fn a_cancelled_transfer_ends_once_and_its_memory_stays_as_it_was_then() {
    for transport in transports() {
        let settings = AgentConfig { peer_window: Window { operations: 2, bytes: 1 << 20 }, ..config("a", transport) };
        let mut a = Node::start(settings, 1, &[16 << 20]);
        let mut b = Remote::spawn(transport, 2, &[16 << 20]);
        let peer = a.connect(&b.metadata);
        a.wait_connected();
        let ids: Vec<u32> = (0..16384).collect();
        // On a machine that is busy enough a transfer can end before it is cancelled; not every time.
        let cancelled = (0..100).find_map(|_| {
            let plan = plan(0, 0, 1024, 1023, ids.clone(), ids.clone());
            let id = a.agent.transfer(peer, Direction::Read, plan, 0).unwrap();
            let in_time = a.agent.cancel(id).is_ok();
            match a.wait_done(id) {
                (Err(error), bytes, _) => {
                    assert!(in_time);
                    assert_eq!(error.kind(), ErrorKind::Cancelled);
                    assert!(bytes <= 16384 * 1023);
                    Some(id)
                }
                (Ok(()), ..) => None,
            }
        });
        let id = cancelled.expect("one of many is cancelled in time");
        // Whatever the transfer left in flight would write what the memory does not hold now.
        a.buffers[0].fill(77);
        assert_eq!(a.agent.cancel(id).unwrap_err().kind(), ErrorKind::NotFound);
        a.move_all(peer, Direction::Write, plan(0, 0, 4096, 4096, vec![0], vec![3]));
        assert_same("local", &a.contents(), &[pattern_bytes(77, 16 << 20)]);
        let mut expected = pattern_bytes(2, 16 << 20);
        expected[3 * 4096..4 * 4096].copy_from_slice(&pattern_bytes(77, 4096));
        // Dumping 16 MiB as text is slow: read it back instead, into memory that holds something else.
        a.buffers[0].fill(78);
        a.move_all(peer, Direction::Read, plan(0, 0, 16 << 20, 16 << 20, vec![0], vec![0]));
        assert_same("remote", &a.contents(), &[expected]);
        let end = b.ask("end");
        assert_eq!(end, "ended");
    }
}

#[test]
fn deregistering_ends_the_transfers_that_use_the_region_and_spares_the_others() {
    let settings = AgentConfig { cancel_grace: Duration::from_millis(200), ..config("a", Transport::Tcp) };
    let mut a = Node::start(settings, 1, &[8 << 20, 1 << 20]);
    let b = Node::start(config("b", Transport::Tcp), 5, &[8 << 20, 1 << 20]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    a.wait_connected();
    // A peer that hangs, so that its transfer is in flight for as long as it may.
    let hanging = Remote::spawn(Transport::Tcp, 7, &[8 << 20]);
    let other = a.connect(&hanging.metadata);
    a.wait_connected();
    hanging.signal("STOP");
    let ids: Vec<u32> = (0..4096).collect();
    let doomed = a.agent.transfer(other, Direction::Read, plan(0, 0, 2048, 2000, ids.clone(), ids), 0).unwrap();
    until("a transfer in flight", || a.agent.stats().unwrap().operations_in_flight > 0);
    let spared = a.agent.transfer(peer, Direction::Read, plan(1, 1, 1 << 20, 1 << 20, vec![0], vec![0]), 0).unwrap();
    a.agent.deregister(a.regions[0]).unwrap();
    // From here on nothing writes region 0.
    a.buffers[0].fill(9);
    let (result, ..) = a.wait_done(doomed);
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(error.message().contains("deregistered"), "{error}");
    a.wait_done(spared).0.unwrap();
    hanging.signal("CONT");
    assert_same("region 0", &a.contents()[..1], &[pattern_bytes(9, 8 << 20)]);
    assert_same("region 1", &a.contents()[1..], &b.contents()[1..]);
    // The region's id, its index, and its place in the metadata are gone; region 1 keeps its index.
    assert_eq!(a.agent.deregister(a.regions[0]).unwrap_err().kind(), ErrorKind::NotFound);
    let id = a.agent.transfer(peer, Direction::Read, plan(0, 0, 1, 1, vec![0], vec![0]), 0).unwrap();
    assert_eq!(a.wait_done(id).0.unwrap_err().kind(), ErrorKind::NotFound);
    let metadata = a.agent.metadata().unwrap();
    assert_eq!(metadata.regions.len(), 2);
    assert_eq!((metadata.regions[0].len, metadata.regions[1].len), (0, 1 << 20));
    // A region that is registered now gets a new index, though it is the same memory.
    let again = a.agent.register(a.buffers[0].range(0, 4096)).unwrap();
    assert_eq!(again.index(), 2);
    a.move_all(peer, Direction::Read, plan(2, 0, 4096, 4096, vec![0], vec![5]));
    assert_eq!(a.contents()[0][..4096], b.contents()[0][5 * 4096..6 * 4096]);
}

#[test]
fn plans_that_leave_their_regions_move_nothing() {
    let mut a = Node::start(config("a", wire()), 1, &[64 << 10]);
    let b = Node::start(config("b", wire()), 2, &[32 << 10]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let (mut local, mut remote) = (a.contents(), b.contents());
    let good = |l, r| plan(0, 0, 4096, 4096, l, r);
    let cases = [
        (good(vec![16], vec![0]), ErrorKind::OutOfRange, "local block 16"),
        (good(vec![0, 1], vec![7, 8]), ErrorKind::OutOfRange, "remote block 8"),
        (good(vec![u32::MAX], vec![0]), ErrorKind::OutOfRange, "local block 4294967295"),
        (plan(0, 0, u64::MAX, 1, vec![2], vec![0]), ErrorKind::OutOfRange, "local block 2"),
        (plan(0, 0, 4096, 4097, vec![15], vec![0]), ErrorKind::OutOfRange, "local block 15"),
        (good(vec![0, 1], vec![0]), ErrorKind::InvalidArgument, "2 local and 1 remote"),
        (plan(1, 0, 1, 1, vec![0], vec![0]), ErrorKind::NotFound, "local region 1"),
        (plan(0, 1, 1, 1, vec![0], vec![0]), ErrorKind::NotFound, "region 1 of peer b"),
    ];
    for direction in DIRECTIONS {
        for (bad, kind, text) in cases.clone() {
            let id = a.agent.transfer(peer, direction, bad, 0).unwrap();
            let (result, bytes, operations) = a.wait_done(id);
            let error = result.unwrap_err();
            assert_eq!((error.kind(), bytes, operations), (kind, 0, 0), "{error}");
            assert!(error.message().contains(text), "{error}");
        }
    }
    // The peer is none the worse for it.
    let plan = good(vec![1, 2, 9], vec![7, 0, 3]);
    model(&plan, Direction::Read, &mut local, &mut remote);
    a.move_all(peer, Direction::Read, plan);
    assert_same("local", &a.contents(), &local);
    assert_same("remote", &b.contents(), &remote);
}

#[test]
fn stale_and_foreign_ids_are_not_found() {
    let a = Node::start(config("a", wire()), 1, &[4096]);
    let b = Node::start(config("b", wire()), 2, &[4096]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let one = || plan(0, 0, 1, 1, vec![0], vec![0]);
    let not_found = |result: kvferry::Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::NotFound);
    not_found(b.agent.send(peer, vec![1]));
    not_found(b.agent.disconnect(peer));
    not_found(b.agent.transfer(peer, Direction::Read, one(), 0).map(drop));
    not_found(b.agent.deregister(a.regions[0]));
    not_found(a.agent.cancel(TransferId::from_raw(peer.raw())));
    not_found(a.agent.cancel(TransferId::from_raw(0)));
    a.agent.disconnect(peer).unwrap();
    not_found(a.agent.disconnect(peer));
    not_found(a.agent.send(peer, vec![1]));
    not_found(a.agent.transfer(peer, Direction::Read, one(), 0).map(drop));
    let over = |result: kvferry::Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::ShutDown);
    let agent: &Agent = &a.agent;
    agent.shutdown(LIMIT).unwrap();
    over(agent.metadata().map(drop));
    over(agent.send(peer, vec![1]));
    over(agent.cancel(TransferId::from_raw(1)));
    over(agent.deregister(a.regions[0]));
    agent.shutdown(LIMIT).unwrap();
}

/// The message comes from the progress thread: nobody polls the agent whose transfer it is.
#[test]
fn a_message_follows_the_last_byte_without_a_poll() {
    for transport in transports() {
        let mut a = Node::start(config("a", transport), 1, &[1 << 20]);
        let mut b = Node::start(config("b", transport), 2, &[1 << 20]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        let ids: Vec<u32> = (0..256).collect();
        let everything = plan(0, 0, 4096, 4096, ids.clone(), ids);
        let id = a.agent.transfer_with(peer, Direction::Write, everything.clone(), b"written".to_vec(), 7).unwrap();
        assert_eq!(b.wait_message().1, b"written");
        assert_same("written", &b.contents(), &a.contents());
        a.wait_done(id).0.unwrap();
        // A transfer that fails sends none, and gives back its room in the send queue.
        let beyond = plan(0, 0, 4096, 4096, vec![256], vec![0]);
        for _ in 0..100 {
            let id = a.agent.transfer_with(peer, Direction::Write, beyond.clone(), vec![0; 1 << 20], 0).unwrap();
            assert_eq!(a.wait_done(id).0.unwrap_err().kind(), ErrorKind::OutOfRange);
        }
        a.agent.transfer_with(peer, Direction::Read, everything, b"read".to_vec(), 0).unwrap();
        assert_eq!(b.wait_message().1, b"read");
        a.agent.shutdown(LIMIT).unwrap();
        b.agent.shutdown(LIMIT).unwrap();
    }
}

#[test]
fn a_cancelled_transfer_can_be_waited_for_without_taking_events() {
    let mut a = Node::start(config("a", wire()), 1, &[8 << 20]);
    let b = Node::start(config("b", wire()), 2, &[8 << 20]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let ids: Vec<u32> = (0..2048).collect();
    let everything = plan(0, 0, 4096, 4096, ids.clone(), ids);
    for _ in 0..10 {
        let id = a.agent.transfer(peer, Direction::Read, everything.clone(), 0).unwrap();
        // It may be over already.
        let _ = a.agent.cancel(id);
        a.agent.wait_transfer(id, LIMIT).unwrap();
        a.agent.wait_transfer(id, Duration::ZERO).unwrap();
        assert!(a.wait_done(id).0.map_or_else(|error| error.kind() == ErrorKind::Cancelled, |()| true));
    }
    let id = a.agent.transfer(peer, Direction::Read, everything, 0).unwrap();
    a.agent.wait_transfer(id, LIMIT).unwrap();
    a.wait_done(id).0.unwrap();
}
