//! Regions that are deregistered while peers may use them by themselves: this side revokes them and peers release them, and the
//! other way round.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Engine;
use crate::agent::core::effect::GivenUp;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::peers::locality::Locality;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::ended::has_ended;

impl Engine {
    /// Asks the peers that may use a region by themselves to release it. The region is held for each until it has. One that has
    /// not said hello is asked when it has, and not waited for: it copies nothing before it has released the region.
    pub(super) fn revoke(&mut self, region: u32) {
        for id in self.peers.ids() {
            let Ok(peer) = self.peers.get_mut(id) else { continue };
            let Locality { is_near, on_this_host, .. } = peer.locality;
            if !peer.is_ready() {
                peer.locality.revoked_during_hello.insert(region);
            } else if peer.locality.can_release(region) && self.hold(region, id, is_near, on_this_host) {
                self.effects.send(id, FrameKind::RegionRevoked, u64::from(region));
            }
        }
        // These cannot be asked any more.
        let given_up: Vec<(PeerId, GivenUp)> = self.holds.given_up(region).collect();
        for (id, GivenUp { is_near, on_this_host, .. }) in given_up {
            self.hold(region, id, is_near, on_this_host);
        }
    }

    /// Holds a region for a peer that may access it directly. Returns true if the hold is new.
    fn hold(&mut self, region: u32, id: PeerId, is_near: bool, on_this_host: bool) -> bool {
        self.regions.may_be_used_by(region, on_this_host, is_near)
            && self.regions.hold(region, id).is_some_and(|hold| self.holds.insert(hold))
    }

    /// Revokes all regions, of which nothing may be read or written when the agent is gone.
    pub(super) fn revoke_all(&mut self) {
        for region in self.regions.registered() {
            self.revoke(region);
        }
    }

    /// Tells peers of the regions that they have revoked and that nothing here reads or writes or has mapped any more.
    pub(super) fn release_unused(&mut self) {
        if self.releases.are_empty() {
            return;
        }
        for (peer, region) in self.releases.take_unused(|transfer| self.transfers.get(transfer).is_some()) {
            self.effects.send(peer, FrameKind::RegionReleased, u64::from(region));
        }
    }

    /// A peer revokes a region.
    pub(super) fn on_revoked(&mut self, id: PeerId, region: u32, now: Instant) -> Result<()> {
        if self.releases.contains(id, region) {
            return Ok(());
        }
        let peer = self.peers.get_mut(id)?;
        let (owner, knows_uses) = (peer.incarnation, peer.locality.knows_uses);
        let taken = peer.take_revoked(region..=region);
        // No transfer with it begins after this, since the region is gone.
        let users = self.transfers.stop_users_there(owner, region, &mut self.effects, now);
        let traces = self.device_copies.traces(owner, region);
        match taken {
            Ok(()) => self.releases.insert(id, region, users, traces),
            Err(error) => self.effects.lose(id, error),
        }
        self.dispatch(now);
        self.release_unused();
        if knows_uses && self.releases.contains(id, region) {
            self.effects.send(id, FrameKind::InUse, 0);
        }
        Ok(())
    }

    /// Tells the peers whose memory is being copied, when the agent ends and may not be able to tell them later.
    pub(super) fn tell_uses(&mut self) {
        for id in self.peers.ids() {
            if self.is_copying(id) && self.peers.get(id).is_ok_and(|peer| peer.locality.knows_uses) {
                self.effects.send(id, FrameKind::InUse, 0);
            }
        }
    }

    /// A peer has released a region.
    pub(super) fn on_released(&mut self, id: PeerId, region: u32) {
        if let Ok(peer) = self.peers.get_mut(id) {
            peer.locality.has_released(region);
        }
        self.holds.release(id, region);
    }

