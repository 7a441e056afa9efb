//! Regions that are deregistered while peers may use them by themselves: peers are asked to let go, and this side does so when
//! it is asked.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Engine;
use crate::agent::core::effect::GivenUp;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::ended::has_ended;

impl Engine {
    /// Asks peers that may use a region by themselves to let go of it when it is being deregistered, which counts as used until they
    /// have. One that has not said hello is told when it has, and not waited for: it copies nothing before it has let go.
    pub(super) fn revoke(&mut self, region: u32) {
        for id in self.peers.ids() {
            let Ok(peer) = self.peers.get_mut(id) else { continue };
            let may_use = self.regions.may_be_used_by(region, peer.locality.on_this_host, peer.locality.is_near);
            if !peer.is_ready() {
                peer.locality.untold.insert(region);
            } else if may_use
                && peer.locality.takes_revocations
                && peer.locality.can_know(region)
                && self.revocations.ask(id, region)
            {
                self.regions.enter(&[region]);
                self.effects.send(id, FrameKind::RegionRevoked, u64::from(region));
            }
        }
    }

    /// Asks for all regions back, of which nothing more may be read or written when the agent is gone.
    pub(super) fn revoke_all(&mut self) {
        for region in self.regions.registered() {
            self.revoke(region);
        }
    }

    /// Tells peers of the regions that they have asked for back and that nothing here reads or writes or has mapped any more.
    pub(super) fn answer_revocations(&mut self, now: Instant) {
        if !self.revocations.are_owed() {
            return;
        }
        for (peer, region) in self.revocations.take_due() {
            self.effects.send(peer, FrameKind::RegionReleased, u64::from(region));
        }
        self.dispatch(now);
    }

