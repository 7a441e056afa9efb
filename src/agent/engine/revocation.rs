//! Regions that are deregistered while peers may use them by themselves: peers are asked to let go, and this side does so when
//! it is asked.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Engine;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::error::{Error, ErrorKind, Result};

impl Engine {
    /// Asks peers that may use a region by themselves to let go of it when it is being deregistered, which counts as used until they
    /// have. One that has not said hello is told when it has, and not waited for.
    pub(super) fn revoke(&mut self, region: u32) {
        for id in self.peers.ids() {
            let Ok(peer) = self.peers.get_mut(id) else { continue };
            let may_use = self.regions.may_be_used_by(region, peer.on_this_host, peer.is_near);
            if !peer.is_ready() {
                peer.untold.push(region);
            } else if may_use && peer.takes_revocations && self.revocations.ask(id, region) {
                self.regions.enter(&[region]);
                self.effects.send(id, FrameKind::RegionRevoked, u64::from(region), Vec::new());
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
        for (peer, region) in self.revocations.take_due(|peer, region| self.transfers.reach(peer, region)) {
            self.effects.send(peer, FrameKind::RegionReleased, u64::from(region), Vec::new());
        }
        self.dispatch(now);
    }

    /// A peer deregisters a region.
    pub(super) fn on_revoked(&mut self, id: PeerId, region: u32, now: Instant) -> Result<()> {
        match self.peers.get_mut(id)?.revoke(region) {
            Ok(mappings) => self.revocations.owe(id, region, mappings),
            Err(error) if error.kind() == ErrorKind::PeerDied => self.effects.lose(id, error),
            Err(error) => return Err(error),
        }
        self.transfers.stop_users_there(id, region, &mut self.effects, now);
        self.dispatch(now);
        self.answer_revocations(now);
        Ok(())
    }

    /// A peer has let a region go.
    pub(super) fn on_released(&mut self, id: PeerId, region: u32) {
        if self.revocations.answered(id, region) {
            self.regions.leave(&[region]);
        }
    }

    /// Loses the peers that have not taken what they read of regions that are being deregistered.
    pub(super) fn check_borrowers(&mut self, now: Instant) {
        for region in self.regions.take_overdue(now) {
            let mapped = self.revocations.borrowers(region);
            let borrowers: BTreeSet<PeerId> =
                self.streams.borrowers(region).chain(self.operations.borrowers(region)).chain(mapped).collect();
            for peer in borrowers {
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

    use super::super::testing::{DEVICE, LEN, begin_one, config, drive, read, reader};
    use super::*;
    use crate::agent::command::{Command, Shared};
    use crate::agent::core::reply::answer;
    use crate::agent::{Agent, Transport};
    use crate::mem::MemoryRange;
    use crate::proto::ids::Incarnation;

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
            engine.peers.get_mut(stranger).unwrap().on_this_host = false;
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
        engine.transfers.take_back(id, operation, &mut engine.effects);
        // The others, which may be under way too, end by themselves.
        drive(&mut engine, |engine| {
            engine.reap_copies(Instant::now());
            engine.check_timers(Instant::now());
            ending.is_finished()
        });
        assert_eq!((engine.transfers.len(), engine.stats.transfers_failed), (0, 1));
        let (ended, other) = ending.join().unwrap();
        ended.unwrap();
        drop(engine);
        other.shutdown(Duration::from_secs(60)).unwrap();
    }
}
