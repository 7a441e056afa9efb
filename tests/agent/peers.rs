//! Connections and messages between agents: hellos, order, death, reconnection, bad metadata.

use std::time::{Duration, Instant};

use crate::common::agent::child::Remote;
use crate::common::agent::{LIMIT, Node, assert_same, config, plan, transports, until, wire};
use crate::common::memory::{hex, pattern_bytes};
use kvferry::ErrorKind;
use kvferry::agent::Window;
use kvferry::agent::{
    AgentConfig, Direction, Event, MAX_MESSAGE_BYTES, TransferId, Transport, decode_metadata, encode_metadata,
};
use kvferry::proto::wire::AgentMetadata;

const SIZES: [usize; 9] = [0, 1, 100, 5000, 70_000, 300_000, 1 << 20, 4 << 20, 17];

#[test]
fn messages_of_all_sizes_arrive_in_order_both_ways_between_processes() {
    for transport in transports() {
        let mut a = Node::start(config("a", transport), 1, &[]);
        let b = Remote::spawn(transport, 2, &[]);
        let peer = a.connect(&b.metadata);
        for (seed, len) in SIZES.into_iter().enumerate() {
            a.agent.send(peer, pattern_bytes(seed as u64, len)).unwrap();
        }
        for (seed, len) in SIZES.into_iter().enumerate() {
            let (from, mut data) = a.wait_message();
            data.reverse();
            assert_eq!(from, peer);
            assert!(data == pattern_bytes(seed as u64, len), "message {seed} of {len} bytes");
        }
        let stats = a.agent.stats().unwrap();
        assert_eq!((stats.messages_sent, stats.messages_received, stats.messages_dropped), (9, 9, 0));
        b.end();
        a.agent.shutdown(LIMIT).unwrap();
    }
}

