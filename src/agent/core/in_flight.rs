//! The owners of UCX operations in flight.

use super::ids::{PeerId, TransferId};
use super::regions::Hold;
use crate::proto::plan::Operation;

/// The owner of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum InFlight {
    /// A read or write for a transfer.
    Copy { transfer: TransferId, peer: PeerId, operation: Operation },
    /// The flush after a transfer's last write: when it ends, the peer's memory holds all of it.
    Flush { transfer: TransferId },
    /// A message, for which this much of the peer's send queue was reserved.
    Message { peer: PeerId, reserved: u64 },
    /// A request or reply of a served transfer, of which this much counts as unsent replies and which UCX sends straight
    /// from the regions that it holds.
    Rpc { peer: PeerId, held: u64, holds: Vec<Hold> },
    /// The question whether a peer is alive.
    Question { peer: PeerId },
    /// The message that tells a peer that this side leaves.
    Goodbye,
    /// The flush after it.
    CloseFlush,
}

/// Operations by UCX token. A token is used again only after its operation has ended, which UCX says exactly once.
#[derive(Debug, Default)]
pub(crate) struct Operations {
    slots: Vec<Option<InFlight>>,
    free: Vec<usize>,
}

impl Operations {
    /// Enters an operation that is about to be posted; gives its token.
    pub(crate) fn insert(&mut self, operation: InFlight) -> u64 {
        let index = self.free.pop().unwrap_or(self.slots.len());
        match self.slots.get_mut(index) {
            Some(slot) => *slot = Some(operation),
            None => self.slots.push(Some(operation)),
        }
        index as u64
    }

    /// The peers to which UCX has yet to send bytes straight from a region.
    pub(crate) fn holders_of(&self, region: u32) -> impl Iterator<Item = PeerId> {
        let holds = self.slots.iter().flat_map(|slot| match slot {
            Some(InFlight::Rpc { holds, .. }) => holds.as_slice(),
            _ => &[],
        });
        holds.filter(move |hold| hold.region == region).map(|hold| hold.peer)
    }

    /// How many messages to a peer UCX has yet to send.
    pub(crate) fn messages(&self, peer: PeerId) -> u64 {
        let is_such =
            |slot: &&Option<InFlight>| matches!(slot, Some(InFlight::Message { peer: to, .. }) if *to == peer);
        self.slots.iter().filter(is_such).count() as u64
    }

    /// Takes out an operation that has ended, or was not posted after all.
    pub(crate) fn remove(&mut self, token: u64) -> Option<InFlight> {
        let index = usize::try_from(token).ok()?;
        let operation = self.slots.get_mut(index)?.take()?;
        self.free.push(index);
        Some(operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_hold_regions_being_sent_to_them() {
        let mut operations = Operations::default();
        let rpc = |peer: u64, regions: &[u32]| {
            let peer = PeerId::from_raw(peer);
            InFlight::Rpc { peer, held: 1, holds: regions.iter().map(|region| Hold::new(*region, peer)).collect() }
        };
        operations.insert(rpc(1, &[3, 4]));
        let ended = operations.insert(rpc(2, &[4]));
        operations.insert(rpc(3, &[]));
        operations.insert(InFlight::Goodbye);
        let holders_of = |operations: &Operations, region| operations.holders_of(region).collect::<Vec<_>>();
        assert_eq!(holders_of(&operations, 4), [PeerId::from_raw(1), PeerId::from_raw(2)]);
        operations.remove(ended);
        assert_eq!(holders_of(&operations, 4), [PeerId::from_raw(1)]);
        assert_eq!(holders_of(&operations, 3), [PeerId::from_raw(1)]);
        assert_eq!(holders_of(&operations, 5), []);
    }

    #[test]
    fn tokens_are_reused_only_after_their_end() {
        let mut operations = Operations::default();
        let (a, b) = (operations.insert(InFlight::CloseFlush), operations.insert(InFlight::CloseFlush));
        assert_ne!(a, b);
        assert_eq!(operations.remove(a), Some(InFlight::CloseFlush));
        assert_eq!(operations.remove(a), None);
        assert_eq!(operations.remove(99), None);
        assert_eq!(operations.insert(InFlight::CloseFlush), a);
    }
}
