//! Agents with a key: those that share it move every byte; others, and captured or damaged messages, are dropped, and
//! a peer beside them goes on.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::agent::child::Remote;
use crate::common::agent::{LIMIT, Node, assert_same, config, model, plan, transports, until, wire};
use crate::common::keys::{self, key_file};
use crate::common::memory::pattern_bytes;
use crate::common::ucx::Side;
use kvferry::ErrorKind;
use kvferry::agent::{Agent, AgentConfig, Direction, Event, MAX_MESSAGE_BYTES, PeerId, Transport};
use kvferry::proto::wire::AgentMetadata;
use kvferry::ucx::Endpoint;

/// `key` 0: none, whatever the environment says.
fn keyed(name: &str, transport: Transport, key: u8) -> AgentConfig {
    let key_file = if key == 0 { PathBuf::new() } else { key_file(key) };
    AgentConfig { key_file: Some(key_file), ..config(name, transport) }
}

fn dropped(agent: &Agent) -> u64 {
    agent.stats().unwrap().messages_dropped
}

#[test]
fn with_one_key_every_message_and_transfer_arrives() {
    for transport in transports() {
        for gather_below in [0, u64::MAX] {
            let settings = AgentConfig { gather_below, verify: true, ..keyed("a", transport, 1) };
            let mut a = Node::start(settings, 1, &[3 << 20]);
            let path = key_file(1);
            let env = [("KVFERRY_KEY_FILE", path.to_str().unwrap())];
            let mut b = Remote::spawn_with(transport, 2, &[3 << 20], &env);
            let peer = a.connect(&b.metadata);
            // Before the peer has said anything: these wait for the channel.
            let sizes = [0, 1, 100, 65_479, 65_480, 300_000, MAX_MESSAGE_BYTES, 17];
            for (seed, len) in sizes.into_iter().enumerate() {
                a.agent.send(peer, pattern_bytes(seed as u64, len)).unwrap();
            }
            for (seed, len) in sizes.into_iter().enumerate() {
                let (from, mut data) = a.wait_message();
                data.reverse();
                assert_eq!(from, peer);
                assert!(data == pattern_bytes(seed as u64, len), "message {seed} of {len} bytes");
            }
            let mut random = crate::common::agent::Random(7);
            let mut expected = [a.contents(), b.contents()];
            for direction in [Direction::Read, Direction::Write] {
                let (local, remote) = (random.blocks(300, 700), random.blocks(300, 700));
                let plan = plan(0, 0, 4096, 3000, local, remote);
                let [mine, theirs] = &mut expected;
                model(&plan, direction, mine, theirs);
                a.move_all(peer, direction, plan);
            }
            assert_same("a", &a.contents(), &expected[0]);
            assert_same("b", &b.contents(), &expected[1]);
            assert_eq!(dropped(&a.agent), 0);
            b.end();
            a.agent.shutdown(LIMIT).unwrap();
        }
    }
}

#[test]
fn what_was_sent_before_the_end_arrives_sealed() {
    let mut other = Node::start(keyed("b", wire(), 1), 1, &[]);
    let node = Node::start(keyed("a", wire(), 1), 1, &[]);
    // Nothing can be sealed before the other one has answered.
    let peer = node.connect(&other.agent.metadata().unwrap());
    for part in 0..3u8 {
        node.agent.send(peer, vec![part]).unwrap();
    }
    node.agent.shutdown(LIMIT).unwrap();
    for part in 0..3u8 {
        assert_eq!(other.wait_message().1, [part]);
    }
}

#[test]
fn two_that_connect_at_once_agree_again_and_again() {
    for _ in 0..5 {
        let mut a = Node::start(keyed("a", wire(), 1), 1, &[4096]);
        let mut b = Node::start(keyed("b", wire(), 1), 2, &[4096]);
        let (of_a, of_b) = (a.agent.metadata().unwrap(), b.agent.metadata().unwrap());
        for round in 0..6u8 {
            let (a_agent, b_agent) = (a.agent.clone(), b.agent.clone());
            let (to_b, to_a) = std::thread::scope(|scope| {
                let a_connects = scope.spawn(|| a_agent.connect(&of_b).unwrap());
                let b_connects = scope.spawn(|| b_agent.connect(&of_a).unwrap());
                (a_connects.join().unwrap(), b_connects.join().unwrap())
            });
            assert_eq!(a.wait_connected().0, to_b, "round {round}");
            assert_eq!(b.wait_connected().0, to_a, "round {round}");
            a.agent.send(to_b, vec![1, round]).unwrap();
            b.agent.send(to_a, vec![3, round]).unwrap();
            assert_eq!(a.wait_message(), (to_b, vec![3, round]));
            assert_eq!(b.wait_message(), (to_a, vec![1, round]));
            a.move_all(to_b, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![0]));
            assert_eq!((a.agent.stats().unwrap().peers, b.agent.stats().unwrap().peers), (1, 1));
            // One of them leaves, and both connect again.
            let (leaver, id, other, its) =
                if round % 2 == 0 { (&mut a, to_b, &mut b, to_a) } else { (&mut b, to_a, &mut a, to_b) };
            leaver.agent.disconnect(id).unwrap();
            other.wait_lost(its);
        }
        assert!(a.events.is_empty() && b.events.is_empty(), "{:?} {:?}", a.events, b.events);
        assert_same("a", &a.contents(), &[pattern_bytes(2, 4096)]);
    }
}

