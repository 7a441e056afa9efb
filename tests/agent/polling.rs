//! Callers that poll without a pause, which drive their agent in the progress thread's place.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::common::agent::{LIMIT, Node, assert_same, config, plan, transports};
use crate::common::memory::pattern_bytes;
use kvferry::ErrorKind;
use kvferry::agent::{Agent, Direction, Event, PeerId, Transport};

const LEN: usize = 1 << 20;
const BLOCK: usize = 4096;
const ROUNDS: u32 = 400;

/// Polls without a pause for the next event.
fn poll(agent: &Agent) -> Event {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(event) = agent.poll_event() {
            return event;
        }
        assert!(Instant::now() < end, "no event");
    }
}

/// Sends back what comes, one more in its first byte, until that was 255 in an otherwise empty message.
fn echo(agent: &Agent) {
    loop {
        if let Event::Message { peer, mut data } = poll(agent) {
            if data == [255] {
                return;
            }
            data[0] = data[0].wrapping_add(1);
            agent.send(peer, data).unwrap();
        }
    }
}

fn ask(a: &Node, peer: PeerId, round: u32) {
    let mut message = round.to_le_bytes().repeat(16);
    a.agent.send(peer, message.clone()).unwrap();
    let Event::Message { data, .. } = poll(&a.agent) else { panic!("another event") };
    message[0] = message[0].wrapping_add(1);
    assert_eq!(data, message);
}

