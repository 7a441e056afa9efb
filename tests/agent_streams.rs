//! Reads by streams: every byte, when they are used and when not, and what ends them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use common::agent::child::{NO_STREAMS, Remote, serve};
use common::agent::{LIMIT, Node, Random, assert_same, config, model, plan, until};
use common::keys::key_file;
use common::memory::pattern_bytes;
use kvferry::ErrorKind;
use kvferry::agent::{AgentConfig, Direction, PeerId, TransferId, Transport, encode_metadata};
use kvferry::proto::plan::{BlockPair, CopyPlan, Segment};

#[test]
#[ignore = "the other process of this file's tests"]
fn child_process() {
    serve();
}

const LEN: usize = 16 << 20;

/// Ports that this process listens at are looked for, so one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn node(name: &str, seed: u64) -> Node {
    Node::start(config(name, Transport::Tcp), seed, &[LEN])
}

/// All blocks of `bytes`, from and to places of no order; what does not fill a block stays.
fn shuffled(random: &mut Random, bytes: usize) -> CopyPlan {
    let blocks = LEN / bytes;
    let mut ids = || random.blocks(blocks, blocks as u32);
    plan(0, 0, bytes as u64, bytes as u64, ids(), ids())
}

/// Reads until bytes come by a stream: it is made while the first come by messages.
fn until_streamed(a: &mut Node, peer: PeerId, random: &mut Random) {
    let before = a.agent.stats().unwrap().streamed_bytes;
    until("a stream", || {
        a.move_all(peer, Direction::Read, shuffled(random, 64 << 10));
        a.agent.stats().unwrap().streamed_bytes > before
    });
}

/// A read of which bytes have been asked for by a stream.
fn begun(a: &Node, peer: PeerId, random: &mut Random) -> TransferId {
    let before = a.agent.stats().unwrap().operations;
    let id = a.agent.transfer(peer, Direction::Read, shuffled(random, 4096), 0).unwrap();
    until("the first requests", || a.agent.stats().unwrap().operations > before + 1);
    id
}

#[test]
fn every_byte_of_blocks_of_any_length_arrives_in_its_place() {
    let _alone = alone();
    let mut random = Random(61);
    let mut a = node("a", 1);
    let b = node("b", 2);
    let peer = a.connect(&b.agent.metadata().unwrap());
    until_streamed(&mut a, peer, &mut random);
    // Shorter than pages, with ends in the middle of pages, whole ones, longer than a chunk.
    for (bytes, seed) in [(512, 10), (2047, 11), (4096, 12), (5001, 13), (65_536, 14), (700_001, 15), (LEN, 16)] {
        a.buffers[0].fill(seed);
        b.buffers[0].fill(seed + 100);
        let before = a.agent.stats().unwrap();
        let (mut local, mut remote) = (a.contents(), b.contents());
        let plan = shuffled(&mut random, bytes);
        model(&plan, Direction::Read, &mut local, &mut remote);
        let moved = common::agent::model_bytes(&plan);
        a.move_all(peer, Direction::Read, plan);
        assert_same(&format!("local, blocks of {bytes}"), &a.contents(), &local);
        assert_same("remote", &b.contents(), &remote);
        let after = a.agent.stats().unwrap();
        assert_eq!(after.streamed_bytes - before.streamed_bytes, moved, "blocks of {bytes}");
        assert_eq!(after.served_bytes, before.served_bytes);
        assert_eq!((after.operations_in_flight, after.bytes_in_flight), (0, 0));
    }
    // Writes and short reads go by messages.
    let before = a.agent.stats().unwrap();
    let (mut local, mut remote) = (a.contents(), b.contents());
    let written = shuffled(&mut random, 4096);
    model(&written, Direction::Write, &mut local, &mut remote);
    a.move_all(peer, Direction::Write, written);
    assert_same("remote", &b.contents(), &remote);
    a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![1], vec![2]));
    assert_eq!(a.agent.stats().unwrap().streamed_bytes, before.streamed_bytes);
}