    /// A peer deregisters a region.
    pub(super) fn on_revoked(&mut self, id: PeerId, region: u32, now: Instant) -> Result<()> {
        if self.revocations.is_owed(id, region) {
            return Ok(());
        }
        let peer = self.peers.get_mut(id)?;
        let (owner, knows_uses) = (peer.incarnation, peer.locality.knows_uses);
        let traces = self.device_copies.traces(owner, region);
        let revoked = peer.revoke(region..=region);
        // None begins after this one, since the region is gone.
        let users = self.transfers.stop_users_there((id, owner), region, &mut self.effects, now);
        match revoked {
            Ok(()) => self.revocations.owe(id, region, users, traces),
            Err(error) => self.effects.lose(id, error),
        }
        self.dispatch(now);
        self.answer_revocations(now);
        if knows_uses && self.revocations.is_owed(id, region) {
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

    /// A peer has let a region go.
    pub(super) fn on_released(&mut self, id: PeerId, region: u32) {
        if let Ok(peer) = self.peers.get_mut(id) {
            peer.locality.has_released(region);
        }
        if self.revocations.answered(id, region) {
            self.regions.leave(&[region]);
        }
    }

    /// A peer is out of the table. One that is gone uses no memory of this side any more. One that was given up may go on with
    /// what it has begun, and cannot say any more when that has ended.
    pub(super) fn end_borrowing(&mut self, id: PeerId, given_up: Option<GivenUp>) {
        let Some(GivenUp { process, is_near, on_this_host }) = given_up else {
            let freed = self.revocations.forget(id);
            return self.regions.leave(&freed);
        };
        if self.revocations.is_in_use(id) {
            // It has not said which.
            for region in self.regions.registered() {
                let may_use = self.regions.may_be_used_by(region, on_this_host, is_near);
                if may_use && self.revocations.ask(id, region) {
                    self.regions.enter(&[region]);
                }
            }
        }
        self.revocations.give_up(id, process);
    }

    /// Peers that were given up and whose processes have ended since use no memory any more.
    pub(super) fn forget_ended(&mut self) {
        for (peer, process) in self.revocations.given_up() {
            if has_ended(process) {
                let freed = self.revocations.forget(peer);
                self.regions.leave(&freed);
            }
        }
    }

    /// Loses the peers that have not taken what they read of regions that are being deregistered, and have not said that they
    /// use them for longer. Such a region is not kept for them, unless the agent ends, after which nobody could tell them.
    pub(super) fn check_borrowers(&mut self, now: Instant) {
        for region in self.regions.take_overdue(now) {
            let mapped = self.revocations.borrowers(region);
            let borrowers: BTreeSet<PeerId> = self.operations.borrowers(region).chain(mapped).collect();
            for peer in borrowers.into_iter().filter(|peer| !self.revocations.is_in_use(*peer)) {
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
            let late: Vec<PeerId> =
                self.revocations.borrowers(region).filter(|peer| !self.revocations.is_in_use(*peer)).collect();
            if self.closing.is_none() {
                late.into_iter().for_each(|peer| self.on_released(peer, region));
            }
        }
    }
}

/// The region that a revocation or its answer names.
pub(super) fn region_of(frame: Frame) -> Result<u32> {
    u32::try_from(frame.sequence).map_err(|_| Error::corrupt(format!("a revocation of region {}", frame.sequence)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::super::tests::{
        DEVICE, LEN, begin_one, config, drive, plan, read, reader, start, turn, until_deregistered,
    };
    use super::*;
    use crate::agent::command::{Command, Shared};
    use crate::agent::core::ids::RegionId;
    use crate::agent::core::reply::answer;
    use crate::agent::core::request::TransferRequest;
    use crate::agent::{Agent, AgentConfig, Direction, Event, Transport};
    use crate::mem::MemoryRange;
    use crate::mem::cuda::test_memory;
    use crate::proto::ids::Incarnation;
    use crate::proto::plan::Segment;
    use crate::proto::wire::MemoryKind;

    /// Whoever cannot have it mapped need not be waited for, and does not end the waiting for others.
    #[test]
    fn a_device_region_is_registered_until_all_who_may_have_it_mapped_have_let_go() {
        let others = ["b", "c", "d"].map(|name| Agent::start(config(name, Transport::Tcp)).unwrap());
        let shared = Arc::new(Shared::new(1).unwrap());
        let mut engine = Engine::new(config("a", Transport::Tcp), Incarnation(77), &shared).unwrap();
        let region = engine.register(MemoryRange::leaked(LEN)).unwrap();
        engine.regions.describe_as(region, DEVICE);
        for other in &others {
            let peer = engine.connect(&other.metadata().unwrap(), Instant::now()).unwrap();
            drive(&mut engine, |engine| engine.peers.get(peer).unwrap().is_ready());
        }
        let peers = engine.peers.ids();
        for stranger in [peers[0], peers[2]] {
            engine.peers.get_mut(stranger).unwrap().locality.on_this_host = false;
        }
        let (reply, caller) = answer();
        engine.serve(Command::Deregister { region, reply }, Instant::now());
        assert_eq!(engine.revocations.borrowers(region.index()).collect::<Vec<_>>(), [peers[1]]);
        assert_eq!(engine.stats().regions, 1);
        drive(&mut engine, |engine| engine.stats().regions == 0);
        caller.wait(Duration::ZERO).unwrap().unwrap();
        drop(engine);
        for other in others {
            other.shutdown(Duration::from_secs(60)).unwrap();
        }
    }

    #[test]
    fn a_region_is_registered_until_what_peers_have_under_way_there_has_ended() {
        let other = Agent::start(config("b", Transport::Shm)).unwrap();
        let region = other.register(MemoryRange::leaked(3 * LEN)).unwrap();
        let (mut engine, peer) = reader(Transport::Shm, &other);
        let id = read(&mut engine, peer);
        let operation = begin_one(&mut engine, peer, id);
        let ending = std::thread::spawn(move || (other.deregister(region), other));
        drive(&mut engine, |engine| engine.revocations.are_owed());
        for _ in 0..1000 {
            engine.check_timers(Instant::now());
            engine.worker.progress();
        }
        assert!(engine.revocations.are_owed() && engine.transfers.len() == 1 && !ending.is_finished());
        engine.transfers.take_back(id, operation, &mut engine.effects, Instant::now());
        // The others, which may be under way too, end by themselves.
        let other = until_deregistered(&mut engine, ending);
        assert_eq!((engine.transfers.len(), engine.stats.transfers_failed), (0, 1));
        drop(engine);
        other.shutdown(Duration::from_secs(60)).unwrap();
    }

    /// Two engines of which each connects to the other before it has heard of it: an owner of a region of bytes 7, and a writer
    /// with the three of [`plan`], of bytes 8.
    fn met() -> ((Engine, PeerId, MemoryRange), (Engine, PeerId)) {
        met_after(|_| ())
    }

    /// As [`met`]; the writer has the owner's metadata of before `change`, which comes before the connections.
    fn met_after(change: impl FnOnce(&mut Engine)) -> ((Engine, PeerId, MemoryRange), (Engine, PeerId)) {
        let make = |number: u64, lens: &[usize]| {
            let shared = Arc::new(Shared::new(number).unwrap());
            let mut engine = Engine::new(config("a", Transport::Shm), Incarnation(number), &shared).unwrap();
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
    fn a_region_that_was_deregistered_between_two_hellos_is_not_copied() {
        let ((mut owner, there, memory), (mut writer, here)) = met();
        let region = RegionId::of_index(owner.shared.live.ids.salt(), 0);
        let (reply, caller) = answer();
        owner.serve(Command::Deregister { region, reply }, Instant::now());
        caller.wait(Duration::ZERO).unwrap().unwrap();
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
    fn stale_metadata_is_not_trusted_where_the_list_was_cut() {
        let ((mut owner, there, memory), (mut writer, here)) = met_after(|owner| {
            let region = RegionId::of_index(owner.shared.live.ids.salt(), 0);
            let (reply, caller) = answer();
            owner.serve(Command::Deregister { region, reply }, Instant::now());
            caller.wait(Duration::ZERO).unwrap().unwrap();
            for index in 1..5000 {
                owner.peers.withdrawn.add(2 * index, MemoryKind::Host);
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

    /// A process that is stopped may be in the midst of a copy.
    #[test]
    fn a_shutdown_fails_while_a_peer_stands_still() {
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

    /// Whoever stood still for too long hears of it when it goes on.
    #[test]
    fn a_peer_that_does_not_let_go_in_time_is_told_that_it_was_given_up() {
        let hasty = AgentConfig { cancel_grace: Duration::from_millis(50), ..config("b", Transport::Shm) };
        let other = Agent::start(hasty).unwrap();
        let region = other.register(MemoryRange::leaked(3 * LEN)).unwrap();
        let (mut engine, peer) = reader(Transport::Shm, &other);
        let id = read(&mut engine, peer);
        other.deregister(region).unwrap();
        until_lost(&other);
        drive(&mut engine, |engine| {
            engine.reap_copies(Instant::now());
            engine.peers.get(peer).is_err() && engine.transfers.get(id).is_none()
        });
        drop(engine);
        other.shutdown(Duration::from_secs(60)).unwrap();
    }

    /// An engine that has written bytes 8 of device memory to the first region of another agent, as in [`plan`].
    fn device_writer(other: &Agent) -> (Engine, PeerId) {
        let shared = Arc::new(Shared::new(1).unwrap());
        let mut engine = Engine::new(config("a", Transport::Shm), Incarnation(77), &shared).unwrap();
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
    fn device_memory_is_given_back_when_what_an_earlier_connection_has_mapped_is_unmapped() {
        let Some(memory) = test_memory::leaked(&vec![7; 3 * LEN]) else { return };
        let other = Agent::start(config("b", Transport::Shm)).unwrap();
        let region = other.register(memory).unwrap();
        let (mut engine, first) = device_writer(&other);
        let owner = engine.peers.get(first).unwrap().incarnation;
        // As if the driver waited with it.
        let mapped = engine.device_copies.traces(owner, 0)[0].upgrade().unwrap();
        engine.disconnect(first, Instant::now()).unwrap();
        let second = engine.connect(&other.metadata().unwrap(), Instant::now()).unwrap();
        drive(&mut engine, |engine| engine.peers.get(second).unwrap().is_ready());
        let ending = std::thread::spawn(move || (other.deregister(region), other));
        drive(&mut engine, |engine| engine.revocations.are_owed());
        for _ in 0..1000 {
            engine.check_timers(Instant::now());
            engine.worker.progress();
        }
        assert!(engine.revocations.are_owed() && !ending.is_finished());
        drop(mapped);
        drive(&mut engine, |engine| {
            engine.check_timers(Instant::now());
            ending.is_finished()
        });
        let (ended, other) = ending.join().unwrap();
        ended.unwrap();
        drop(engine);
        other.shutdown(Duration::from_secs(60)).unwrap();
    }

    /// What it has mapped is still there when its owner uses it for something else.
    #[test]
    fn a_peer_that_was_given_up_copies_no_device_memory() {
        let Some(memory) = test_memory::leaked(&vec![7; 3 * LEN]) else { return };
        let hasty = AgentConfig { cancel_grace: Duration::from_millis(50), ..config("b", Transport::Shm) };
        let other = Agent::start(hasty).unwrap();
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
        drop(engine);
        other.shutdown(Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_peer_is_left_when_devices_copy_nothing_of_it_any_more() {
        let Some(memory) = test_memory::leaked(&vec![7; 3 * LEN]) else { return };
        let other = Agent::start(config("b", Transport::Shm)).unwrap();
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
        other.shutdown(Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_peer_that_is_given_up_is_told() {
        for transport in [Transport::Shm, Transport::Tcp] {
            let other = Agent::start(config("b", transport)).unwrap();
            let (mut engine, peer) = reader(transport, &other);
            engine.effects.lose(peer, Error::new(ErrorKind::Exhausted, "test"));
            engine.dispatch(Instant::now());
            drive(&mut engine, |_| matches!(other.poll_event(), Some(Event::PeerLost { .. })));
            drop(engine);
            other.shutdown(Duration::from_secs(60)).unwrap();
        }
    }
}
