//! Limits on what others can make an agent keep: peers that came by themselves, and bytes that wait.

use std::collections::VecDeque;

use rustix::process::{Resource, getrlimit};

use super::{Io, Peers};
use crate::agent::core::ids::PeerId;
use crate::error::{Error, ErrorKind, Result};

/// Peers that came by themselves and have said nothing but hello. The oldest makes room for one more; if it was in
/// earnest, it connects again.
const MAX_SILENT: usize = 1024;

/// Bytes of messages that all peers together may have waiting for an earlier one, and bytes of events that the owner has
/// not taken yet. Whose message passes that is cut off.
const MAX_WAITING_BYTES: u64 = 1 << 30;

/// Bytes that one peer may have waiting whatever the others have.
const FREE_BYTES: usize = 1 << 20;

/// Peers that came by themselves, by age; also those that have gone or have spoken since.
#[derive(Default)]
pub(super) struct Admission(VecDeque<PeerId>);

impl Admission {
    /// Notes that a peer came by itself.
    pub(super) fn note(&mut self, id: PeerId) {
        self.0.push_back(id);
    }
}

impl Peers {
    /// Makes room for a peer that comes by itself. Errors: [`ErrorKind::Exhausted`] where there is none to be had.
    pub(super) fn make_room(&mut self, io: &mut Io<'_>) -> Result<()> {
        let most = peers_for(descriptors());
        let full = self.len() >= most;
        let silent = self.silent_peers();
        if !full && silent < MAX_SILENT {
            return Ok(());
        }
        let Some(oldest) = self.admission.0.pop_front() else {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{most} peers are connected, which is what half of the process's open files allow"),
            ));
        };
        let error = Error::new(
            ErrorKind::Exhausted,
            format!("it has said nothing but hello, and {silent} others like it are connected"),
        );
        io.effects.lose(oldest, error);
        Ok(())
    }

    /// Drops from the list the peers that have gone or spoken, if it is long; returns its length.
    fn silent_peers(&mut self) -> usize {
        if self.admission.0.len() >= MAX_SILENT || self.len() >= MAX_SILENT / 4 {
            let peers = &self.by_id;
            self.admission.0.retain(|id| peers.get(*id).is_some_and(|peer| peer.silent));
        }
        self.admission.0.len()
    }

    /// Refuses what a peer brings when too much is waiting already; `unread`: bytes for the agent's owner to take.
    pub(super) fn check_waiting(&self, id: PeerId, unread: u64) -> Result<()> {
        check_bytes(self.get(id)?.connection.inbox.held_bytes(), self.by_id.held_bytes(), unread)
    }
}

/// `own`: bytes of the peer's messages that wait for earlier ones; `all`: of every peer's. They count only against a peer
/// that has more than a little of its own waiting.
fn check_bytes(own: usize, all: u64, unread: u64) -> Result<()> {
    let held = if own > FREE_BYTES { all } else { 0 };
    if held.max(unread) <= MAX_WAITING_BYTES {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Exhausted,
        format!("{held} bytes of messages wait for earlier ones, and {unread} of events for the agent's owner to poll"),
    ))
}

/// How many files the process may have open.
fn descriptors() -> usize {
    getrlimit(Resource::Nofile).current.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

/// A connection takes a descriptor over TCP; half of all are left to others.
fn peers_for(descriptors: usize) -> usize {
    (descriptors / 2).max(64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_the_descriptors_are_left() {
        assert_eq!([peers_for(1024), peers_for(10), peers_for(1 << 20)], [512, 64, 1 << 19]);
    }

    #[test]
    fn held_bytes_count_against_large_holders() {
        let much = MAX_WAITING_BYTES + 1;
        let fits = |own, all, unread| check_bytes(own, all, unread).is_ok();
        assert!(fits(FREE_BYTES, much, MAX_WAITING_BYTES) && fits(FREE_BYTES + 1, much - 1, 0));
        assert!(!fits(FREE_BYTES + 1, much, 0) && !fits(0, 0, much));
    }
}