/// With a key and TCP only, UCX has no part in reading and writing memory; on the other transports it has.
#[test]
fn agents_of_different_transports_work_together() {
    let mut pairs = vec![(Transport::Tcp, Transport::Shm)];
    // Where RDMA is tested, `auto` has nothing else.
    if wire() == Transport::Tcp {
        pairs.push((Transport::Auto, Transport::Tcp));
    }
    for (one, other) in pairs {
        let mut a = Node::start(keyed("a", one, 1), 1, &[1 << 20]);
        let mut b = Node::start(keyed("b", other, 1), 2, &[1 << 20]);
        let to_b = a.connect(&b.agent.metadata().unwrap());
        a.wait_connected();
        let (to_a, _) = b.wait_connected();
        assert_eq!(b.connect(&a.agent.metadata().unwrap()), to_a);
        let mut expected = [a.contents(), b.contents()];
        for direction in [Direction::Read, Direction::Write] {
            let plan = || plan(0, 0, 4096, 4000, vec![1, 200, 7], vec![9, 8, 100]);
            let [of_a, of_b] = &mut expected;
            model(&plan(), direction, of_a, of_b);
            a.move_all(to_b, direction, plan());
            model(&plan(), direction, of_b, of_a);
            b.move_all(to_a, direction, plan());
        }
        assert_same("a", &a.contents(), &expected[0]);
        assert_same("b", &b.contents(), &expected[1]);
        a.agent.send(to_b, vec![7; 100_000]).unwrap();
        assert_eq!(b.wait_message(), (to_a, vec![7; 100_000]));
    }
}

/// A stranger with nothing but UCX asks it to read and write an agent's memory.
#[test]
fn ucx_does_nothing_for_a_stranger_to_an_agent_with_a_key_over_tcp() {
    const LEN: usize = 1 << 20;
    for (key, serves) in [(0, true), (1, false)] {
        // UCX chooses between its emulation and what TCP offers by its threshold for rendezvous.
        for (write, threshold) in [(false, "auto"), (true, "auto"), (false, "inf"), (true, "inf")] {
            let b = Node::start(keyed("b", Transport::Tcp, key), 2, &[LEN]);
            let of_b = b.agent.metadata().unwrap();
            // Its address says how long its segments are, as those of agents do.
            let stranger = Side::new(&format!("tcp;ADDRESS_VERSION=v2;RNDV_THRESH={threshold};TCP_PUT_ENABLE=y"), LEN);
            stranger.buffer.fill(9);
            let endpoint = stranger.connect(&of_b.address);
            let rkey = endpoint.unpack_rkey(&of_b.regions[0].rkey).unwrap();
            for len in [64, LEN as u64] {
                let len = len as usize;
                if write {
                    endpoint.put(&rkey, rkey.base(), &stranger.memory, 0, len, 1).unwrap();
                } else {
                    endpoint.get(&rkey, rkey.base(), &stranger.memory, 0, len, 1).unwrap();
                }
            }
            // Behind it on the same connection: when this was dropped, the rest was taken up or not.
            endpoint.send_am(AM_ID, &[0; 32], vec![], 2).unwrap();
            let end = Instant::now() + LIMIT;
            let done = || {
                let at = if write { b.buffers[0].bytes() } else { stranger.buffer.read(0..LEN) };
                at == pattern_bytes(if write { 9 } else { 2 }, LEN)
            };
            while dropped(&b.agent) == 0 || (serves && !done()) {
                stranger.worker.progress();
                while stranger.worker.poll_completion().is_some() {}
                assert!(Instant::now() < end, "key {key}, write {write}");
            }
            assert_eq!(done(), serves, "key {key}, write {write}");
            if !serves {
                assert!(stranger.buffer.read(0..LEN) == pattern_bytes(9, LEN).as_slice());
                assert_same("b", &b.contents(), &[pattern_bytes(2, LEN)]);
            }
            // The agent lives.
            assert_eq!(b.agent.stats().unwrap().regions, 1);
        }
    }
}

