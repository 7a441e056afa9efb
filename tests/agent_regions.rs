//! Regions that are registered after the connection was made, and regions that overlap.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use common::agent::{Node, assert_same, config, plan, transports, until};
use common::memory::{Buffer, pattern_bytes};
use kvferry::ErrorKind;
use kvferry::agent::{Direction, decode_region, encode_region};
use kvferry::proto::ids::Incarnation;

const LEN: usize = 64 << 10;

#[test]
fn regions_registered_after_the_connection_are_added_one_by_one() {
    for transport in transports() {
        let mut a = Node::start(config("a", transport), 1, &[LEN]);
        let b = Node::start(config("b", transport), 2, &[]);
        let peer = a.connect(&b.agent.metadata().unwrap());
        let blocks: Vec<u32> = (0..16).collect();
        let mut sizes = Vec::new();
        let later: Vec<Buffer> = (0..3).map(|seed| Buffer::patterned(10 + seed, LEN)).collect();
        for (seed, buffer) in (10..).zip(&later) {
            let region = b.agent.register(buffer.range(0, LEN)).unwrap();
            let encoded = encode_region(&b.agent.region_metadata(region).unwrap()).unwrap();
            sizes.push(encoded.len());
            let plan = plan(0, region.index(), 4096, 4096, blocks.clone(), blocks.clone());
            let early = a.agent.transfer(peer, Direction::Read, plan.clone(), 0).unwrap();
            assert_eq!(a.wait_done(early).0.unwrap_err().kind(), ErrorKind::NotFound);
            for _ in 0..2 {
                let added = a.agent.add_region(peer, decode_region(&encoded).unwrap()).unwrap();
                assert_eq!(added, region.index());
            }
            a.move_all(peer, Direction::Read, plan);
            assert_same("read", &a.contents(), &[pattern_bytes(seed, LEN)]);
        }
        assert_eq!(sizes, vec![sizes[0]; 3], "the size does not depend on other regions");
        a.agent.shutdown(common::agent::LIMIT).unwrap();
        b.agent.shutdown(common::agent::LIMIT).unwrap();
    }
}