#[test]
fn one_read_of_several_regions_puts_every_byte_in_its_region() {
    let _alone = alone();
    let mut random = Random(70);
    let lens = [LEN, 5 << 20, 3 << 20];
    let mut a = Node::start(config("a", Transport::Tcp), 1, &lens);
    let b = Node::start(config("b", Transport::Tcp), 11, &lens);
    let peer = a.connect(&b.agent.metadata().unwrap());
    until_streamed(&mut a, peer, &mut random);
    let mut all = plan(0, 1, 0, 0, vec![], vec![]);
    let parts = [(0, 1, 4096), (1, 2, 5001), (2, 0, 65_536), (1, 0, 700), (0, 0, 12_288), (2, 2, 9999)];
    all.lists.clear();
    let mut segments = Vec::new();
    for (list, (local, remote, bytes)) in parts.into_iter().enumerate() {
        let blocks = lens[local as usize].min(lens[remote as usize]) / bytes;
        let part = plan(local, remote, bytes as u64, bytes as u64, vec![], vec![]);
        let mut ids = || random.blocks(blocks, blocks as u32);
        all.lists.push(BlockPair { local: ids().into(), remote: ids().into() });
        segments.extend(part.segments.iter().map(|segment| Segment { list: list as u32, ..*segment }));
    }
    all.segments = segments.into();
    let before = a.agent.stats().unwrap().streamed_bytes;
    let (mut local, mut remote) = (a.contents(), b.contents());
    model(&all, Direction::Read, &mut local, &mut remote);
    let moved = a.agent.transfer(peer, Direction::Read, all, 0).unwrap();
    let (result, bytes, _) = a.wait_done(moved);
    result.unwrap();
    assert_same("local", &a.contents(), &local);
    assert_eq!(a.agent.stats().unwrap().streamed_bytes - before, bytes);
}

#[test]
fn both_sides_read_from_each_other_and_one_from_several_at_once() {
    let _alone = alone();
    let mut random = Random(62);
    let mut a = Node::start(config("a", Transport::Tcp), 1, &[LEN, LEN, LEN]);
    let mut others: Vec<Node> = (0..3).map(|at| node(&format!("b{at}"), 20 + at)).collect();
    let peers: Vec<PeerId> = others.iter().map(|other| a.connect(&other.agent.metadata().unwrap())).collect();
    for peer in &peers {
        until_streamed(&mut a, *peer, &mut random);
    }
    let back = others[0].connect(&a.agent.metadata().unwrap());
    until_streamed(&mut others[0], back, &mut random);
    let seed = 40;
    others.iter().zip(seed..).for_each(|(other, seed)| other.buffers[0].fill(seed));
    let ids: Vec<u32> = (0..(LEN / 4096) as u32).collect();
    let started: Vec<TransferId> = (0u32..)
        .zip(&peers)
        .map(|(region, peer)| {
            let plan = plan(region, 0, 4096, 4096, ids.clone(), ids.clone());
            a.agent.transfer(*peer, Direction::Read, plan, 0).unwrap()
        })
        .collect();
    for id in started {
        a.wait_done(id).0.unwrap();
    }
    let expected: Vec<Vec<u8>> = (seed..seed + 3).map(|seed| pattern_bytes(seed, LEN)).collect();
    assert_same("of three peers", &a.contents(), &expected);
    others[0].move_all(back, Direction::Read, plan(0, 1, 4096, 4096, ids.clone(), ids));
    assert_same("back", &others[0].contents(), &expected[1..2]);
}