#[test]
fn an_agent_with_a_key_can_be_its_own_peer() {
    for transport in transports() {
        let mut a = Node::start(keyed("a", transport, 1), 1, &[8192, 8192]);
        let peer = a.connect(&a.agent.metadata().unwrap());
        a.agent.send(peer, vec![9; 10]).unwrap();
        a.wait_connected();
        assert_eq!(a.wait_message(), (peer, vec![9; 10]));
        a.read_from_itself(peer);
    }
}

#[test]
fn another_key_or_none_does_not_connect_and_others_go_on() {
    for transport in transports() {
        for (ours, theirs) in [(1, 2), (1, 0), (0, 1)] {
            let mut b = Node::start(keyed("b", transport, theirs), 2, &[4096]);
            let mut good = Node::start(keyed("good", transport, theirs), 3, &[4096]);
            let of_b = b.agent.metadata().unwrap();
            let to_b = good.connect(&of_b);
            let mut ask = || {
                good.agent.send(to_b, b"well?".to_vec()).unwrap();
                let (from, data) = b.wait_message();
                b.agent.send(from, data).unwrap();
                assert_eq!(good.wait_message(), (to_b, b"well?".to_vec()));
            };
            ask();
            let settings = AgentConfig { connect_timeout: Duration::from_secs(2), ..keyed("a", transport, ours) };
            let mut a = Node::start(settings, 1, &[4096]);
            let peer = a.connect(&of_b);
            // On a busy machine the peer may be given up before these.
            let sent = a.agent.send(peer, b"let me in".to_vec());
            let read = a.agent.transfer(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![0]), 0);
            assert!(
                [sent.err(), read.as_ref().err().cloned()].iter().flatten().all(|e| e.kind() == ErrorKind::NotFound)
            );
            let error = a.wait_lost(peer);
            assert_eq!(error.kind(), ErrorKind::Unreachable);
            assert!(error.message().contains("key_file"), "{error}");
            if let Ok(read) = read {
                a.wait_done(read).0.unwrap_err();
            }
            ask();
            assert_same("a", &a.contents(), &[pattern_bytes(1, 4096)]);
            // One that was given up before UCX had a connection has sent no hello.
            for _ in 0..20 {
                if dropped(&b.agent) >= 1 {
                    break;
                }
                let again = a.connect(&of_b);
                a.wait_lost(again);
            }
            assert!(dropped(&b.agent) >= 1);
            assert_eq!(b.agent.stats().unwrap().peers, 1);
            assert!(!b.events.iter().any(|e| matches!(e, Event::Message { .. } | Event::PeerLost { .. })));
        }
    }
}

/// Stands between an agent that connects and the one that it means: gets the one's frames, passes them on as it likes.
struct Middle {
    side: Side,
    to: Endpoint,
    /// Header and data of what came.
    frames: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The agents' active message id.
const AM_ID: u16 = 0x4b;

impl Middle {
    fn new(to: &AgentMetadata) -> Middle {
        let side = Side::new("tcp;ADDRESS_VERSION=v2", 64);
        side.worker.accept_messages(AM_ID, None).unwrap();
        let to = side.connect(&to.address);
        Middle { side, to, frames: Vec::new() }
    }

    /// `metadata` with this in place of its owner.
    fn instead_of(&self, metadata: &AgentMetadata) -> AgentMetadata {
        AgentMetadata { address: self.side.worker.address().unwrap(), ..metadata.clone() }
    }

    fn drive(&mut self) {
        while self.side.worker.progress() {}
        while let Some(message) = self.side.worker.poll_message() {
            self.frames.push((message.header, message.data));
        }
        while self.side.worker.poll_completion().is_some() {}
    }