    /// A peer is out of the table. One that is gone uses no memory of this side any more. One that was given up may go on with
    /// what it has begun, and cannot say any more when that has ended: for as long as it would have had to release a region,
    /// or, if it has said that it takes longer or the agent ends, until its process has ended.
    pub(super) fn end_uses(&mut self, id: PeerId, given_up: Option<GivenUp>, now: Instant) {
        self.releases.forget(id);
        match given_up {
            None => self.holds.forget(id),
            Some(given_up) => {
                let until = now.checked_add(self.transfers.cancel_grace).filter(|_| self.closing.is_none());
                self.holds.give_up(id, given_up, ..self.regions.next_index(), until);
            }
        }
    }

    /// Loses the peers that have not taken what they read of regions that are being deregistered, and have not said that they
    /// use them for longer. Such a region is not held for them, unless the agent ends, after which nobody could tell them.
    pub(super) fn check_holders(&mut self, now: Instant) {
        for region in self.regions.take_overdue(now) {
            let holders: BTreeSet<PeerId> =
                self.operations.holders_of(region).chain(self.holds.holders_of(region)).collect();
            for peer in holders.into_iter().filter(|peer| !self.holds.is_in_use(*peer)) {
                let error = Error::new(
                    ErrorKind::PeerDied,
                    format!(
                        "the peer had not taken what it reads of region {region} {:?} after its deregistration began, so the \
                         connection was closed; connect again",
                        self.transfers.cancel_grace
                    ),
                );
                self.effects.lose(peer, error);
            }
            // Each hears that it was given up before.
            self.dispatch(now);
            let late: Vec<PeerId> = self.holds.holders_of(region).filter(|peer| !self.holds.is_in_use(*peer)).collect();
            if self.closing.is_none() {
                late.into_iter().for_each(|peer| self.holds.release(peer, region));
            }
        }
        self.holds.forget_ended(now, has_ended);
    }
}