#[test]
fn the_side_that_is_connected_to_learns_who_it_is_and_can_answer_and_read() {
    let mut a = Node::start(config("the one", wire()), 1, &[8192]);
    let mut b = Node::start(config("the other", wire()), 2, &[8192]);
    let to_b = a.connect(&b.agent.metadata().unwrap());
    assert_eq!(a.wait_connected(), (to_b, "the other".to_owned()));
    let (to_a, name) = b.wait_connected();
    assert_eq!(name, "the one");
    b.agent.send(to_a, b"hello there".to_vec()).unwrap();
    assert_eq!(a.wait_message(), (to_b, b"hello there".to_vec()));
    // Without a's metadata b knows no region of it; with it, the peer is the same.
    let id = b.agent.transfer(to_a, Direction::Read, plan(0, 0, 1, 1, vec![0], vec![0]), 0).unwrap();
    assert_eq!(b.wait_done(id).0.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(b.connect(&a.agent.metadata().unwrap()), to_a);
    b.move_all(to_a, Direction::Read, plan(0, 0, 4096, 4096, vec![1], vec![0]));
    let mut expected = [pattern_bytes(1, 8192), pattern_bytes(2, 8192)];
    let first: Vec<u8> = expected[0][..4096].to_vec();
    expected[1][4096..].copy_from_slice(&first);
    assert_same("a", &a.contents(), &expected[..1]);
    assert_same("b", &b.contents(), &expected[1..]);
    assert_eq!((a.agent.stats().unwrap().peers, b.agent.stats().unwrap().peers), (1, 1));
}

#[test]
fn two_that_connect_to_each_other_at_once_have_one_connection() {
    for round in 0..10 {
        let mut a = Node::start(config("a", wire()), 1, &[]);
        let mut b = Node::start(config("b", wire()), 2, &[]);
        let (of_a, of_b) = (a.agent.metadata().unwrap(), b.agent.metadata().unwrap());
        let (a_agent, b_agent) = (a.agent.clone(), b.agent.clone());
        let (to_b, to_a) = std::thread::scope(|scope| {
            let a_connects = scope.spawn(|| a_agent.connect(&of_b).unwrap());
            let b_connects = scope.spawn(|| b_agent.connect(&of_a).unwrap());
            (a_connects.join().unwrap(), b_connects.join().unwrap())
        });
        assert_eq!(a.wait_connected().0, to_b, "round {round}");
        assert_eq!(b.wait_connected().0, to_a, "round {round}");
        a.agent.send(to_b, vec![1, 2]).unwrap();
        b.agent.send(to_a, vec![3]).unwrap();
        assert_eq!(a.wait_message(), (to_b, vec![3]));
        assert_eq!(b.wait_message(), (to_a, vec![1, 2]));
        assert_eq!((a.agent.stats().unwrap().peers, b.agent.stats().unwrap().peers), (1, 1));
        assert!(a.events.is_empty() && b.events.is_empty(), "{:?} {:?}", a.events, b.events);
    }
}

/// UCX's transport `self` connects no two workers, so the warm-up fails.
#[test]
fn an_agent_that_cannot_warm_up_starts_all_the_same() {
    let mut config = config("a", Transport::Auto);
    config.ucx.insert("TLS".to_owned(), "self".to_owned());
    assert!(config.warm_up);
    let a = Node::start(config, 1, &[8192, 8192]);
    assert_eq!(a.agent.metadata().unwrap().regions.len(), 2);
    let stats = a.agent.stats().unwrap();
    assert_eq!((stats.regions, stats.endpoints, stats.messages_dropped), (2, 0, 0));
    a.agent.shutdown(LIMIT).unwrap();
}

#[test]
fn an_agent_can_be_its_own_peer() {
    for transport in transports() {
        let mut a = Node::start(config("a", transport), 1, &[8192, 8192]);
        let peer = a.connect(&a.agent.metadata().unwrap());
        a.wait_connected();
        a.agent.send(peer, vec![9; 10]).unwrap();
        assert_eq!(a.wait_message(), (peer, vec![9; 10]));
        a.read_from_itself(peer);
    }
}

#[test]
fn a_killed_peer_fails_its_transfers_and_its_successor_works() {
    for transport in transports() {
        let settings = AgentConfig { peer_window: Window { operations: 2, bytes: 1 << 20 }, ..config("a", transport) };
        let mut a = Node::start(settings, 1, &[8 << 20]);
        let b = Remote::spawn(transport, 2, &[8 << 20]);
        let peer = a.connect(&b.metadata);
        a.wait_connected();
        let ids: Vec<u32> = (0..8192).collect();
        let long = || plan(0, 0, 1024, 1000, ids.clone(), ids.clone());
        let before = a.agent.transfer(peer, Direction::Read, long(), 0).unwrap();
        let also = a.agent.transfer(peer, Direction::Write, long(), 0).unwrap();
        b.kill();
        let error = a.wait_lost(peer);
        assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");
        for id in [before, also] {
            // Whether it was still moving when the peer died is up to the machine; that it ends is not.
            if let (Err(error), ..) = a.wait_done(id) {
                assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");
            }
        }
        assert_eq!(a.agent.send(peer, vec![1]).unwrap_err().kind(), ErrorKind::NotFound);
        // A new process with the same memory is a new peer.
        let mut c = Remote::spawn(transport, 3, &[8 << 20]);
        let successor = a.connect(&c.metadata);
        assert_ne!(successor, peer);
        a.move_all(successor, Direction::Read, plan(0, 0, 8 << 20, 8 << 20, vec![0], vec![0]));
        assert_same("after", &a.contents(), &[pattern_bytes(3, 8 << 20)]);
        assert_eq!(c.ask("end"), "ended");
    }
}

/// The peer is stopped before it is met. UCX's event fd is readable all the time then, for nothing.
#[test]
fn a_peer_that_does_not_answer_keeps_the_thread_asleep() {
    let settings = AgentConfig { connect_timeout: LIMIT, ..config("a", wire()) };
    let mut a = Node::start(settings, 1, &[64 << 10]);
    let b = Remote::spawn(wire(), 2, &[64 << 10]);
    b.signal("STOP");
    let peer = a.connect(&b.metadata);
    let (begun, before) = (Instant::now(), a.agent.stats().unwrap().turns);
    std::thread::sleep(Duration::from_secs(2));
    let turns = a.agent.stats().unwrap().turns - before;
    // While the hello is on its way, the thread sleeps in steps of a millisecond.
    let steps = u64::try_from(begun.elapsed().as_millis()).unwrap();
    assert!(turns < 500 + 2 * steps, "{turns} turns in {steps} ms");
    b.signal("CONT");
    a.wait_connected();
    a.move_all(peer, Direction::Read, plan(0, 0, 64 << 10, 64 << 10, vec![0], vec![0]));
    assert_same("after", &a.contents(), &[pattern_bytes(2, 64 << 10)]);
}

/// The peer stops (SIGSTOP) instead of dying: nothing notices, and only force ends the operations in flight.
#[test]
fn a_cancelled_transfer_with_a_peer_that_hangs_is_ended_by_force() {
    let settings = AgentConfig { cancel_grace: Duration::from_millis(200), ..config("a", Transport::Tcp) };
    let mut a = Node::start(settings, 1, &[64 << 10]);
    let b = Remote::spawn(Transport::Tcp, 2, &[64 << 10]);
    let peer = a.connect(&b.metadata);
    a.wait_connected();
    b.signal("STOP");
    let id = a.agent.transfer(peer, Direction::Read, plan(0, 0, 64 << 10, 64 << 10, vec![0], vec![0]), 0).unwrap();
    // In flight: it was posted before the cancellation.
    until("a transfer in flight", || a.agent.stats().unwrap().operations_in_flight > 0);
    a.agent.cancel(id).unwrap();
    assert_eq!(a.wait_done(id).0.unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(a.wait_lost(peer).kind(), ErrorKind::PeerDied);
    a.buffers[0].fill(5);
    b.signal("CONT");
    // It heals by connecting again; what the peer sends for the old connection touches nothing.
    let again = a.connect(&b.metadata);
    a.move_all(again, Direction::Read, plan(0, 0, 1024, 1024, vec![3], vec![4]));
    let mut expected = pattern_bytes(5, 64 << 10);
    expected[3072..4096].copy_from_slice(&pattern_bytes(2, 64 << 10)[4096..5120]);
    assert_same("after", &a.contents(), &[expected]);
    b.end();
}

/// Peers that are stopped keep in flight what was asked of them: more than all peers may share.
#[test]
fn silent_peers_leave_room_for_others() {
    const LEN: usize = 4 << 20;
    let shared = Window { operations: 256, bytes: 4 << 20 };
    let mut a = Node::start(AgentConfig { total_window: Some(shared), ..config("a", Transport::Tcp) }, 1, &[LEN; 4]);
    let remotes: Vec<Remote> = (2..6).map(|seed| Remote::spawn(Transport::Tcp, seed, &[LEN])).collect();
    let peers = remotes.iter().map(|remote| a.connect(&remote.metadata)).collect::<Vec<_>>();
    peers.iter().for_each(|_| drop(a.wait_connected()));
    let silent = &remotes[..3];
    silent.iter().for_each(|remote| remote.signal("STOP"));
    let ids = || (0..LEN as u32 >> 16).rev().collect::<Vec<u32>>();
    let whole = |region| plan(region, 0, 1 << 16, 1 << 16, ids(), ids());
    let waiting: Vec<TransferId> = (0..3)
        .map(|region| a.agent.transfer(peers[region as usize], Direction::Read, whole(region), 0).unwrap())
        .collect();
    until("the shared window is full", || a.agent.stats().unwrap().bytes_in_flight >= shared.bytes);
    a.move_all(peers[3], Direction::Read, plan(3, 0, 4096, 4096, vec![7], vec![9]));
    let mut expected: Vec<Vec<u8>> = (1..5).map(|seed| pattern_bytes(seed, LEN)).collect();
    expected[3][7 * 4096..8 * 4096].copy_from_slice(&pattern_bytes(5, LEN)[9 * 4096..10 * 4096]);
    assert_same("a small read", &a.contents(), &expected);
    a.move_all(peers[3], Direction::Read, whole(3));
    expected[3] = pattern_bytes(5, LEN);
    assert_same("a large read", &a.contents(), &expected);
    assert_eq!(a.agent.stats().unwrap().transfers, 3, "the others stand still");
    silent.iter().for_each(|remote| remote.signal("CONT"));
    waiting.into_iter().for_each(|id| a.wait_done(id).0.unwrap());
    let all: Vec<Vec<u8>> = (2..6).map(|seed| pattern_bytes(seed, LEN)).collect();
    assert_same("after", &a.contents(), &all);
    a.agent.shutdown(LIMIT).unwrap();
}

#[test]
fn a_disconnected_side_loses_the_peer_and_both_can_connect_again() {
    let mut a = Node::start(config("a", wire()), 1, &[4096]);
    let mut b = Node::start(config("b", wire()), 2, &[4096]);
    let of_b = b.agent.metadata().unwrap();
    let mut last = None;
    for _ in 0..3 {
        let to_b = a.connect(&of_b);
        assert_ne!(Some(to_b), last);
        last = Some(to_b);
        a.wait_connected();
        let (to_a, _) = b.wait_connected();
        a.agent.send(to_b, vec![7]).unwrap();
        assert_eq!(b.wait_message(), (to_a, vec![7]));
        a.agent.disconnect(to_b).unwrap();
        assert_eq!(b.wait_lost(to_a).kind(), ErrorKind::PeerDied);
    }
    assert!(a.events.is_empty(), "{:?}", a.events);
}

#[test]
fn an_agent_that_is_gone_is_unreachable() {
    let mut a = Node::start(config("a", wire()), 1, &[4096]);
    let gone = {
        let b = Node::start(config("b", wire()), 2, &[4096]);
        let metadata = b.agent.metadata().unwrap();
        b.agent.shutdown(LIMIT).unwrap();
        metadata
    };
    // UCX may notice at once or in the background.
    let peer = match a.agent.connect(&gone) {
        Ok(peer) => peer,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
            assert!(error.message().contains("is it running"), "{error}");
            return;
        }
    };
    let started = a.agent.transfer(peer, Direction::Read, plan(0, 0, 1, 1, vec![0], vec![0]), 0);
    assert_eq!(a.wait_lost(peer).kind(), ErrorKind::Unreachable);
    // Lost while it waited, before it was taken up, or before it was given.
    let kind = match started {
        Ok(id) => a.wait_done(id).0.unwrap_err().kind(),
        Err(error) => error.kind(),
    };
    assert!(matches!(kind, ErrorKind::Unreachable | ErrorKind::PeerDied | ErrorKind::NotFound), "{kind:?}");
}

/// The address answers, but is not that of the expected incarnation: nothing is read from it.
#[test]
fn metadata_of_an_earlier_life_never_reaches_the_present_one() {
    let settings = AgentConfig { connect_timeout: Duration::from_millis(500), ..config("a", wire()) };
    let mut a = Node::start(settings, 1, &[4096]);
    let b = Node::start(config("b", wire()), 2, &[4096]);
    let mut stale = b.agent.metadata().unwrap();
    stale.incarnation.0 ^= 1;
    let peer = a.connect(&stale);
    // On a busy machine the peer may be given up before this.
    let started = a.agent.transfer(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![0]), 0);
    assert_eq!(a.wait_lost(peer).kind(), ErrorKind::Unreachable);
    match started {
        Ok(id) => assert_eq!(a.wait_done(id).0.unwrap_err().kind(), ErrorKind::Unreachable),
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
    }
    assert_same("untouched", &a.contents(), &[pattern_bytes(1, 4096)]);
}