    /// Waits for the frame number `index` of kind `kind`.
    fn frame(&mut self, kind: u8, index: usize) -> (Vec<u8>, Vec<u8>) {
        let end = Instant::now() + LIMIT;
        loop {
            self.drive();
            if let Some(found) = self.frames.iter().filter(|(header, _)| header[5] == kind).nth(index) {
                return found.clone();
            }
            assert!(Instant::now() < end, "no frame of kind {kind}: {:?}", self.frames);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends a frame on, and waits until `arrived`.
    fn send(&mut self, header: &[u8], data: &[u8], what: &str, mut arrived: impl FnMut() -> bool) {
        self.to.send_am(AM_ID, header, data.to_vec(), 1).unwrap();
        let end = Instant::now() + LIMIT;
        while !arrived() {
            self.drive();
            assert!(Instant::now() < end, "{what}");
        }
    }

    /// Sends a frame that must be dropped.
    fn refused(&mut self, header: &[u8], data: &[u8], by: &Agent, what: &str) {
        let before = dropped(by);
        self.send(header, data, what, || dropped(by) > before);
        assert_eq!(dropped(by), before + 1, "{what}");
    }
}

const HELLO: u8 = 10;
const SEALED: u8 = 12;

/// Sends a frame with each byte of its header changed, and its data changed and cut at places of every kind.
fn refuse_damaged(middle: &mut Middle, frame: &(Vec<u8>, Vec<u8>), by: &Agent) {
    let (header, data) = frame;
    for at in 0..header.len() {
        let mut bad = header.clone();
        bad[at] ^= 1;
        middle.refused(&bad, data, by, &format!("header byte {at}"));
    }
    middle.refused(&header[..31], data, by, "a short header");
    let end = data.len();
    for at in [0, 1, 15, 16, 31, 32, 40, end / 2, end - 17, end - 16, end - 1] {
        let mut bad = data.clone();
        bad[at] ^= 0x80;
        middle.refused(header, &bad, by, &format!("byte {at} of {end}"));
        middle.refused(header, &data[..at], by, &format!("cut at {at} of {end}"));
    }
    middle.refused(header, &[data.as_slice(), &[0]].concat(), by, "a byte too many");
}

#[test]
fn captured_and_damaged_messages_are_dropped() {
    let mut b = Node::start(keyed("b", Transport::Tcp, 1), 2, &[4096]);
    let mut good = Node::start(keyed("good", Transport::Tcp, 1), 3, &[4096]);
    let of_b = b.agent.metadata().unwrap();
    let from_good = good.connect(&of_b);
    let (to_good, _) = b.wait_connected();
    let mut middle = Middle::new(&of_b);
    let mut a = Node::start(keyed("a", Transport::Tcp, 1), 1, &[4096]);
    let to_b = a.connect(&middle.instead_of(&of_b));
    let hello = middle.frame(HELLO, 0);
    refuse_damaged(&mut middle, &hello, &b.agent);
    assert_eq!(b.agent.stats().unwrap().peers, 1);

    // Untouched it is taken, once.
    let agent = b.agent.clone();
    middle.send(&hello.0, &hello.1, "the hello", || agent.stats().unwrap().peers == 2);
    let (to_a, name) = b.wait_connected();
    assert_eq!((name.as_str(), a.wait_connected().0), ("a", to_b));
    middle.refused(&hello.0, &hello.1, &b.agent, "the hello again");

    for (index, len) in [1usize, 70_000].into_iter().enumerate() {
        let message = pattern_bytes(9, len);
        a.agent.send(to_b, message.clone()).unwrap();
        let sealed = middle.frame(SEALED, index);
        assert!(len < 8 || !sealed.1.windows(8).any(|bytes| bytes == &message[..8]));
        refuse_damaged(&mut middle, &sealed, &b.agent);
        let received = || agent.stats().unwrap().messages_received;
        let before = received();
        middle.send(&sealed.0, &sealed.1, "a message", || received() > before);
        assert_eq!(b.wait_message(), (to_a, message));
        middle.refused(&sealed.0, &sealed.1, &b.agent, "a message again");
    }
    // Nothing of all that disturbed the connection, nor the other one.
    let works = |from: &mut Node, peer: PeerId, to: &mut Node, id: PeerId| {
        from.agent.send(peer, vec![5; 100]).unwrap();
        assert_eq!(to.wait_message(), (id, vec![5; 100]));
    };
    works(&mut b, to_a, &mut a, to_b);
    works(&mut good, from_good, &mut b, to_good);
    assert!(b.events.is_empty() && a.events.is_empty(), "{:?} {:?}", a.events, b.events);

    // After a restart of b, what was captured before is for somebody who is gone; so it is for another agent.
    let sealed = middle.frame(SEALED, 1);
    // First who does not answer b's own closing.
    drop(middle);
    b.agent.shutdown(LIMIT).unwrap();
    let next = Node::start(keyed("b", Transport::Tcp, 1), 2, &[4096]);
    let mut to_next = Middle::new(&next.agent.metadata().unwrap());
    to_next.refused(&hello.0, &hello.1, &next.agent, "a hello of the life before");
    to_next.refused(&sealed.0, &sealed.1, &next.agent, "a message of the life before");
    to_next.refused(&hello.0[..], &[], &next.agent, "an empty hello");
    assert_eq!(next.agent.stats().unwrap().peers, 0);
}

/// Both hellos are under way before either arrives, in both orders of arrival.
#[test]
fn where_both_connect_at_once_the_lower_incarnation_began() {
    const ANSWER: u8 = 11;
    for lower_first in [true, false] {
        let one = Node::start(keyed("one", Transport::Tcp, 1), 1, &[]);
        let two = Node::start(keyed("two", Transport::Tcp, 1), 2, &[]);
        let (mut low, mut high) =
            if one.agent.incarnation() < two.agent.incarnation() { (one, two) } else { (two, one) };
        let (of_low, of_high) = (low.agent.metadata().unwrap(), high.agent.metadata().unwrap());
        let (mut from_low, mut from_high) = (Middle::new(&of_high), Middle::new(&of_low));
        let to_high = low.connect(&from_low.instead_of(&of_high));
        let to_low = high.connect(&from_high.instead_of(&of_low));
        let (of_low, of_high) = (from_low.frame(HELLO, 0), from_high.frame(HELLO, 0));
        let to_the_lower = |from_high: &mut Middle| {
            from_high.send(&of_high.0, &of_high.1, "a hello", || true);
            // Behind it: so it was looked at.
            from_high.refused(&[0; 32], &[], &low.agent, "a frame of zeros");
            assert_eq!(low.agent.stats().unwrap().messages_dropped, 1);
        };
        if lower_first {
            to_the_lower(&mut from_high);
        }
        from_low.send(&of_low.0, &of_low.1, "a hello", || {
            from_high.drive();
            from_high.frames.iter().any(|(header, _)| header[5] == ANSWER)
        });
        let answer = from_high.frame(ANSWER, 0);
        assert_eq!(high.wait_connected().0, to_low);
        if !lower_first {
            to_the_lower(&mut from_high);
        }
        assert!(low.agent.poll_event().is_none());
        from_high.send(&answer.0, &answer.1, "the answer", || true);
        from_high.refused(&answer.0, &answer.1, &low.agent, "the answer again");
        assert_eq!(low.wait_connected().0, to_high);
        low.agent.send(to_high, b"up".to_vec()).unwrap();
        high.agent.send(to_low, b"down".to_vec()).unwrap();
        let (up, down) = (from_low.frame(SEALED, 0), from_high.frame(SEALED, 0));
        let received = |by: &Node| by.agent.stats().unwrap().messages_received == 1;
        from_low.send(&up.0, &up.1, "a message", || received(&high));
        assert_eq!(high.wait_message(), (to_low, b"up".to_vec()));
        from_high.send(&down.0, &down.1, "a message", || received(&low));
        assert_eq!(low.wait_message(), (to_high, b"down".to_vec()));
        from_low.drive();
        assert!(from_low.frames.iter().all(|(header, _)| header[5] != ANSWER), "the lower one answered, too");
        assert_eq!((low.events.len(), high.events.len()), (0, 0));
    }
}

#[test]
fn frames_in_clear_are_dropped_by_an_agent_with_a_key_and_sealed_ones_by_one_without() {
    let with = Node::start(keyed("with", Transport::Tcp, 1), 2, &[4096]);
    let without = Node::start(keyed("without", Transport::Tcp, 0), 2, &[4096]);
    for (target, other_key) in [(&with, 0), (&without, 1)] {
        let metadata = target.agent.metadata().unwrap();
        let mut middle = Middle::new(&metadata);
        let a = Node::start(keyed("a", Transport::Tcp, other_key), 1, &[4096]);
        a.connect(&middle.instead_of(&metadata));
        let (header, data) = middle.frame(if other_key == 0 { 1 } else { HELLO }, 0);
        for kind in 0..=20 {
            let mut header = header.clone();
            header[5] = kind;
            // A hello in clear is what an agent without a key takes; this one is not.
            middle.refused(&header, &data, &target.agent, &format!("kind {kind}"));
        }
        until("nobody is connected", || target.agent.stats().unwrap().peers == 0);
    }
}

#[test]
fn a_key_file_that_cannot_be_used_is_an_error_at_the_start() {
    let loose = key_file(1);
    fs::set_permissions(&loose, fs::Permissions::from_mode(0o644)).unwrap();
    let short = keys::file("abcd");
    for (path, kind, text) in [
        (PathBuf::from("/no/such/key"), ErrorKind::Io, "kvferry key"),
        (loose, ErrorKind::InvalidArgument, "chmod 600"),
        (short, ErrorKind::InvalidArgument, "64 hexadecimal digits"),
    ] {
        let settings = AgentConfig { key_file: Some(path), ..config("a", wire()) };
        let error = Agent::start(settings).err().unwrap();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(text) && error.message().contains("key_file"), "{error}");
    }
}