/// The region that a revocation or its answer names.
pub(super) fn region_of(frame: Frame) -> Result<u32> {
    u32::try_from(frame.sequence).map_err(|_| Error::corrupt(format!("a revocation of region {}", frame.sequence)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{
        DEVICE, LEN, Other, begin_one, config, connect, deregister, drive, other, plan, read, reader, start, turn,
        undriven, until_deregistered,
    };
    use super::*;
    use crate::agent::core::ids::RegionId;
    use crate::agent::core::request::TransferRequest;
    use crate::agent::{Agent, AgentConfig, Direction, Event, Transport};
    use crate::mem::MemoryRange;
    use crate::mem::cuda::test_memory;
    use crate::proto::plan::Segment;
    use crate::proto::wire::{MemoryKind, RegionMetadata};

    /// A peer that cannot have it mapped is not waited for, and does not end the waiting for others.
    #[test]
    fn device_region_waits_for_peers_on_its_host() {
        let others = ["b", "c", "d"].map(|name| Other::new(config(name, Transport::Tcp)));
        let mut engine = undriven(config("a", Transport::Tcp), 77);
        let region = engine.register(MemoryRange::leaked(LEN)).unwrap();
        engine.regions.describe_as(region, DEVICE);
        for other in &others {
            connect(&mut engine, other);
        }
        let peers = engine.peers.ids();
        for stranger in [peers[0], peers[2]] {
            engine.peers.get_mut(stranger).unwrap().locality.on_this_host = false;
        }
        let caller = deregister(&mut engine, region);
        assert_eq!(engine.holds.holders_of(region.index()).collect::<Vec<_>>(), [peers[1]]);
        assert_eq!(engine.stats().regions, 1);
        drive(&mut engine, |engine| engine.stats().regions == 0);
        caller.wait(Duration::ZERO).unwrap().unwrap();
    }

    #[test]
    fn region_waits_for_copies_under_way() {
        let other = other(Transport::Shm);
        let region = other.register(MemoryRange::leaked(3 * LEN)).unwrap();
        let (mut engine, peer) = reader(Transport::Shm, &other);
        let id = read(&mut engine, peer);
        let operation = begin_one(&mut engine, peer, id);
        let ending = std::thread::spawn(move || (other.deregister(region), other));
        drive(&mut engine, |engine| !engine.releases.are_empty());
        for _ in 0..1000 {
            engine.check_timers(Instant::now());
            engine.worker.progress();
        }
        assert!(!engine.releases.are_empty() && engine.transfers.len() == 1 && !ending.is_finished());
        engine.transfers.take_back(id, operation, &mut engine.effects, Instant::now());
        // The others, which may be under way too, end by themselves.
        let _other = until_deregistered(&mut engine, ending);
        assert_eq!((engine.transfers.len(), engine.stats.transfers_failed), (0, 1));
        drop(engine);
    }

    /// Two engines of which each connects to the other before it has heard of it: an owner of a region of bytes 7, and a writer
    /// with the three of [`plan`], of bytes 8.
    fn met() -> ((Engine, PeerId, MemoryRange), (Engine, PeerId)) {
        met_after(|_| ())
    }

    /// As [`met`]; the writer has the owner's metadata of before `change`, which comes before the connections.
    fn met_after(change: impl FnOnce(&mut Engine)) -> ((Engine, PeerId, MemoryRange), (Engine, PeerId)) {
        let make = |number: u64, lens: &[usize]| {
            let mut engine = undriven(config("a", Transport::Shm), number);
            let ranges: Vec<MemoryRange> =
                lens.iter().map(|len| MemoryRange::leaked_with(vec![number as u8; *len])).collect();
            for range in &ranges {
                engine.register(*range).unwrap();
            }
            (engine, ranges[0])
        };
        let ((mut owner, memory), (mut writer, _)) = (make(7, &[3 * LEN]), make(8, &[LEN; 3]));
        let (theirs, ours) = (writer.metadata(), owner.metadata());
        change(&mut owner);
        let there = owner.connect(&theirs, Instant::now()).unwrap();
        let here = writer.connect(&ours, Instant::now()).unwrap();
        ((owner, there, memory), (writer, here))
    }

    /// Its memory may be freed when the deregistration is over, though its peer has a hello that does not name it.
    #[test]
    fn region_revoked_during_hello_is_not_copied() {
        let ((mut owner, there, memory), (mut writer, here)) = met();
        let region = RegionId::of_index(owner.shared.live.ids.salt(), 0);
        deregister(&mut owner, region).wait(Duration::ZERO).unwrap().unwrap();
        drive(&mut writer, |writer| {
            owner.worker.progress();
            writer.peers.get(here).unwrap().is_ready()
        });
        drive(&mut owner, |owner| {
            writer.worker.progress();
            owner.peers.get(there).unwrap().is_ready()
        });
        // It has not heard of the deregistration. What copies it can make are made at once.
        writer.peers.find_neighbours();
        let write = start(&mut writer, here, Direction::Write);
        writer.post_transfers();
        assert!(memory.leaked_bytes().iter().all(|byte| *byte == 7), "freed memory was written to");
        drive_both(&mut owner, &mut writer, |writer| writer.transfers.get(write).is_none());
        assert!(memory.leaked_bytes().iter().all(|byte| *byte == 7), "freed memory was written to");
        assert_eq!(writer.stats.transfers_failed, 1);
        // What is registered is copied when it is known what was not.
        owner.register(memory).unwrap();
        writer.connect(&owner.metadata(), Instant::now()).unwrap();
        drive_both(&mut owner, &mut writer, |writer| {
            writer.peers.find_neighbours();
            !writer.peers.get(here).unwrap().locality.is_unproved()
        });
        let mut next = plan();
        next.segments = next.segments.iter().map(|segment| Segment { remote_region: 1, ..*segment }).collect();
        let id = writer.shared.live.ids.transfer().unwrap();
        let (direction, message) = (Direction::Write, None);
        let request = TransferRequest { id, peer: here, direction, plan: next, message, user_data: 0 };
        writer.start_transfer(request, Instant::now()).unwrap();
        drive_both(&mut owner, &mut writer, |writer| writer.transfers.get(id).is_none());
        assert!(memory.leaked_bytes().iter().all(|byte| *byte == 8));
        assert_eq!(writer.stats.copied_bytes, 3 * LEN as u64);
    }

    /// Its first region is one of more that it has deregistered than its hello can list.
    #[test]
    fn stale_metadata_and_cut_list_allow_no_copies() {
        let ((mut owner, there, memory), (mut writer, here)) = met_after(|owner| {
            let region = RegionId::of_index(owner.shared.live.ids.salt(), 0);
            deregister(owner, region).wait(Duration::ZERO).unwrap().unwrap();
            for index in 1..5000 {
                owner.peers.revoked.add(2 * index, MemoryKind::Host);
            }
        });
        drive_both(&mut owner, &mut writer, |writer| writer.peers.get(here).unwrap().is_ready());
        drive_both(&mut writer, &mut owner, |owner| owner.peers.get(there).unwrap().is_ready());
        writer.peers.find_neighbours();
        let peer = writer.peers.get(here).unwrap();
        assert!(peer.locality.neighbour.is_none() && !peer.locality.is_unproved());
        for direction in [Direction::Write, Direction::Read] {
            let id = start(&mut writer, here, direction);
            drive_both(&mut owner, &mut writer, |writer| writer.transfers.get(id).is_none());
        }
        assert!(memory.leaked_bytes().iter().all(|byte| *byte == 7), "freed memory was written to");
        assert_eq!((writer.stats.transfers_failed, writer.stats.copied_bytes), (2, 0));
        // The other way nothing was cut.
        owner.peers.find_neighbours();
        assert!(owner.peers.get(there).unwrap().locality.neighbour.is_some());
    }

    /// Peers that have connected meanwhile may read the region.
    #[test]
    fn second_deregistration_has_a_grace_again() {
        let other = other(Transport::Shm);
        let mut engine = undriven(config("a", Transport::Shm), 77);
        let region = engine.register(MemoryRange::leaked(LEN)).unwrap();
        let peer = connect(&mut engine, &other);
        let hold = engine.regions.hold(region.index(), peer).unwrap();
        engine.holds.insert(hold);
        engine.holds.note_use(peer);
        let _first = deregister(&mut engine, region);
        let grace = engine.regions.deadline().unwrap();
        engine.check_holders(grace);
        assert_eq!(engine.regions.deadline(), None);
        let _second = deregister(&mut engine, region);
        assert!(engine.regions.deadline().is_some());
        engine.holds.release(peer, region.index());
        engine.dispatch(grace);
        assert_eq!(engine.stats().regions, 0);
    }

    /// It cannot have begun to copy that one.
    #[test]
    fn given_up_peer_holds_no_later_region() {
        let other = other(Transport::Shm);
        let mut engine = undriven(config("a", Transport::Shm), 77);
        let early = engine.register(MemoryRange::leaked(LEN)).unwrap();
        let peer = connect(&mut engine, &other);
        engine.disconnect(peer, Instant::now()).unwrap();
        engine.dispatch(Instant::now());
        engine.holds.note_use(peer);
        let given_up = GivenUp { process: None, is_near: true, on_this_host: true };
        engine.end_uses(peer, Some(given_up), Instant::now());
        let late = engine.register(MemoryRange::leaked(LEN)).unwrap();
        let _early = deregister(&mut engine, early);
        deregister(&mut engine, late).wait(Duration::ZERO).unwrap().unwrap();
        assert_eq!(engine.stats().regions, 1);
    }

    /// A process that is stopped may be in the midst of a copy.
    #[test]
    fn shutdown_fails_while_a_peer_stands_still() {
        let other = Agent::start(config("b", Transport::Shm)).unwrap();
        other.register(MemoryRange::leaked(3 * LEN)).unwrap();
        let (engine, _) = reader(Transport::Shm, &other);
        let error = other.shutdown(Duration::from_secs(3)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.message().contains("may copy its memory"), "{error}");
        assert_eq!(other.shutdown(Duration::from_secs(60)).unwrap_err(), error);
        drop(engine);
    }

    fn drive_both(one: &mut Engine, other: &mut Engine, mut holds: impl FnMut(&mut Engine) -> bool) {
        drive(one, |_| {
            other.reap_copies(Instant::now());
            other.check_timers(Instant::now());
            turn(other);
            holds(other)
        });
    }

    fn until_lost(agent: &Agent) {
        let lost = || matches!(agent.wait_event(Duration::from_secs(120)).unwrap(), Event::PeerLost { .. });
        while !lost() {}
    }

    /// A peer that stood still for too long hears of it when it goes on.
    #[test]
    fn peer_that_does_not_release_is_given_up() {
        let hasty = AgentConfig { cancel_grace: Duration::from_millis(50), ..config("b", Transport::Shm) };
        let other = Other::new(hasty);
        let region = other.register(MemoryRange::leaked(3 * LEN)).unwrap();
        let (mut engine, peer) = reader(Transport::Shm, &other);
        let id = read(&mut engine, peer);
        other.deregister(region).unwrap();
        until_lost(&other);
        drive(&mut engine, |engine| {
            engine.reap_copies(Instant::now());
            engine.peers.get(peer).is_err() && engine.transfers.get(id).is_none()
        });
    }

    /// An engine that has written bytes 8 of device memory to the first region of another agent, as in [`plan`].
    fn device_writer(other: &Agent) -> (Engine, PeerId) {
        let mut engine = undriven(config("a", Transport::Shm), 77);
        for _ in 0..3 {
            engine.register(test_memory::leaked(&vec![8; LEN]).unwrap()).unwrap();
        }
        let peer = engine.connect(&other.metadata().unwrap(), Instant::now()).unwrap();
        drive(&mut engine, |engine| {
            engine.peers.find_neighbours();
            let peer = engine.peers.get(peer).unwrap();
            peer.is_ready() && !peer.locality.is_unproved()
        });
        let write = start(&mut engine, peer, Direction::Write);
        drive(&mut engine, |engine| {
            engine.reap_device_copies(Instant::now());
            engine.transfers.get(write).is_none()
        });
        (engine, peer)
    }

    #[test]
    fn device_mappings_of_an_earlier_connection_delay_release() {
        let Some(memory) = test_memory::leaked(&vec![7; 3 * LEN]) else { return };
        let other = other(Transport::Shm);
        let region = other.register(memory).unwrap();
        let (mut engine, first) = device_writer(&other);
        let owner = engine.peers.get(first).unwrap().incarnation;
        // As if the driver waited with it.
        let mapped = engine.device_copies.traces(owner, 0)[0].upgrade().unwrap();
        engine.disconnect(first, Instant::now()).unwrap();
        let _second = connect(&mut engine, &other);
        let ending = std::thread::spawn(move || (other.deregister(region), other));
        drive(&mut engine, |engine| !engine.releases.are_empty());
        for _ in 0..1000 {
            engine.check_timers(Instant::now());
            engine.worker.progress();
        }
        assert!(!engine.releases.are_empty() && !ending.is_finished());
        drop(mapped);
        drive(&mut engine, |engine| {
            engine.check_timers(Instant::now());
            ending.is_finished()
        });
        let (ended, _other) = ending.join().unwrap();
        ended.unwrap();
        drop(engine);
    }

    /// Its mapping is still there when the owner uses the memory for something else.
    #[test]
    fn given_up_peer_copies_no_device_memory() {
        let Some(memory) = test_memory::leaked(&vec![7; 3 * LEN]) else { return };
        let hasty = AgentConfig { cancel_grace: Duration::from_millis(50), ..config("b", Transport::Shm) };
        let other = Other::new(hasty);
        let region = other.register(memory).unwrap();
        let (mut engine, peer) = device_writer(&other);
        assert_eq!(engine.stats.device_copied_bytes, 3 * LEN as u64);
        assert!(test_memory::get(&memory).iter().all(|byte| *byte == 8));
        // Now it stands still, and knows nothing of what follows.
        other.deregister(region).unwrap();
        until_lost(&other);
        test_memory::put(&memory, &vec![7; 3 * LEN]);
        let write = start(&mut engine, peer, Direction::Write);
        engine.post_transfers();
        let end = Instant::now() + Duration::from_secs(120);
        while engine.device_copies.are_running() {
            assert!(Instant::now() < end, "not within two minutes");
            engine.reap_device_copies(Instant::now());
        }
        assert!(test_memory::get(&memory).iter().all(|byte| *byte == 7), "memory that was deregistered was written to");
        drive(&mut engine, |engine| engine.peers.get(peer).is_err() && engine.transfers.get(write).is_none());
        assert_eq!(engine.stats.transfers_failed, 1);
    }

    #[test]
    fn peer_is_left_after_its_device_copies() {
        let Some(memory) = test_memory::leaked(&vec![7; 3 * LEN]) else { return };
        let other = other(Transport::Shm);
        other.register(memory).unwrap();
        for by_force in [false, true] {
            let (mut engine, peer) = device_writer(&other);
            let write = start(&mut engine, peer, Direction::Write);
            engine.post_transfers();
            assert!(engine.device_copies.is_copying(peer));
            if by_force {
                engine.effects.lose(peer, Error::new(ErrorKind::Exhausted, "test"));
                engine.dispatch(Instant::now());
            } else {
                engine.disconnect(peer, Instant::now()).unwrap();
            }
            engine.check_timers(Instant::now());
            assert_eq!(engine.peers.leaving(), [peer]);
            while let Some(event) = other.poll_event() {
                assert!(!matches!(event, Event::PeerLost { .. }), "{event:?}");
            }
            drive(&mut engine, |engine| {
                engine.reap_device_copies(Instant::now());
                engine.check_timers(Instant::now());
                engine.transfers.get(write).is_none() && engine.peers.leaving().is_empty()
            });
            drive(&mut engine, |_| matches!(other.poll_event(), Some(Event::PeerLost { .. })));
        }
    }

    /// It may be in the midst of a short copy, and cannot say any more when that has ended.
    #[test]
    fn deregistration_waits_for_a_given_up_peer() {
        let other = other(Transport::Shm);
        let (mut engine, peer) = reader(Transport::Shm, &other);
        engine.effects.lose(peer, Error::new(ErrorKind::PeerDied, "test"));
        engine.dispatch(Instant::now());
        let region = RegionId::of_index(engine.shared.live.ids.salt(), 0);
        let caller = deregister(&mut engine, region);
        engine.check_timers(Instant::now());
        assert_eq!((engine.holds.holders_of(0).collect::<Vec<_>>(), engine.stats().regions), (vec![peer], 3));
        engine.check_timers(Instant::now() + engine.transfers.cancel_grace);
        engine.dispatch(Instant::now());
        caller.wait(Duration::ZERO).unwrap().unwrap();
    }

    #[test]
    fn region_that_ucx_has_mapped_outlives_newer_metadata() {
        let other = other(Transport::Shm);
        for _ in 0..2 {
            other.register(MemoryRange::leaked(LEN)).unwrap();
        }
        let (mut engine, peer) = reader(Transport::Shm, &other);
        engine.peers.get_mut(peer).unwrap().describe_as_mapped_by_ucx(0, DEVICE);
        let mut newer = other.metadata().unwrap();
        newer.regions[0] = RegionMetadata::unreachable(0);
        assert_eq!(engine.connect(&newer, Instant::now()).unwrap(), peer);
        assert!(engine.peers.get(peer).unwrap().len_of(0).is_none());
        engine.on_revoked(peer, 0, Instant::now()).unwrap();
        assert!(engine.peers.get(peer).is_err(), "UCX has it mapped until the connection ends");
    }

    #[test]
    fn given_up_peer_is_told() {
        for transport in [Transport::Shm, Transport::Tcp] {
            let other = other(transport);
            let (mut engine, peer) = reader(transport, &other);
            engine.effects.lose(peer, Error::new(ErrorKind::Exhausted, "test"));
            engine.dispatch(Instant::now());
            drive(&mut engine, |_| matches!(other.poll_event(), Some(Event::PeerLost { .. })));
        }
    }
}
