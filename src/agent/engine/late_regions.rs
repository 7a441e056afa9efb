//! Tests of regions with indices above all positions in metadata.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Engine;
use super::tests::{LEN, config, deregister, drive, hello, other, reader, turn, undriven};
use crate::agent::command::Command;
use crate::agent::core::ids::{PeerId, RegionId};
use crate::agent::core::request::TransferRequest;
use crate::agent::peers::hello::Hello;
use crate::agent::{Direction, Event, Transport};
use crate::error::{ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::plan::{BlockPair, CopyPlan, Segment};
use crate::proto::wire::AgentRegion;
use crate::proto::wire::limits::MAX_REGIONS;

/// An owner of memory, and an agent that reads and writes it through its own only region.
struct Sides {
    owner: Engine,
    other: Engine,
    ours: MemoryRange,
}

impl Sides {
    fn new(transport: Transport) -> Sides {
        let make = |number| undriven(config("a", transport), number);
        let (owner, mut other) = (make(7), make(8));
        let ours = MemoryRange::leaked(LEN);
        other.register(ours).unwrap();
        Sides { owner, other, ours }
    }

    fn drive(&mut self, mut holds: impl FnMut(&mut Engine, &mut Engine) -> bool) {
        drive(&mut self.owner, |owner| {
            self.other.reap_copies(Instant::now());
            self.other.check_timers(Instant::now());
            self.other.peers.find_neighbours();
            turn(&mut self.other);
            owner.check_timers(Instant::now());
            holds(owner, &mut self.other)
        });
    }

    fn connect(&mut self) -> PeerId {
        let peer = self.other.connect(&self.owner.metadata(), Instant::now()).unwrap();
        self.drive(|_, other| other.peers.get(peer).unwrap().is_ready());
        peer
    }

    /// Registers memory full of a byte.
    fn register(&mut self, byte: u8) -> (RegionId, MemoryRange) {
        let range = MemoryRange::leaked_with(vec![byte; LEN]);
        (self.owner.register(range).unwrap(), range)
    }

    fn described(&self, region: RegionId) -> AgentRegion {
        let incarnation = self.owner.peers.local().incarnation;
        AgentRegion { incarnation, index: region.index(), region: self.owner.regions.metadata_of(region).unwrap() }
    }

    fn deregister(&mut self, region: RegionId) {
        let caller = deregister(&mut self.owner, region);
        self.drive(|owner, _| owner.regions.range(region.index()).is_none());
        caller.wait(Duration::ZERO).unwrap().unwrap();
    }

    /// Moves all of a region of the owner's.
    fn copy(&mut self, peer: PeerId, direction: Direction, region: RegionId) -> Result<()> {
        let run = LEN as u64 / 4;
        let segment = Segment {
            list: 0,
            local_region: 0,
            remote_region: region.index(),
            local_offset: 0,
            remote_offset: 0,
            local_stride: run,
            remote_stride: run,
            len: run,
        };
        let lists = vec![BlockPair { local: vec![3, 2, 1, 0].into(), remote: vec![2, 3, 0, 1].into() }];
        let id = self.other.shared.live.ids.transfer().unwrap();
        let plan = CopyPlan { segments: [segment].into(), lists };
        let request = TransferRequest { id, peer, direction, plan, message: None, user_data: 0 };
        self.other.serve(Command::Transfer(request), Instant::now());
        let mut ended = None;
        self.drive(|_, other| {
            ended = other.events.iter().find_map(|event| match event {
                Event::TransferDone { id: done, result, .. } if *done == id => Some(result.clone()),
                _ => None,
            });
            ended.is_some()
        });
        ended.unwrap()
    }

    /// Reads a region that is full of a byte.
    fn read(&mut self, peer: PeerId, region: RegionId, byte: u8) {
        self.copy(peer, Direction::Read, region).unwrap();
        assert!(self.ours.leaked_bytes().iter().all(|read| *read == byte), "region {}", region.index());
    }

    /// Fails to read and to write a region that is gone, whose memory is still full of a byte.
    fn refuse(&mut self, peer: PeerId, region: RegionId, memory: &MemoryRange, byte: u8) {
        let before = self.ours.leaked_bytes();
        for direction in [Direction::Read, Direction::Write] {
            let error = self.copy(peer, direction, region).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        }
        assert!(self.ours.leaked_bytes() == before, "a region that is gone was read");
        assert!(memory.leaked_bytes().iter().all(|there| *there == byte), "a region that is gone was written to");
    }
}

#[test]
fn late_regions_are_moved_as_any_other() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let mut sides = Sides::new(transport);
        let (first, _) = sides.register(1);
        let peer = sides.connect();
        sides.read(peer, first, 1);
        let (early, early_memory) = sides.register(2);
        let stale = sides.owner.metadata();
        sides.deregister(early);
        sides.owner.regions.begin_at(MAX_REGIONS as u32 - 1);
        let ((last, _), (late, late_memory), (gone, gone_memory)) =
            (sides.register(3), sides.register(4), sides.register(5));
        assert_eq!([last, late, gone].map(|region| region.index() - last.index()), [0, 1, 2]);
        let (described, older) = (sides.described(gone), sides.owner.metadata());
        assert_eq!((older.regions.len(), older.late_regions.len()), (MAX_REGIONS, 2));
        sides.deregister(gone);

        // To a peer that knows of no more than the first.
        for added in [sides.described(last), sides.described(late), described] {
            sides.other.peers.get_mut(peer).unwrap().add_region(&added).unwrap();
        }
        sides.read(peer, late, 4);
        sides.read(peer, last, 3);
        sides.read(peer, first, 1);
        sides.copy(peer, Direction::Write, late).unwrap();
        assert!(late_memory.leaked_bytes().iter().all(|byte| *byte == 1));
        sides.refuse(peer, early, &early_memory, 2);
        sides.refuse(peer, gone, &gone_memory, 5);
        // Whatever metadata it gets, and also over a new connection.
        let mut peer = peer;
        for (metadata, is_new) in [(&stale, false), (&older, false), (&stale, true), (&older, true)] {
            if is_new {
                sides.other.disconnect(peer, Instant::now()).unwrap();
            }
            peer = sides.other.connect(metadata, Instant::now()).unwrap();
            sides.drive(|_, other| other.peers.get(peer).unwrap().is_ready());
            sides.refuse(peer, early, &early_memory, 2);
            sides.refuse(peer, gone, &gone_memory, 5);
            sides.read(peer, first, 1);
        }
        let peer = sides.connect();
        sides.read(peer, last, 3);
        sides.copy(peer, Direction::Write, late).unwrap();
        assert!(late_memory.leaked_bytes().iter().all(|byte| *byte == 3));
        sides.deregister(late);
        sides.refuse(peer, late, &late_memory, 3);
    }
}