#[test]
fn a_side_that_wants_none_gets_none_and_neither_does_one_with_a_key() {
    let _alone = alone();
    let mut random = Random(63);
    let key = key_file(0x5a);
    let none = |name: &str| AgentConfig { streams: false, ..config(name, Transport::Tcp) };
    let keyed = |name: &str| AgentConfig { key_file: Some(key.clone()), ..config(name, Transport::Tcp) };
    let both = |name: &str| config(name, Transport::Tcp);
    for (first, second) in [(none("a"), both("b")), (both("a"), none("b")), (keyed("a"), keyed("b"))] {
        let mut a = Node::start(first, 1, &[LEN]);
        let b = Node::start(second, 2, &[LEN]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        for _ in 0..3 {
            a.move_all(peer, Direction::Read, shuffled(&mut random, 4096));
        }
        let stats = a.agent.stats().unwrap();
        assert_eq!((stats.streamed_bytes, stats.served_bytes), (0, 3 * LEN as u64));
    }
}

#[test]
fn nothing_is_written_any_more_when_a_read_was_cancelled_or_its_memory_deregistered() {
    let _alone = alone();
    let mut random = Random(64);
    let mut a = node("a", 1);
    let b = node("b", 2);
    let peer = a.connect(&b.agent.metadata().unwrap());
    until_streamed(&mut a, peer, &mut random);
    let (mut cancelled, mut seed) = (0, 10);
    // On a machine that is busy enough a transfer can end before it is cancelled; not every time.
    while cancelled < 3 && seed < 200 {
        let id = begun(&a, peer, &mut random);
        let in_time = a.agent.cancel(id).is_ok();
        let (result, _, _) = a.wait_done(id);
        seed += 1;
        a.buffers[0].fill(seed);
        if let Err(error) = result {
            assert!(in_time && error.kind() == ErrorKind::Cancelled, "{error}");
            cancelled += 1;
        }
        // The stream goes on, behind what came of the cancelled one.
        assert_same("after the end", &a.contents(), &[pattern_bytes(seed, LEN)]);
        until_streamed(&mut a, peer, &mut random);
    }
    assert_eq!(cancelled, 3, "of many, three are cancelled in time");
    let id = begun(&a, peer, &mut random);
    a.deregister_under(id);
}

#[test]
fn a_deregistration_waits_for_the_reader_to_have_what_was_lent_and_refuses_the_rest() {
    let _alone = alone();
    let mut random = Random(65);
    let mut failed = 0;
    for round in 0..100 {
        if failed == 3 {
            break;
        }
        let mut a = node("a", 1);
        let b = Node::start(config("b", Transport::Tcp), 2, &[LEN, LEN]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        until_streamed(&mut a, peer, &mut random);
        a.buffers[0].fill(1);
        let plan = shuffled(&mut random, 16 << 10);
        let (mut local, mut remote) = (a.contents(), b.contents());
        model(&plan, Direction::Read, &mut local, &mut remote);
        let before = a.agent.stats().unwrap().streamed_bytes;
        let id = a.agent.transfer(peer, Direction::Read, plan, 0).unwrap();
        until("the first bytes", || a.agent.stats().unwrap().streamed_bytes > before);
        b.agent.deregister(b.regions[0]).unwrap();
        // From now on the memory is its owner's.
        b.buffers[0].fill(999);
        match a.wait_done(id).0 {
            Ok(()) => assert_same("read in time", &a.contents(), &local),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
                failed += 1;
                // Blocks that came are the old ones.
                let (got, old) = (a.contents(), pattern_bytes(1, LEN));
                for ((got, old), new) in
                    got[0].chunks(16 << 10).zip(old.chunks(16 << 10)).zip(local[0].chunks(16 << 10))
                {
                    assert!(got == old || got == new, "a block that is neither what was here nor what was asked for");
                }
            }
        }
        // The other region is served as before, by the same stream.
        let ids: Vec<u32> = (0..(LEN / 4096) as u32).collect();
        let before = a.agent.stats().unwrap().streamed_bytes;
        a.move_all(peer, Direction::Read, common::agent::plan(0, 1, 4096, 4096, ids.clone(), ids));
        assert_same(&format!("round {round}"), &a.contents(), &[pattern_bytes(3, LEN)]);
        assert_eq!(a.agent.stats().unwrap().streamed_bytes - before, LEN as u64);
    }
    assert_eq!(failed, 3, "of many, three fail");
}

#[test]
fn what_was_lent_stays_registered_while_its_reader_stands_still() {
    const BLOCK: usize = 16 << 10;
    let _alone = alone();
    // It stands still for as long as the machine lets this test wait, and is not lost for that.
    let patient = AgentConfig { cancel_grace: LIMIT, deregister_timeout: LIMIT, ..config("b", Transport::Tcp) };
    let b = Node::start(patient, 2, &[LEN]);
    let mut reader = Remote::spawn(Transport::Tcp, 3, &[LEN]);
    assert_eq!(reader.ask(&format!("pages 4 {}", metadata_hex(&b))), "reading");
    reader.signal("STOP");
    let (agent, region) = (b.agent.clone(), b.regions[0]);
    let (told, over) = channel();
    let deregistering = thread::spawn(move || told.send(agent.deregister(region)).unwrap());
    // It may be over by now only if nothing was lent. If it were in spite of that, the reader would find what follows.
    let early = over.recv_timeout(Duration::from_secs(1)).ok();
    if early.is_some() {
        b.buffers[0].fill(999);
    }
    reader.signal("CONT");
    early.unwrap_or_else(|| over.recv_timeout(LIMIT).unwrap()).unwrap();
    deregistering.join().unwrap();
    b.buffers[0].fill(999);
    assert_eq!(reader.ask("settle"), "settled");
    let (got, own, lent) = (reader.contents().remove(0), pattern_bytes(3, LEN), pattern_bytes(2, LEN));
    let blocks = got.chunks(BLOCK).zip(own.chunks(BLOCK)).zip(lent.chunks(BLOCK));
    for (block, ((got, own), lent)) in blocks.enumerate() {
        let read = 3 * BLOCK / 4;
        // Chunks may end within a block.
        let known = got[..read].iter().zip(own).zip(lent).all(|((got, own), lent)| got == own || got == lent);
        assert!(known, "block {block} has bytes of after the end");
        assert!(got[read..] == own[read..], "block {block}: what was not asked for");
    }
    reader.end();
}

fn metadata_hex(node: &Node) -> String {
    let metadata = encode_metadata(&node.agent.metadata().unwrap()).unwrap();
    metadata.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes that the kernel has yet to send, or to hear of, from these ports, whether or not a process still has the socket.
fn unsent(from: &BTreeSet<u16>) -> u64 {
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let rows = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| from.contains(&u16::from_str_radix(row[1].split_once(':').unwrap().1, 16).unwrap()))
        // The queue of a listener counts connections.
        .filter(|row| row[3] != "0A")
        .map(|row| u64::from_str_radix(row[4].split_once(':').unwrap().0, 16).unwrap())
        .sum()
}

/// A reader in another process that has asked `owner` for much by a stream and stands still, and the ports of the stream.
fn still_reader(owner: &Node) -> (Remote, BTreeSet<u16>) {
    let before = ports();
    let mut reader = Remote::spawn(Transport::Tcp, 3, &[LEN]);
    for _ in 0..100 {
        assert_eq!(reader.ask(&format!("pages 32 {}", metadata_hex(owner))), "reading");
        reader.signal("STOP");
        let doors = ports().difference(&before).copied().collect();
        // All may have been read before it stood still, on a machine that is busy with something else.
        for _ in 0..100 {
            if unsent(&doors) > 0 {
                return (reader, doors);
            }
            thread::sleep(Duration::from_millis(1));
        }
        reader.signal("CONT");
    }
    panic!("of many, none stands still in time");
}

#[test]
fn a_closed_stream_leaves_the_kernel_nothing_to_send_of_what_was_lent() {
    let _alone = alone();
    let mut b = node("b", 2);
    let (mut reader, doors) = still_reader(&b);
    let (peer, _) = b.wait_connected();
    b.agent.disconnect(peer).unwrap();
    b.agent.deregister(b.regions[0]).unwrap();
    assert_eq!(unsent(&doors), 0, "bytes of memory that is its owner's again are still to be sent");
    reader.signal("CONT");
    assert_eq!(reader.ask("settle"), "settled");
    reader.end();
}

#[test]
fn a_reader_that_stands_still_is_lost_and_the_memory_given_up() {
    let _alone = alone();
    let impatient =
        || AgentConfig { cancel_grace: Duration::from_millis(300), streams: true, ..config("b", Transport::Tcp) };
    let mut b = Node::start(impatient(), 2, &[LEN, 4096]);
    let (mut reader, doors) = still_reader(&b);
    let (peer, _) = b.wait_connected();
    b.agent.deregister(b.regions[0]).unwrap();
    assert_eq!(unsent(&doors), 0);
    let error = b.wait_lost(peer);
    assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");
    assert!(error.message().contains("region 0"), "{error}");
    reader.signal("CONT");
    assert_eq!(reader.ask("settle"), "settled");
    reader.end();

    // Messages, of which UCX holds the memory until they are sent: with sockets that hold less than what is asked for.
    let mut config = AgentConfig { streams: false, ..impatient() };
    config.ucx.insert("TCP_SNDBUF".to_owned(), "32k".to_owned());
    let mut b = Node::start(config, 2, &[LEN, 4096]);
    let mut reader = Remote::spawn_with(Transport::Tcp, 3, &[LEN], &[(NO_STREAMS, "1"), ("UCX_TCP_RCVBUF", "32k")]);
    // More than is read before it stops.
    assert_eq!(reader.ask(&format!("pages 500 {}", metadata_hex(&b))), "reading");
    reader.signal("STOP");
    let (peer, _) = b.wait_connected();
    b.agent.deregister(b.regions[0]).unwrap();
    b.buffers[0].fill(999);
    let error = b.wait_lost(peer);
    assert!(error.message().contains("region 0"), "{error}");
    reader.kill();
    // Whoever reads something else goes on.
    let mut a = node("a", 1);
    let peer = a.connect(&b.agent.metadata().unwrap());
    a.move_all(peer, Direction::Read, plan(0, 1, 4096, 4096, vec![0], vec![0]));
}

#[test]
fn a_peer_that_dies_while_it_sends_fails_the_read_and_nothing_else() {
    let _alone = alone();
    let mut random = Random(66);
    let mut a = node("a", 1);
    let mut died = 0;
    for round in 0..100 {
        if died == 2 {
            break;
        }
        let b = Remote::spawn(Transport::Tcp, 50 + round, &[LEN]);
        let peer = a.connect(&b.metadata);
        until_streamed(&mut a, peer, &mut random);
        let id = begun(&a, peer, &mut random);
        b.kill();
        if let Err(error) = a.wait_done(id).0 {
            assert_eq!(error.kind(), ErrorKind::PeerDied, "{error}");
            died += 1;
        }
        a.wait_lost(peer);
        let stats = a.agent.stats().unwrap();
        assert_eq!((stats.operations_in_flight, stats.bytes_in_flight, stats.transfers), (0, 0, 0));
    }
    assert_eq!(died, 2, "of many, two die in time");
}

#[test]
fn a_reader_that_dies_or_stands_still_holds_up_nobody() {
    let _alone = alone();
    let mut random = Random(67);
    let mut b = node("b", 2);
    let metadata = b.agent.metadata().unwrap();
    let hex: String =
        kvferry::agent::encode_metadata(&metadata).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut still = Remote::spawn(Transport::Tcp, 3, &[LEN]);
    assert_eq!(still.ask(&format!("read {hex}")), "reading");
    let (gone, _) = b.wait_connected();
    still.signal("STOP");
    let mut a = node("a", 1);
    let peer = a.connect(&metadata);
    for _ in 0..3 {
        until_streamed(&mut a, peer, &mut random);
    }
    still.kill();
    b.wait_lost(gone);
    until_streamed(&mut a, peer, &mut random);
}

/// The ports at which this process listens for TCP.
fn ports() -> BTreeSet<u16> {
    let sockets: BTreeSet<String> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter_map(|fd| {
            fs::read_link(fd.path()).ok()?.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned)
        })
        .collect();
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // Listening is state 0A; the tenth field is the socket's inode.
            let listens = fields.get(3) == Some(&"0A") && fields.get(9).is_some_and(|inode| sockets.contains(*inode));
            listens.then(|| u16::from_str_radix(fields[1].split_once(':').unwrap().1, 16).unwrap())
        })
        .collect()
}

