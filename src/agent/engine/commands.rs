//! The handle's commands, served by the thread that has the engine.

use std::time::Instant;

use super::Engine;
use crate::agent::command::Command;
use crate::agent::core::event::Event;
use crate::agent::core::ids::{PeerId, RegionId, TransferId};
use crate::agent::core::reply::Reply;
use crate::agent::core::request::TransferRequest;
use crate::agent::paths;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::wire::{AgentMetadata, AgentRegion};

impl Engine {
    /// Serves one command of the handle's.
    pub(super) fn serve(&mut self, command: Command, now: Instant) {
        // Answers that only tell may find nobody: a caller may have given up waiting.
        match command {
            Command::Register { range, reply } => self.serve_register(range, reply),
            Command::Deregister { region, reply } => self.serve_deregister(region, reply, now),
            Command::Metadata { reply } => {
                let _ = reply.send(Ok(self.metadata()));
            }
            Command::RegionMetadata { region, reply } => {
                let incarnation = self.peers.local().incarnation;
                let found = self.regions.metadata_of(region);
                let _ =
                    reply.send(found.map(|found| AgentRegion { incarnation, index: region.index(), region: found }));
            }
            Command::AddRegion { peer, region, reply } => {
                let added = self.peers.get_mut(peer).and_then(|peer| peer.add_region(&region));
                let _ = reply.send(added.map(|()| region.index));
            }
            Command::RemoveRegion { peer, region, reply } => {
                let _ = reply.send(self.remove_region(peer, region));
            }
            Command::Connect { metadata, reply } => self.serve_connect(&metadata, reply, now),
            Command::Disconnect { peer } => {
                // It may have been lost since the handle looked.
                let _ = self.disconnect(peer, now);
            }
            Command::Route { peer, reply } => {
                // It may have proved meanwhile which process it is.
                let looked = self.peers.find_neighbour(peer);
                let _ = reply.send(looked.and_then(|()| self.peers.get(peer)).map(paths::route));
            }
            Command::Transfer(request) => {
                let TransferRequest { id, peer, user_data, .. } = request;
                let reserved = request.message.as_ref().map(Vec::len);
                let known = self.peers.get(peer).is_ok();
                if let Err(error) = self.start_transfer(request, now) {
                    self.peers.release(peer, reserved);
                    // The handle found the peer alive.
                    let gone = || Error::new(ErrorKind::PeerDied, "the peer was lost before the transfer began");
                    self.refuse_transfer((id, user_data), peer, if known { error } else { gone() }, now);
                }
            }
            Command::Cancel { id } => {
                // It may have ended since the handle looked.
                let _ = self.cancel(id, now);
            }
            Command::Send { peer, data } => {
                if let Err(error) = self.send(peer, data, now) {
                    log::debug!("agent {}: a message was not sent: {error}", self.config.name);
                }
            }
            Command::Stats { reply } => {
                let _ = reply.send(Ok(self.stats()));
            }
            Command::PeerStats { reply } => {
                self.peers.find_neighbours();
                let _ = reply.send(Ok(self.peers.stats(paths::route)));
            }
            // The loop's own.
            Command::ShutDown { .. } => {}
        }
    }

    /// Registers for a caller. The memory of one that has given up is not exported: it may be freed by now.
    fn serve_register(&mut self, range: MemoryRange, reply: Reply<RegionId>) {
        if !reply.is_wanted() {
            return;
        }
        let registered = self.register(range);
        self.answer_registration(range, registered, reply);
    }

    fn answer_registration(&mut self, range: MemoryRange, registered: Result<RegionId>, reply: Reply<RegionId>) {
        if let Err(Ok(region)) = reply.send(registered) {
            log::warn!("agent {}: {range} is unmapped again: its owner has given up waiting", self.config.name);
            self.regions.forget(region);
            // Its index is as gone as that of a region that was deregistered.
            self.peers.revoked.add(region.index(), range.kind());
        }
    }

    fn serve_deregister(&mut self, region: RegionId, reply: Reply<()>, now: Instant) {
        let grace = now.checked_add(self.transfers.cancel_grace);
        if let Some(index) = self.regions.close(region, reply, grace) {
            self.transfers.stop_users_of(index, &mut self.effects, now);
            if let Some(kind) = self.regions.range(index).map(MemoryRange::kind) {
                self.peers.revoked.add(index, kind);
            }
            self.revoke(index);
            self.dispatch(now);
        }
    }

    /// Forgets a region of a peer's, when no transfer uses it any more.
    pub(super) fn remove_region(&mut self, peer: PeerId, region: u32) -> Result<()> {
        let is_in_use = self.transfers.uses(peer, region);
        self.peers.get_mut(peer)?.remove_region(region, is_in_use)
    }

    /// Connects for a caller. One that has given up knows no id to disconnect by.
    fn serve_connect(&mut self, metadata: &AgentMetadata, reply: Reply<PeerId>, now: Instant) {
        if !reply.is_wanted() {
            return;
        }
        let known = self.peers.find(metadata.incarnation).is_some();
        let connected = self.connect(metadata, now);
        if let (Err(Ok(peer)), false) = (reply.send(connected), known) {
            let _ = self.disconnect(peer, now);
        }
    }