#[test]
fn a_region_of_another_life_and_damaged_bytes_are_refused() {
    let a = Node::start(config("a", common::agent::wire()), 1, &[LEN]);
    let b = Node::start(config("b", common::agent::wire()), 2, &[LEN]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let region = b.agent.region_metadata(b.regions[0]).unwrap();
    let kind = |region| a.agent.add_region(peer, region).unwrap_err().kind();
    let mut other = region.clone();
    other.incarnation = Incarnation(other.incarnation.0 ^ 1);
    assert_eq!(kind(other), ErrorKind::PeerDied);
    let mut far = region.clone();
    far.index = u32::MAX;
    assert_eq!(kind(far), ErrorKind::Corrupt);
    let mut longer = region.clone();
    longer.region.len += 1;
    assert_eq!(kind(longer), ErrorKind::Corrupt);
    let encoded = encode_region(&region).unwrap();
    for cut in 0..encoded.len() {
        assert!(decode_region(&encoded[..cut]).is_err());
    }
    a.agent.disconnect(peer).unwrap();
    assert_eq!(kind(region), ErrorKind::NotFound);
    b.agent.deregister(b.regions[0]).unwrap();
    assert_eq!(b.agent.region_metadata(b.regions[0]).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn connecting_again_without_regions_keeps_those_that_were_added() {
    for transport in transports() {
        let mut a = Node::start(config("a", transport), 1, &[LEN]);
        let b = Node::start(config("b", transport), 2, &[]);
        let metadata = b.agent.metadata().unwrap();
        assert!(metadata.regions.is_empty());
        let peer = a.connect(&metadata);
        let buffer = Buffer::patterned(9, LEN);
        let region = b.agent.register(buffer.range(0, LEN)).unwrap();
        let described = b.agent.region_metadata(region).unwrap();
        a.agent.add_region(peer, described).unwrap();
        assert_eq!(a.agent.connect(&metadata).unwrap(), peer);
        a.move_all(peer, Direction::Read, plan(0, region.index(), 4096, 4096, vec![1], vec![2]));
        a.agent.shutdown(common::agent::LIMIT).unwrap();
        b.agent.shutdown(common::agent::LIMIT).unwrap();
    }
}

#[test]
fn an_index_that_is_known_is_not_described_anew() {
    let mut a = Node::start(config("a", common::agent::wire()), 1, &[LEN]);
    let b = Node::start(config("b", common::agent::wire()), 2, &[LEN, LEN]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let mut other = b.agent.region_metadata(b.regions[1]).unwrap();
    other.index = 0;
    let error = a.agent.add_region(peer, other).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.message().contains("one of the two is not that region"), "{error}");
    a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![0]));
    assert_eq!(a.contents()[0][..4096], pattern_bytes(2, LEN)[..4096]);
    a.agent.shutdown(common::agent::LIMIT).unwrap();
    b.agent.shutdown(common::agent::LIMIT).unwrap();
}

#[test]
fn overlapping_regions_are_regions_of_their_own() {
    for transport in transports() {
        let mut a = Node::start(config("a", transport), 1, &[LEN]);
        let b = Node::start(config("b", transport), 2, &[LEN]);
        let inner = b.agent.register(b.buffers[0].range(4096, 8192)).unwrap();
        let same = b.agent.register(b.buffers[0].range(0, LEN)).unwrap();
        assert_eq!((inner.index(), same.index()), (1, 2));
        let peer = a.connect(&b.agent.metadata().unwrap());
        let mut expected = a.contents();
        let theirs = b.contents();
        // The first block of the inner region is the second one of the others.
        a.move_all(peer, Direction::Read, plan(0, 1, 4096, 4096, vec![5], vec![0]));
        expected[0][5 * 4096..6 * 4096].copy_from_slice(&theirs[0][4096..8192]);
        assert_same("inner", &a.contents(), &expected);
        b.agent.deregister(inner).unwrap();
        b.agent.deregister(b.regions[0]).unwrap();
        a.move_all(peer, Direction::Read, plan(0, 2, 4096, 4096, vec![6], vec![2]));
        expected[0][6 * 4096..7 * 4096].copy_from_slice(&theirs[0][8192..12288]);
        assert_same("what is left", &a.contents(), &expected);
        a.agent.shutdown(common::agent::LIMIT).unwrap();
        b.agent.shutdown(common::agent::LIMIT).unwrap();
    }
}

/// Within a host the peer needs nothing of the owner to copy, so it has to be asked to stop.
#[test]
fn memory_that_is_deregistered_under_a_peers_transfer_is_written_no_more() {
    const LONG: usize = 256 << 20;
    let blocks: Vec<u32> = (0..(LONG >> 20) as u32).collect();
    for transport in transports() {
        let mut a = Node::start(config("a", transport), 1, &[LONG]);
        let mut stopped = false;
        for _ in 0..50 {
            if stopped {
                break;
            }
            let mut b = Node::start(config("b", transport), 2, &[LONG, LEN]);
            let peer = a.connect(&b.agent.metadata().unwrap());
            a.wait_connected();
            b.wait_connected();
            // One operation first, so that the way is known; the other region goes on to be of use.
            a.move_all(peer, Direction::Read, plan(0, 1, 4096, 4096, vec![0, 5], vec![7, 3]));
            let whole = plan(0, 0, 1 << 20, 1 << 20, blocks.clone(), blocks.clone());
            let sample =
                || -> Vec<u8> { (0..LONG).step_by(1 << 20).flat_map(|at| b.buffers[0].read(at..at + 64)).collect() };
            let untouched = sample();
            let write = a.agent.transfer(peer, Direction::Write, whole.clone(), 0).unwrap();
            until("the first bytes", || sample() != untouched);
            b.agent.deregister(b.regions[0]).unwrap();
            let after = sample();
            if let Err(error) = a.wait_done(write).0 {
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
                stopped = true;
            }
            assert!(sample() == after, "over {transport:?}, it was written after it was deregistered");
            b.buffers[0].fill(99);
            let again = a.agent.transfer(peer, Direction::Write, whole, 0).unwrap();
            assert_eq!(a.wait_done(again).0.unwrap_err().kind(), ErrorKind::NotFound);
            assert_same("after a second write", &[b.buffers[0].bytes()], &[pattern_bytes(99, LONG)]);
            a.move_all(peer, Direction::Read, plan(0, 1, 4096, 4096, vec![1], vec![2]));
            b.agent.shutdown(common::agent::LIMIT).unwrap();
            a.wait_lost(peer);
        }
        assert!(stopped, "over {transport:?}, of many writes one is stopped");
        a.agent.shutdown(common::agent::LIMIT).unwrap();
    }
}