#[test]
fn damaged_and_foreign_metadata_is_refused_with_the_reason() {
    let a = Node::start(config("a", wire()), 1, &[4096]);
    let b = Node::start(config("b", wire()), 2, &[4096]);
    let good = b.agent.metadata().unwrap();
    let bytes = encode_metadata(&good).unwrap();
    assert_eq!(decode_metadata(&bytes).unwrap(), good);
    for cut in 0..bytes.len() {
        assert!(decode_metadata(&bytes[..cut]).is_err(), "cut to {cut}");
    }
    assert_eq!(decode_metadata(b"PK\x03\x04 something else").unwrap_err().kind(), ErrorKind::Corrupt);
    // In the oldest version: whoever gets it is not known yet.
    for version in [b"\xa7version\x03", b"\xa7version\x06"] {
        let other: Vec<u8> = replace(&bytes, b"\xa7version\x04", version);
        let error = decode_metadata(&other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
        assert!(error.message().contains("this build versions 4 to 5"), "{error}");
    }

    let refuse = |change: &dyn Fn(&mut AgentMetadata), kind: ErrorKind, text: &str| {
        let mut bad = good.clone();
        change(&mut bad);
        let error = a.agent.connect(&bad).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(text), "{error}");
    };
    refuse(&|m| m.address.clear(), ErrorKind::Corrupt, "worker address");
    refuse(&|m| m.address[20] ^= 1, ErrorKind::Corrupt, "checksum");
    refuse(&|m| m.regions[0].rkey.truncate(10), ErrorKind::Corrupt, "region 0");
    refuse(&|m| m.regions[0].rkey[30] ^= 0x80, ErrorKind::Corrupt, "checksum");
    refuse(&|m| m.regions[0].rkey = m.address.clone(), ErrorKind::Corrupt, "they are a worker address");
    refuse(&|m| m.regions[0].len += 1, ErrorKind::Corrupt, "4097 bytes");
    refuse(&|m| m.regions[0].base -= 4096, ErrorKind::Corrupt, "the rkey inside says");
    refuse(&|m| m.name.clear(), ErrorKind::Corrupt, "name");
    refuse(&|m| m.incarnation.0 = 0, ErrorKind::Corrupt, "incarnation");
    // None of them left a connection behind, and the good one works.
    assert_eq!(a.agent.stats().unwrap().peers, 0);
    a.connect(&good);
}

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

