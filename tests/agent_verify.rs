//! Reads that are checked against the peer's own digest.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod agent_support;

use std::time::Instant;

use agent_support::{LIMIT, Node, RICH, Random, assert_same, config, model, plan, rich_plan};
use kvferry::ErrorKind;
use kvferry::agent::{AgentConfig, Direction, Event, Transport};

const WAYS: [(Transport, u64); 3] = [(Transport::Tcp, 0), (Transport::Shm, 0), (Transport::Shm, u64::MAX)];

#[test]
fn right_bytes_are_proved_over_every_path() {
    let mut random = Random(21);
    for (transport, gather_below) in WAYS {
        let mut a = Node::start(AgentConfig { gather_below, verify: true, ..config("a", transport) }, 100, &RICH);
        let b = Node::start(config("b", transport), 200, &RICH);
        let peer = a.connect(&b.agent.metadata().unwrap());
        for direction in [Direction::Read, Direction::Write, Direction::Read] {
            let plan = rich_plan(&mut random);
            let (mut local, mut remote) = (a.contents(), b.contents());
            model(&plan, direction, &mut local, &mut remote);
            a.move_all(peer, direction, plan);
            assert_same("local", &a.contents(), &local);
            assert_same("remote", &b.contents(), &remote);
        }
        a.agent.shutdown(LIMIT).unwrap();
        b.agent.shutdown(LIMIT).unwrap();
    }
}

/// The peer's memory changes all the time, so sooner or later it does between the read and its digest.
#[test]
fn bytes_that_are_not_the_peers_any_more_are_refused() {
    for (transport, gather_below) in WAYS {
        let mut a = Node::start(AgentConfig { gather_below, verify: true, ..config("a", transport) }, 1, &[1 << 20]);
        let b = Node::start(config("b", transport), 2, &[1 << 20]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        let ids: Vec<u32> = (0..256).collect();
        let moved = || plan(0, 0, 4096, 4096, ids.clone(), ids.clone());
        a.move_all(peer, Direction::Read, moved());
        let start = Instant::now();
        let mut seed = 10;
        let error = loop {
            assert!(start.elapsed() < LIMIT, "no digest ever differed");
            let id = a.agent.transfer(peer, Direction::Read, moved()).unwrap();
            let result = loop {
                seed += 1;
                b.buffers[0].fill(seed);
                if let Some(Event::TransferDone { id: done, result, .. }) = a.agent.poll_event() {
                    assert_eq!(done, id);
                    break result;
                }
            };
            if let Err(error) = result {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::DigestMismatch, "{error}");
        assert!(error.message().contains("digest"), "{error}");
        // The connection is not at fault.
        a.move_all(peer, Direction::Read, moved());
        assert_same("after", &a.contents(), &b.contents());
        a.agent.shutdown(LIMIT).unwrap();
        b.agent.shutdown(LIMIT).unwrap();
    }
}
