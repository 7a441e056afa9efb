//! Reads that are checked against the peer's own digest, where it differs. That right bytes pass is in agent_transfer.

use std::time::Instant;

use crate::common::agent::{LIMIT, Node, assert_same, config, plan, ways};
use kvferry::ErrorKind;
use kvferry::agent::{AgentConfig, Direction, Event};

/// The peer's memory changes all the time, so sooner or later it does between the read and its digest.
#[test]
fn bytes_that_are_not_the_peers_any_more_are_refused() {
    for (transport, gather_below) in ways() {
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
            let id = a.agent.transfer(peer, Direction::Read, moved(), 0).unwrap();
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