#[test]
fn messages_over_the_limits_are_refused_and_smaller_ones_go_on() {
    let settings = AgentConfig { send_queue_bytes: 1 << 20, ..config("a", wire()) };
    let mut a = Node::start(settings, 1, &[]);
    let b = Remote::spawn(wire(), 2, &[]);
    let peer = a.connect(&b.metadata);
    a.wait_connected();
    let error = a.agent.send(peer, vec![0; MAX_MESSAGE_BYTES + 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("16777217"), "{error}");
    // A peer that takes nothing: the queue fills up.
    b.signal("STOP");
    let refused = (0..1000u32).find_map(|i| a.agent.send(peer, vec![i as u8; 600 << 10]).err().map(|error| (i, error)));
    let (count, error) = refused.expect("the queue has a bound");
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    b.signal("CONT");
    for i in 0..count {
        assert!(a.wait_message().1 == vec![i as u8; 600 << 10], "message {i}");
    }
    a.agent.send(peer, vec![42]).unwrap();
    assert_eq!(a.wait_message().1, [42]);
    b.end();
}

#[test]
fn every_event_of_a_lost_peer_comes_once() {
    let mut a = Node::start(config("a", wire()), 1, &[4096]);
    let b = Remote::spawn(wire(), 2, &[4096]);
    let peer = a.connect(&b.metadata);
    a.wait_connected();
    b.kill();
    a.wait_lost(peer);
    a.agent.shutdown(LIMIT).unwrap();
    let rest: Vec<Event> = std::iter::from_fn(|| a.agent.wait_event(LIMIT)).collect();
    assert!(rest.is_empty() && a.events.is_empty(), "{rest:?} {:?}", a.events);
}

/// UCX holds the memory until what it sends of it is sent: here by sockets that hold less than what is asked for.
#[test]
fn a_reader_that_stands_still_is_lost_and_the_memory_given_up() {
    const LEN: usize = 16 << 20;
    let mut config = AgentConfig { cancel_grace: Duration::from_millis(300), ..config("b", Transport::Tcp) };
    config.ucx.insert("TCP_SNDBUF".to_owned(), "32k".to_owned());
    let mut b = Node::start(config, 2, &[LEN, 4096]);
    let mut reader = Remote::spawn_with(Transport::Tcp, 3, &[LEN], &[("UCX_TCP_RCVBUF", "32k")]);
    let metadata = hex(&encode_metadata(&b.agent.metadata().unwrap()).unwrap());
    // More than is read before it stops.
    assert_eq!(reader.ask(&format!("pages 500 {metadata}")), "reading");
    reader.signal("STOP");
    let (peer, _) = b.wait_connected();
    b.agent.deregister(b.regions[0]).unwrap();
    b.buffers[0].fill(999);
    let error = b.wait_lost(peer);
    assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");
    assert!(error.message().contains("region 0"), "{error}");
    reader.kill();
    // Whoever reads something else goes on.
    let mut a = Node::start(crate::common::agent::config("a", Transport::Tcp), 1, &[LEN]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    a.move_all(peer, Direction::Read, plan(0, 1, 4096, 4096, vec![0], vec![0]));
}

#[test]
fn a_consumer_that_dies_while_it_reads_leaves_the_producer_alive() {
    for transport in transports() {
        let mut producer = Remote::spawn(transport, 1, &[1 << 20]);
        for round in 0..6 {
            let mut consumer = Remote::spawn(transport, 2, &[1 << 20]);
            assert_eq!(consumer.ask(&format!("read {}", producer.metadata_hex())), "reading");
            if round % 2 == 1 {
                // Requests pile up in the producer's socket, as when it is busy.
                producer.signal("STOP");
                std::thread::sleep(Duration::from_millis(50));
            }
            consumer.kill();
            if round % 2 == 1 {
                producer.signal("CONT");
            }
            assert_same("producer", &producer.contents(), &[pattern_bytes(1, 1 << 20)]);
        }
        assert_eq!(producer.ask("end"), "ended");
    }
}