/// Metadata of nothing takes nothing away, and that of late regions alone is not metadata of nothing.
#[test]
fn late_regions_alone_replace_those_that_were_known() {
    let mut sides = Sides::new(Transport::Tcp);
    let (first, memory) = sides.register(1);
    let peer = sides.connect();
    sides.deregister(first);
    sides.owner.regions.begin_at(MAX_REGIONS as u32);
    let (late, _) = sides.register(2);
    let metadata = sides.owner.metadata();
    assert_eq!((metadata.regions.len(), metadata.late_regions.len()), (0, 1));
    assert_eq!(sides.other.connect(&metadata, Instant::now()).unwrap(), peer);
    sides.read(peer, late, 2);
    assert!(sides.other.peers.get(peer).unwrap().len_of(first.index()).is_none());
    sides.refuse(peer, first, &memory, 1);
}

/// An older peer, whose hello does not say that it knows of uses, takes the index for an error.
#[test]
fn late_regions_are_not_revoked_to_older_peers() {
    let other = other(Transport::Shm);
    let (mut engine, peer) = reader(Transport::Shm, &other);
    let late = MAX_REGIONS as u32;
    for (index, knows_uses, is_asked) in [(late, true, true), (late + 1, false, false), (3, false, true)] {
        engine.regions.begin_at(index);
        let region = engine.register(MemoryRange::leaked(LEN)).unwrap();
        engine.peers.get_mut(peer).unwrap().locality.knows_uses = knows_uses;
        let caller = deregister(&mut engine, region);
        assert_eq!(engine.holds.holders_of(index).count(), usize::from(is_asked));
        drive(&mut engine, |engine| engine.holds.holders().next().is_none());
        caller.wait(Duration::ZERO).unwrap().unwrap();
    }
    // Nor is it waited for where it said hello later.
    let (_, older) = hello(b"elsewhere", (1, 2), None);
    let locality = &mut engine.peers.get_mut(peer).unwrap().locality;
    locality.revoked_during_hello.extend([4, late, late + 1]);
    locality.take_challenge(&Hello::decode(&older).unwrap());
    assert_eq!(locality.revoked_during_hello, BTreeSet::from([4]));
}

/// A peer can name as many regions as it likes.
#[test]
fn revoked_regions_of_a_peer_are_bounded() {
    let other = other(Transport::Tcp);
    let (mut engine, peer) = reader(Transport::Tcp, &other);
    let places = MAX_REGIONS as u32 + 1;
    for place in 0..places {
        engine.peers.get_mut(peer).unwrap().take_revoked(2 * place..=2 * place).unwrap();
    }
    for place in 0..places {
        engine.peers.get_mut(peer).unwrap().take_revoked(2 * place..=2 * place).unwrap();
    }
    engine.on_revoked(peer, 2 * places, Instant::now()).unwrap();
    assert!(engine.peers.get(peer).is_err());
    let lost = engine.events.iter().find_map(|event| match event {
        Event::PeerLost { error, .. } => Some(error.clone()),
        _ => None,
    });
    let error = lost.unwrap();
    assert!(error.kind() == ErrorKind::PeerDied && error.message().contains("65537 places"), "{error}");
}