#[test]
fn strangers_get_nothing_and_are_sent_away() {
    let _alone = alone();
    let mut random = Random(68);
    let mut a = node("a", 1);
    let b = node("b", 2);
    let peer = a.connect(&b.agent.metadata().unwrap());
    a.wait_connected();
    let before = ports();
    until_streamed(&mut a, peer, &mut random);
    let doors: Vec<u16> = ports().difference(&before).copied().collect();
    assert!(!doors.is_empty(), "the agent that was asked listens");
    for door in doors {
        let address = ["127.0.0.1".to_owned()]
            .into_iter()
            .chain(kvferry::net::local_addresses().unwrap().into_iter().map(|address| address.ip.to_string()))
            .find_map(|ip| TcpStream::connect((ip.as_str(), door)).ok().map(|stream| stream.peer_addr().unwrap()))
            .unwrap();
        // A ticket that nobody was given, another protocol, the beginning of a greeting and then nothing.
        let greeting = [b"KVFS\x01\0\0\0".as_slice(), &[7; 16]].concat();
        for said in
            [greeting.as_slice(), b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n", b"KVFS\x02\0\0\0++++++++++++++++", b"KV"]
        {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.set_read_timeout(Some(LIMIT)).unwrap();
            stranger.write_all(said).unwrap();
            let mut answer = Vec::new();
            // Closed in order, or by force where it had said more than was read.
            let _ = stranger.read_to_end(&mut answer);
            assert!(answer.is_empty(), "{said:?} is answered {answer:?}");
        }
        // More than are heard at a time, who say nothing.
        let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
        until_streamed(&mut a, peer, &mut random);
        for mut stranger in silent {
            stranger.set_read_timeout(Some(LIMIT + Duration::from_secs(10))).unwrap();
            assert_eq!(stranger.read(&mut [0]).unwrap_or(0), 0);
        }
    }
    until_streamed(&mut a, peer, &mut random);
}

/// A range of ports that are free, above those that the kernel gives out by itself as it is usually set.
fn free_range(len: u16) -> (u16, u16) {
    let fits = |first: u16| {
        let held: Vec<_> = (first..first + len).map_while(|port| TcpListener::bind(("0.0.0.0", port)).ok()).collect();
        held.len() == usize::from(len)
    };
    let first = (61_500..65_000).step_by(usize::from(len)).find(|first| fits(*first)).expect("free ports in a row");
    (first, first + len - 1)
}

#[test]
fn streams_keep_to_the_ports_that_ucx_is_given_and_messages_carry_all_where_none_is_left() {
    let _alone = alone();
    let mut random = Random(69);
    let (first, last) = free_range(32);
    let ranged = |name: &str, seed| {
        let mut config = config(name, Transport::Tcp);
        config.ucx.insert("TCP_PORT_RANGE".to_owned(), format!("{first}-{last}"));
        Node::start(config, seed, &[LEN])
    };
    let before = ports();
    let mut a = ranged("a", 1);
    let b = ranged("b", 2);
    let peer = a.connect(&b.agent.metadata().unwrap());
    until_streamed(&mut a, peer, &mut random);
    let ours: BTreeSet<u16> = ports().difference(&before).copied().collect();
    assert!(ours.len() >= 3, "two of UCX and one of the streams: {ours:?}");
    assert!(ours.iter().all(|port| (first..=last).contains(port)), "{ours:?} outside of {first}-{last}");

    // What is left of the range is taken by another process, as it may be on a host of many agents.
    let c = ranged("c", 3);
    let local = kvferry::net::local_addresses().unwrap();
    let addresses = || local.iter().map(|address| address.ip).chain([IpAddr::from([0, 0, 0, 0])]);
    let _taken: Vec<TcpListener> =
        (first..=last).flat_map(|port| addresses().filter_map(move |ip| TcpListener::bind((ip, port)).ok())).collect();
    let other = a.connect(&c.agent.metadata().unwrap());
    let (sent, listening) = (a.agent.stats().unwrap(), ports());
    for seed in 20..23 {
        a.buffers[0].fill(seed);
        c.buffers[0].fill(seed + 100);
        let (mut local, mut remote) = (a.contents(), c.contents());
        let plan = shuffled(&mut random, 4096);
        model(&plan, Direction::Read, &mut local, &mut remote);
        a.move_all(other, Direction::Read, plan);
        assert_same("local", &a.contents(), &local);
    }
    assert_eq!(a.agent.stats().unwrap().streamed_bytes, sent.streamed_bytes);
    assert_eq!(ports(), listening);
}
