//! The connections, and what the loop asks of all of them together in every turn: that is kept up to date, so that no turn
//! visits all peers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::inbox::InboxItem;
use super::peer::Peer;
use crate::agent::core::ids::PeerId;
use crate::error::Result;

/// The connections of an agent by their ids.
#[derive(Default)]
pub(super) struct PeerTable {
    by_id: BTreeMap<PeerId, Peer>,
    /// How many have each name.
    names: BTreeMap<String, usize>,
    /// When those must have said hello that have not.
    hellos_due: BTreeSet<(Instant, PeerId)>,
    /// Bytes of messages that wait for earlier ones.
    held_bytes: u64,
    /// Those from which bytes have come or were asked for since they were last found slow, each once.
    reading: Vec<PeerId>,
    /// How many peers were visited by going through all of them.
    #[cfg(test)]
    visits: std::cell::Cell<usize>,
}

impl PeerTable {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn get(&self, id: PeerId) -> Option<&Peer> {
        self.by_id.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.by_id.get_mut(&id)
    }

    /// Every peer. Not for what is done in every turn.
    pub(super) fn all(&self) -> impl Iterator<Item = &Peer> {
        self.note_visits();
        self.by_id.values()
    }

    /// As [`PeerTable::all`].
    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.note_visits();
        self.by_id.values_mut()
    }

    fn note_visits(&self) {
        #[cfg(test)]
        self.visits.set(self.visits.get() + self.by_id.len());
    }

    #[cfg(test)]
    pub(super) fn visits(&self) -> usize {
        self.visits.get()
    }

    pub(super) fn insert(&mut self, peer: Peer) {
        *self.names.entry(peer.name.clone()).or_default() += 1;
        self.hellos_due.extend(peer.connection.deadline.map(|at| (at, peer.id)));
        self.by_id.insert(peer.id, peer);
    }

    pub(super) fn remove(&mut self, id: PeerId) -> Option<Peer> {
        self.set_deadline(id, None);
        let peer = self.by_id.remove(&id)?;
        self.held_bytes = self.held_bytes.saturating_sub(peer.connection.inbox.held_bytes() as u64);
        if let Some(count) = self.names.get_mut(&peer.name) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.names.remove(&peer.name);
            }
        }
        Some(peer)
    }

    /// Whether any has this name.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    /// When a peer must have said hello; `None` when it has.
    pub(super) fn set_deadline(&mut self, id: PeerId, at: Option<Instant>) {
        let Some(peer) = self.by_id.get_mut(&id) else { return };
        if let Some(before) = std::mem::replace(&mut peer.connection.deadline, at) {
            self.hellos_due.remove(&(before, id));
        }
        self.hellos_due.extend(at.map(|at| (at, id)));
    }

    /// When the next one must have said hello.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.hellos_due.first().map(|(at, _)| *at)
    }

    /// Those that have not said hello in time.
    pub(super) fn overdue(&self, now: Instant) -> impl Iterator<Item = &Peer> {
        let late = self.hellos_due.iter().take_while(move |(at, _)| *at <= now);
        late.filter_map(|(_, id)| self.by_id.get(id))
    }

    /// Takes a message of a peer and returns those whose turn has come, as [`Inbox::take`](super::inbox::Inbox::take).
    pub(super) fn take_message(&mut self, id: PeerId, sequence: u64, item: InboxItem) -> Result<Vec<InboxItem>> {
        let peer = self.by_id.get_mut(&id).ok_or_else(|| id.unknown())?;
        let before = peer.connection.inbox.held_bytes() as u64;
        let due = peer.connection.inbox.take(sequence, item);
        self.held_bytes =
            self.held_bytes.saturating_sub(before).saturating_add(peer.connection.inbox.held_bytes() as u64);
        due
    }

    /// Forgets the messages of a peer, whose next one is its first.
    pub(super) fn drop_held(&mut self, id: PeerId) {
        if let Some(peer) = self.by_id.get_mut(&id) {
            let inbox = std::mem::take(&mut peer.connection.inbox);
            self.held_bytes = self.held_bytes.saturating_sub(inbox.held_bytes() as u64);
        }
    }

    /// Bytes of messages of all peers that wait for earlier ones.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Bytes were asked of a peer, or have come from it.
    pub(super) fn note_reading(&mut self, id: PeerId) {
        if let Some(peer) = self.by_id.get_mut(&id)
            && !std::mem::replace(&mut peer.is_reading, true)
        {
            self.reading.push(id);
        }
    }

    /// Whether bytes that were asked of any peer come so fast that it is worth spinning for them.
    pub(super) fn has_fast_reads(&mut self, now: Instant) -> bool {
        // One that is slow, or of which nothing is asked, is that until it is noted again.
        while let Some(id) = self.reading.last() {
            if let Some(peer) = self.by_id.get_mut(id) {
                if peer.flow.is_fast(now) {
                    return true;
                }
                peer.is_reading = false;
            }
            self.reading.pop();
        }
        false
    }
}