    /// Ends a transfer that could not be taken up.
    fn refuse_transfer(&mut self, (id, user_data): (TransferId, u64), peer: PeerId, error: Error, now: Instant) {
        self.stats.transfers_failed += 1;
        if let Some(traffic) = self.peers.traffic(peer) {
            traffic.transfers_failed += 1;
        }
        self.shared.live.lock().transfers.remove(&id);
        self.events.push_back(Event::not_done((id, user_data), peer, error, now));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::tests::{
        DEVICE, LEN, begin_one, deregister, drive, other, plan, read, reader, until_deregistered,
    };
    use super::*;
    use crate::agent::command::Shared;
    use crate::agent::core::event::{Direction, Event};
    use crate::agent::core::ids::PeerId;
    use crate::agent::core::reply::answer;
    use crate::agent::{AgentConfig, Transport};
    use crate::proto::ids::Incarnation;
    use crate::proto::plan::CopyPlan;
    use crate::proto::wire::limits::MAX_REGIONS;

    #[test]
    fn unread_events_count_with_their_memory() {
        let shared = Shared::new(1).unwrap();
        let peer = PeerId::from_raw(1);
        let message = |len: usize| Event::Message { peer, data: vec![0; len] };
        let lost = Event::PeerLost { peer, error: Error::corrupt("test") };
        shared.publish(&mut VecDeque::from([message(0), lost, message(5)]));
        shared.live.lock().transfers.insert(TransferId::from_raw(2), (peer, 0));
        shared.end();
        let each = size_of::<Event>() as u64;
        assert_eq!(shared.unread_bytes(), 4 * each + 5);
        let left = std::iter::from_fn(|| shared.poll_event().map(|_| shared.unread_bytes()));
        assert_eq!(left.collect::<Vec<_>>(), [3 * each + 5, 2 * each + 5, each, 0]);
    }

    #[test]
    fn abandoned_transfers_are_never_safe() {
        let shared = Shared::new(1).unwrap();
        let peer = PeerId::from_raw(1);
        let [given_up, begun, queued] = [2, 3, 4].map(TransferId::from_raw);
        let kind = |id| shared.wait_transfer(id, Duration::ZERO).map_err(|error| error.kind());
        shared.live.lock().transfers.insert(given_up, (peer, 0));
        shared.abandon_transfers();
        shared.live.lock().transfers.remove(&given_up);
        assert_eq!(kind(given_up), Err(ErrorKind::ShutDown));
        let plan = CopyPlan { segments: [].into(), lists: Vec::new() };
        let (direction, message) = (Direction::Read, None);
        shared.command(Command::Transfer(TransferRequest { id: queued, peer, direction, plan, message, user_data: 0 }));
        shared.live.lock().transfers.extend([(begun, (peer, 0)), (queued, (peer, 0))]);
        shared.end();
        shared.drop_commands();
        assert_eq!([given_up, begun, queued].map(kind), [Err(ErrorKind::ShutDown), Err(ErrorKind::ShutDown), Ok(())]);
        assert_eq!(std::iter::from_fn(|| shared.poll_event()).count(), 2);
    }

    #[test]
    fn unanswered_registration_and_connection_are_undone() {
        let shared = Arc::new(Shared::new(1).unwrap());
        let config = AgentConfig { warm_up: false, ..AgentConfig::default() };
        let mut engine = Engine::new(config, Incarnation(7), &shared).unwrap();
        let range = MemoryRange::leaked(4096);
        // The caller has given up before: the memory may be freed, and is not touched.
        let (reply, caller) = answer();
        assert!(caller.wait(Duration::ZERO).is_none() && !reply.is_wanted());
        engine.serve(Command::Register { range, reply }, Instant::now());
        let metadata = Box::new(engine.metadata());
        let (reply, caller) = answer();
        assert!(caller.wait(Duration::ZERO).is_none());
        engine.serve(Command::Connect { metadata, reply }, Instant::now());
        assert_eq!(engine.stats().endpoints, 0);
        // The caller gives up in the midst of the registration.
        let region = engine.register(range).unwrap();
        assert_eq!(region.index(), 0, "the first that was registered");
        let (reply, caller) = answer();
        assert!(caller.wait(Duration::ZERO).is_none());
        engine.answer_registration(range, Ok(region), reply);
        assert!(engine.metadata().regions.is_empty());
        assert_eq!(engine.stats().regions, 0);
        let region = engine.register(range).unwrap();
        // A caller that gets the answer at the last moment has the region.
        let (reply, caller) = answer();
        engine.answer_registration(range, Ok(region), reply);
        assert_eq!(caller.wait(Duration::ZERO).unwrap().unwrap(), region);
        assert_eq!(engine.stats().regions, 1);
    }

    #[test]
    fn removed_region_serves_what_is_in_flight() {
        let other = other(Transport::Shm);
        let region = other.register(MemoryRange::leaked_with(vec![7; 3 * LEN])).unwrap();
        let described = other.region_metadata(region).unwrap();
        let (mut engine, peer) = reader(Transport::Shm, &other);
        for is_removed_again in [false, true] {
            let id = read(&mut engine, peer);
            let operation = begin_one(&mut engine, peer, id);
            engine.remove_region(peer, 0).unwrap();
            let refused = |engine: &mut Engine| {
                let id = engine.shared.live.ids.transfer().unwrap();
                let (direction, message) = (Direction::Read, None);
                let request = TransferRequest { id, peer, direction, plan: plan(), message, user_data: 0 };
                let error = engine.start_transfer(request, Instant::now()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
                assert_eq!(engine.remove_region(peer, 0).unwrap_err().kind(), ErrorKind::NotFound);
            };
            refused(&mut engine);
            if is_removed_again {
                engine.peers.get_mut(peer).unwrap().add_region(&described).unwrap();
                engine.remove_region(peer, 0).unwrap();
            }
            engine.transfers.take_back(id, operation, &mut engine.effects, Instant::now());
            drive(&mut engine, |engine| {
                engine.reap_copies(Instant::now());
                engine.transfers.get(id).is_none()
            });
            assert_eq!(engine.stats.transfers_failed, 0);
            let known = engine.peers.get(peer).unwrap();
            assert!(known.kind(0).is_none() && known.removed_of(&[0]).is_empty(), "nothing is kept");
            refused(&mut engine);
            engine.peers.get_mut(peer).unwrap().add_region(&described).unwrap();
        }
        // Device memory that UCX moves of an owner on another host, who never asks for it back.
        let known = engine.peers.get_mut(peer).unwrap();
        known.locality.on_this_host = false;
        known.describe_as_mapped_by_ucx(0, DEVICE);
        engine.remove_region(peer, 0).unwrap();
        let known = engine.peers.get_mut(peer).unwrap();
        assert!(known.kind(0).is_none() && known.removed_of(&[0]).is_empty());
        known.locality.on_this_host = true;
        known.add_region(&described).unwrap();
        // While it is not used, and when the owner deregisters it before the last use has ended.
        engine.remove_region(peer, 0).unwrap();
        assert!(engine.peers.get(peer).unwrap().kind(0).is_none());
        engine.peers.get_mut(peer).unwrap().add_region(&described).unwrap();
        let id = read(&mut engine, peer);
        let operation = begin_one(&mut engine, peer, id);
        engine.remove_region(peer, 0).unwrap();
        let ending = std::thread::spawn(move || (other.deregister(region), other));
        drive(&mut engine, |engine| !engine.releases.are_empty());
        assert!(!ending.is_finished() && engine.peers.get(peer).unwrap().removed_of(&[0]).is_empty());
        engine.transfers.take_back(id, operation, &mut engine.effects, Instant::now());
        let _other = until_deregistered(&mut engine, ending);
        assert_eq!((engine.transfers.len(), engine.stats.transfers_failed), (0, 1));
        engine.peers.get_mut(peer).unwrap().add_region(&described).unwrap();
        assert_eq!(engine.remove_region(peer, 0).unwrap_err().kind(), ErrorKind::NotFound);
        drop(engine);
    }

    #[test]
    fn registrations_are_bounded_at_a_time_and_in_all() {
        let shared = Arc::new(Shared::new(1).unwrap());
        let config = AgentConfig { warm_up: false, transport: Transport::Tcp, ..AgentConfig::default() };
        let mut engine = Engine::new(config, Incarnation(7), &shared).unwrap();
        let range = MemoryRange::leaked(4096);
        let first = engine.register(range).unwrap();
        engine.regions.fill(first, MAX_REGIONS);
        let refused = |engine: &mut Engine, text: &str| {
            let error = engine.register(range).unwrap_err();
            assert!(error.kind() == ErrorKind::Exhausted && error.message().contains(text), "{error}");
        };
        refused(&mut engine, "65536 regions are registered, and no more can be at a time: deregister those");
        let deregister = |engine: &mut Engine, region| {
            deregister(engine, region).wait(Duration::ZERO).unwrap().unwrap();
        };
        deregister(&mut engine, first);
        assert_eq!(engine.register(range).unwrap().index() as usize, MAX_REGIONS);
        let metadata = engine.metadata();
        metadata.check_regions().unwrap();
        assert_eq!((metadata.regions.len(), metadata.late_regions.len()), (MAX_REGIONS, 1));
        assert!(metadata.regions.first().unwrap().is_gone());
        for region in engine.regions.registered() {
            deregister(&mut engine, RegionId::of_index(shared.live.ids.salt(), region));
        }
        assert_eq!(engine.stats().regions, 0);
        engine.regions.begin_at(u32::MAX - 1);
        assert_eq!(engine.register(range).unwrap().index(), u32::MAX - 1);
        refused(&mut engine, "has no index for another; start a new one");
        let why = |index| engine.regions.live_range(index).unwrap_err().to_string();
        assert!(why(first.index()).contains("was deregistered") && why(u32::MAX).contains("was never registered"));
    }
}