#[test]
fn messages_and_transfers_arrive_whole_and_in_order_while_both_sides_poll() {
    for transport in transports() {
        let a = Node::start(config("a", transport), 1, &[LEN]);
        let mut b = Node::start(config("b", transport), 2, &[LEN]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        let Event::PeerConnected { .. } = poll(&a.agent) else { panic!("another event") };
        std::thread::scope(|scope| {
            let other = b.agent.clone();
            scope.spawn(move || echo(&other));
            let theirs = pattern_bytes(2, LEN);
            for round in 0..ROUNDS {
                ask(&a, peer, round);
                // Some small, a few of a length that the progress thread moves, among the messages.
                let len = match round {
                    _ if round % 100 == 99 => LEN,
                    _ if round % 7 == 0 => BLOCK,
                    _ => continue,
                };
                let blocks = (LEN / len) as u32;
                let (here, there) = (round % blocks, round * 31 % blocks);
                let plan = plan(0, 0, len as u64, len as u64, vec![here], vec![there]);
                let id = a.agent.transfer(peer, Direction::Read, plan, u64::from(round)).unwrap();
                let Event::TransferDone { id: done, user_data, result, bytes, .. } = poll(&a.agent) else {
                    panic!("another event")
                };
                assert_eq!((done, user_data, result, bytes), (id, u64::from(round), Ok(()), len as u64));
                let (here, there) = (here as usize * len, there as usize * len);
                assert!(a.contents()[0][here..][..len] == theirs[there..][..len], "round {round}");
            }
            a.agent.send(peer, vec![255]).unwrap();
        });
        // Nobody polls any more: the progress threads serve whoever sleeps.
        std::thread::sleep(Duration::from_millis(5));
        a.agent.send(peer, vec![1, 2, 3]).unwrap();
        assert_eq!(b.wait_message().1, [1, 2, 3]);
        let plan = plan(0, 0, LEN as u64, LEN as u64, vec![0], vec![0]);
        let id = a.agent.transfer(peer, Direction::Write, plan, 0).unwrap();
        a.agent.wait_transfer(id, LIMIT).unwrap();
        assert_same("written", &b.contents(), &a.contents());
    }
}

#[test]
fn many_threads_poll_and_post_until_the_agent_is_shut_down() {
    for transport in transports() {
        let a = Node::start(config("a", transport), 1, &[LEN]);
        let b = Node::start(config("b", transport), 2, &[LEN]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        let (stops, open) = (AtomicBool::new(false), AtomicU32::new(0));
        std::thread::scope(|scope| {
            let pollers: Vec<_> = (0..2u32)
                .map(|thread| {
                    let (agent, stops, open) = (a.agent.clone(), &stops, &open);
                    scope.spawn(move || {
                        let mut begun = 0u32;
                        while !stops.load(Ordering::Relaxed) {
                            if open.load(Ordering::Relaxed) < 8 {
                                let plan = plan(0, 0, BLOCK as u64, BLOCK as u64, vec![thread], vec![begun % 200]);
                                match agent.transfer(peer, Direction::Read, plan, 7) {
                                    Ok(_) => {
                                        begun += 1;
                                        open.fetch_add(1, Ordering::Relaxed);
                                    }
                                    Err(error) => assert!(
                                        [ErrorKind::ShutDown, ErrorKind::NotFound].contains(&error.kind()),
                                        "{error}"
                                    ),
                                }
                            }
                            if let Some(Event::TransferDone { user_data, .. }) = agent.poll_event() {
                                assert_eq!(user_data, 7);
                                open.fetch_sub(1, Ordering::Relaxed);
                            }
                        }
                    })
                })
                .collect();
            // Cold calls are answered meanwhile.
            for _ in 0..20 {
                assert!(a.agent.stats().unwrap().transfers_failed == 0);
                let buffer = crate::common::memory::Buffer::patterned(3, BLOCK);
                let region = a.agent.register(buffer.range(0, BLOCK)).unwrap();
                a.agent.deregister(region).unwrap();
            }
            a.agent.shutdown(LIMIT).unwrap();
            stops.store(true, Ordering::Relaxed);
            pollers.into_iter().for_each(|poller| poller.join().unwrap());
        });
        // Each transfer has its event, whoever took it.
        let left =
            std::iter::from_fn(|| a.agent.poll_event()).filter(|e| matches!(e, Event::TransferDone { .. })).count();
        assert_eq!(open.load(Ordering::Relaxed), left as u32);
    }
}

/// Over TCP, the answer to each read is taken from UCX in some turn after the read was posted. So where there were fewer turns
/// of the progress thread than reads, the caller has driven the engine, and the thread has stood aside.
#[test]
fn the_progress_thread_stands_aside_for_a_caller_that_polls() {
    let a = Node::start(config("a", Transport::Tcp), 1, &[LEN]);
    let b = Node::start(config("b", Transport::Tcp), 2, &[LEN]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let theirs = pattern_bytes(2, LEN);
    let blocks = (LEN / BLOCK) as u32;
    let end = Instant::now() + LIMIT;
    for stretch in 0.. {
        let there = |here: u32| (stretch + here * 31) % blocks;
        let before = a.agent.stats().unwrap();
        for here in 0..blocks {
            let plan = plan(0, 0, BLOCK as u64, BLOCK as u64, vec![here], vec![there(here)]);
            let id = a.agent.transfer(peer, Direction::Read, plan, 0).unwrap();
            let done = loop {
                match poll(&a.agent) {
                    Event::TransferDone { id: done, result: Ok(()), .. } => break done,
                    Event::PeerConnected { .. } => {}
                    other => panic!("{other:?}"),
                }
            };
            assert_eq!(done, id);
        }
        let after = a.agent.stats().unwrap();
        let expected: Vec<u8> =
            (0..blocks).flat_map(|here| &theirs[there(here) as usize * BLOCK..][..BLOCK]).copied().collect();
        assert_same("read", &a.contents(), &[expected]);
        assert_eq!(after.served_bytes - before.served_bytes, LEN as u64, "the reads went by messages");
        // A caller that seldom gets a processor does not poll without a pause.
        let turns = after.turns - before.turns;
        if turns < u64::from(blocks) / 2 {
            return;
        }
        assert!(Instant::now() < end, "the progress thread had {turns} turns while a caller polled for {blocks} reads");
    }
}
