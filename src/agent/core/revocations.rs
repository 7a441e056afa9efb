//! Regions that are being deregistered while processes of this host may read and write them by themselves: host memory by
//! the kernel's copies, device memory by a mapping.
//!
//! Such a copy does not end with the registration, and a mapping keeps freed memory from being free. So the owner asks its peers
//! on the host to let go, and its deregistration waits for their answers.

use std::collections::BTreeSet;
use std::sync::Weak;

use super::ids::PeerId;
use crate::mem::cuda::ipc::Imported;

/// What was asked, and what is still to be answered.
#[derive(Default)]
pub(crate) struct Revocations {
    /// Own regions that these peers were asked to let go. Each counts as a use of the region.
    asked: BTreeSet<(PeerId, u32)>,
    /// Regions of peers that this side lets go, and the mappings of them that copies under way still hold.
    owed: Vec<(PeerId, u32, Vec<Weak<Imported>>)>,
}

impl Revocations {
    /// A peer is asked to let a region go. Whether it was not asked before.
    pub(crate) fn ask(&mut self, peer: PeerId, region: u32) -> bool {
        self.asked.insert((peer, region))
    }

    /// A peer has let a region go. Whether it had been asked to.
    pub(crate) fn answered(&mut self, peer: PeerId, region: u32) -> bool {
        self.asked.remove(&(peer, region))
    }

    /// Peers that have not let a region go.
    pub(crate) fn borrowers(&self, region: u32) -> impl Iterator<Item = PeerId> {
        self.asked.iter().filter(move |(_, asked)| *asked == region).map(|(peer, _)| *peer)
    }

    /// A peer is gone. Returns the regions that it need not let go any more.
    pub(crate) fn forget(&mut self, peer: PeerId) -> Vec<u32> {
        self.owed.retain(|(owed, _, _)| *owed != peer);
        let is_its = |(asked, _): &&(PeerId, u32)| *asked == peer;
        let freed = self.asked.iter().filter(is_its).map(|(_, region)| *region).collect();
        self.asked.retain(|(asked, _)| *asked != peer);
        freed
    }

    /// This side is to let a peer's region go, of which these mappings were made.
    pub(crate) fn owe(&mut self, peer: PeerId, region: u32, mappings: Vec<Weak<Imported>>) {
        if !self.owed.iter().any(|(owed, known, _)| (*owed, *known) == (peer, region)) {
            self.owed.push((peer, region, mappings));
        }
    }

    /// Whether any peer has not let a region go that it was asked to.
    pub(crate) fn are_open(&self) -> bool {
        !self.asked.is_empty()
    }

    /// Whether this side has a region to let go.
    pub(crate) fn are_owed(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Takes what can be answered: of which no mapping is left, and which is not in use.
    pub(crate) fn take_due(&mut self, is_in_use: impl Fn(PeerId, u32) -> bool) -> Vec<(PeerId, u32)> {
        let is_due = |(peer, region, mappings): &mut (PeerId, u32, Vec<Weak<Imported>>)| {
            mappings.iter().all(|mapping| mapping.strong_count() == 0) && !is_in_use(*peer, *region)
        };
        self.owed.extract_if(.., is_due).map(|(peer, region, _)| (peer, region)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_answers_once_or_is_gone() {
        let (a, b) = (PeerId::from_raw(1), PeerId::from_raw(2));
        let mut revocations = Revocations::default();
        assert!(revocations.ask(a, 3) && !revocations.ask(a, 3) && revocations.ask(b, 3) && revocations.ask(b, 4));
        assert_eq!(revocations.borrowers(3).collect::<Vec<_>>(), [a, b]);
        assert!(revocations.answered(a, 3) && !revocations.answered(a, 3) && !revocations.answered(a, 4));
        assert_eq!(revocations.forget(b), [3, 4]);
        assert_eq!(revocations.borrowers(3).count(), 0);
    }

    #[test]
    fn what_is_owed_is_due_when_no_mapping_is_left() {
        let (a, b) = (PeerId::from_raw(1), PeerId::from_raw(2));
        let mut revocations = Revocations::default();
        revocations.owe(a, 1, vec![Weak::new()]);
        revocations.owe(a, 3, Vec::new());
        revocations.owe(b, 2, Vec::new());
        assert!(revocations.forget(b).is_empty());
        assert_eq!(revocations.take_due(|peer, region| (peer, region) == (a, 3)), [(a, 1)]);
        assert!(revocations.are_owed());
        assert_eq!(revocations.take_due(|_, _| false), [(a, 3)]);
        assert!(!revocations.are_owed());
    }
}
