//! Regions that are registered after the connection was made, and regions that overlap.

use crate::common::agent::{LIMIT, Node, assert_same, config, direct, plan, transports, until};
use crate::common::memory::{Buffer, pattern_bytes};
use kvferry::ErrorKind;
use kvferry::agent::{
    Agent, Direction, MAX_REGIONS, PeerId, RegionId, decode_metadata, decode_region, encode_metadata, encode_region,
};
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
        a.agent.shutdown(crate::common::agent::LIMIT).unwrap();
        b.agent.shutdown(crate::common::agent::LIMIT).unwrap();
    }
}

#[test]
fn a_region_of_another_life_and_damaged_bytes_are_refused() {
    let a = Node::start(config("a", crate::common::agent::wire()), 1, &[LEN]);
    let b = Node::start(config("b", crate::common::agent::wire()), 2, &[LEN]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let region = b.agent.region_metadata(b.regions[0]).unwrap();
    let kind = |region| a.agent.add_region(peer, region).unwrap_err().kind();
    let mut other = region.clone();
    other.incarnation = Incarnation(other.incarnation.0 ^ 1);
    assert_eq!(kind(other), ErrorKind::PeerDied);
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
        a.agent.shutdown(crate::common::agent::LIMIT).unwrap();
        b.agent.shutdown(crate::common::agent::LIMIT).unwrap();
    }
}

#[test]
fn an_index_that_is_known_is_not_described_anew() {
    let mut a = Node::start(config("a", crate::common::agent::wire()), 1, &[LEN]);
    let b = Node::start(config("b", crate::common::agent::wire()), 2, &[LEN, LEN]);
    let peer = a.connect(&b.agent.metadata().unwrap());
    let mut other = b.agent.region_metadata(b.regions[1]).unwrap();
    other.index = 0;
    let error = a.agent.add_region(peer, other).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.message().contains("one of the two is not that region"), "{error}");
    a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![0], vec![0]));
    assert_eq!(a.contents()[0][..4096], pattern_bytes(2, LEN)[..4096]);
    a.agent.shutdown(crate::common::agent::LIMIT).unwrap();
    b.agent.shutdown(crate::common::agent::LIMIT).unwrap();
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
        a.agent.shutdown(crate::common::agent::LIMIT).unwrap();
        b.agent.shutdown(crate::common::agent::LIMIT).unwrap();
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
            b.agent.shutdown(crate::common::agent::LIMIT).unwrap();
            a.wait_lost(peer);
        }
        assert!(stopped, "over {transport:?}, of many writes one is stopped");
        a.agent.shutdown(crate::common::agent::LIMIT).unwrap();
    }
}

/// Registers and deregisters a small range until the next region has an index above those of positions in metadata.
fn pass_positions(agent: &Agent, buffer: &Buffer) {
    let range = buffer.range(0, 64);
    let pass = || {
        let region = agent.register(range).unwrap();
        agent.deregister(region).unwrap();
        region.index() as usize <= MAX_REGIONS
    };
    // Together they wait less for the agent's thread.
    std::thread::scope(|scope| (0..16).for_each(|_| drop(scope.spawn(|| while pass() {}))));
}

/// Fails to move a block between the first region and one of the peer's that is gone.
fn refuse_both_ways(a: &mut Node, peer: PeerId, region: RegionId) {
    let untouched = a.contents();
    for direction in [Direction::Read, Direction::Write] {
        let id = a.agent.transfer(peer, direction, plan(0, region.index(), 4096, 4096, vec![1], vec![2]), 0).unwrap();
        let error = a.wait_done(id).0.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    assert_same("after refused transfers", &a.contents(), &untouched);
}

/// Users that register memory for each request do so more often than there are positions in metadata.
#[test]
fn an_agent_registers_more_regions_in_its_life_than_at_a_time() {
    let transport = direct();
    let mut a = Node::start(config("a", transport), 1, &[LEN]);
    let b = Node::start(config("b", transport), 2, &[LEN, LEN]);
    let of_a = a.connect(&b.agent.metadata().unwrap());
    a.wait_connected();
    let blocks: Vec<u32> = (0..16).collect();
    a.move_all(of_a, Direction::Read, plan(0, 0, 4096, 4096, blocks.clone(), blocks.clone()));
    assert_same("before", &a.contents(), &[pattern_bytes(2, LEN)]);
    let stale = encode_metadata(&b.agent.metadata().unwrap()).unwrap();
    b.agent.deregister(b.regions[1]).unwrap();
    pass_positions(&b.agent, &b.buffers[0]);
    let lost = b.agent.register(b.buffers[1].range(0, LEN)).unwrap();
    let of_lost = encode_region(&b.agent.region_metadata(lost).unwrap()).unwrap();
    let with_lost = encode_metadata(&b.agent.metadata().unwrap()).unwrap();
    b.agent.deregister(lost).unwrap();
    let late = b.agent.register(b.buffers[1].range(0, LEN)).unwrap();
    assert_eq!(late.index(), lost.index() + 1, "no index is used twice");
    assert!(late.index() as usize > MAX_REGIONS);

    // By a region's own metadata, to the peer that has the agent's of before.
    let of_late = decode_region(&encode_region(&b.agent.region_metadata(late).unwrap()).unwrap()).unwrap();
    assert_eq!(a.agent.add_region(of_a, of_late).unwrap(), late.index());
    a.move_all(of_a, Direction::Read, plan(0, late.index(), 4096, 4096, blocks.clone(), blocks.clone()));
    assert_same("a late region", &a.contents(), &[pattern_bytes(3, LEN)]);
    a.move_all(of_a, Direction::Read, plan(0, 0, 4096, 4096, blocks.clone(), blocks.clone()));
    assert_same("the first region", &a.contents(), &[pattern_bytes(2, LEN)]);
    refuse_both_ways(&mut a, of_a, b.regions[1]);
    refuse_both_ways(&mut a, of_a, lost);

    // By the agent's metadata, stale and new, to one that knows nothing of it.
    let mut c = Node::start(config("c", transport), 4, &[LEN]);
    for (metadata, gone) in [(stale, b.regions[1]), (with_lost, lost)] {
        let peer = c.connect(&decode_metadata(&metadata).unwrap());
        refuse_both_ways(&mut c, peer, gone);
        if gone == lost {
            // Whoever has said hello before is not told again.
            c.agent.add_region(peer, decode_region(&of_lost).unwrap()).unwrap();
            refuse_both_ways(&mut c, peer, gone);
        }
    }
    let newest = b.agent.metadata().unwrap();
    let peer = c.connect(&decode_metadata(&encode_metadata(&newest).unwrap()).unwrap());
    c.move_all(peer, Direction::Write, plan(0, late.index(), 4096, 4096, blocks.clone(), blocks.clone()));
    c.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, vec![5], vec![9]));
    assert_same("what was written", &b.contents(), &[pattern_bytes(2, LEN), pattern_bytes(4, LEN)]);
    let mut expected = pattern_bytes(4, LEN);
    expected[5 * 4096..6 * 4096].copy_from_slice(&pattern_bytes(2, LEN)[9 * 4096..10 * 4096]);
    assert_same("what was read", &c.contents(), &[expected]);
    b.buffers[1].fill(99);
    b.agent.deregister(late).unwrap();
    refuse_both_ways(&mut c, peer, late);
    refuse_both_ways(&mut a, of_a, late);
    assert_same("deregistered", &b.contents(), &[pattern_bytes(2, LEN), pattern_bytes(99, LEN)]);
    for node in [&a, &c, &b] {
        node.agent.shutdown(LIMIT).unwrap();
    }
}
