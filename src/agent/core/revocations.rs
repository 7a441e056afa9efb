//! Regions that are being deregistered while processes of this host may read and write them by themselves: host memory by
//! the kernel's copies, device memory by a mapping.
//!
//! Such a copy does not end with the registration, and a mapping keeps freed memory from being free. So the owner asks its peers
//! on the host to let go, and its deregistration waits for their answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use super::ids::PeerId;
use crate::proto::ids::Incarnation;

/// What was asked, and what is still to be answered.
#[derive(Default)]
pub(crate) struct Revocations {
    /// Own regions that these peers were asked to let go. Each counts as a use of the region.
    asked: BTreeSet<(PeerId, u32)>,
    /// Peers that have said that they still use memory of this side, and will say when they do not.
    in_use: BTreeSet<PeerId>,
    /// Peers that were given up before they had let go, which they cannot say any more, and their processes where those are known.
    given_up: BTreeMap<PeerId, Option<u32>>,
    /// Regions of peers that this side lets go.
    owed: BTreeMap<(PeerId, u32), Owed>,
}

/// What has to end before a region can be let go.
struct Owed {
    /// Transfers that read or write it.
    users: usize,
    /// What tells when its mappings are undone.
    traces: Vec<Weak<()>>,
}

impl Owed {
    fn is_due(&self) -> bool {
        self.users == 0 && self.traces.iter().all(|trace| trace.strong_count() == 0)
    }
}

impl Revocations {
    /// A peer is asked to let a region go. Whether it was not asked before.
    pub(crate) fn ask(&mut self, peer: PeerId, region: u32) -> bool {
        self.asked.insert((peer, region))
    }

    /// A peer has let a region go. Whether it had been asked to.
    pub(crate) fn answered(&mut self, peer: PeerId, region: u32) -> bool {
        let was_asked = self.asked.remove(&(peer, region));
        if !self.is_asked(peer) {
            self.in_use.remove(&peer);
            self.given_up.remove(&peer);
        }
        was_asked
    }

    /// Whether a peer has yet to let any region go.
    fn is_asked(&self, peer: PeerId) -> bool {
        self.asked.range((peer, 0)..=(peer, u32::MAX)).next().is_some()
    }

    /// A peer says that it still uses memory of this side.
    pub(crate) fn note_use(&mut self, peer: PeerId) {
        self.in_use.insert(peer);
    }

    /// Whether a peer has said so, and not that it has ended.
    pub(crate) fn is_in_use(&self, peer: PeerId) -> bool {
        self.in_use.contains(&peer)
    }

    /// Peers that have not let all regions go that they were asked to.
    pub(crate) fn holders(&self) -> BTreeSet<PeerId> {
        self.asked.iter().map(|(peer, _)| *peer).collect()
    }

    /// Peers that have not let a region go.
    pub(crate) fn borrowers(&self, region: u32) -> impl Iterator<Item = PeerId> {
        self.asked.iter().filter(move |(_, asked)| *asked == region).map(|(peer, _)| *peer)
    }

    /// A peer is given up, whose process, of this number if it is known, goes on: what it was asked to let go it may still use.
    pub(crate) fn give_up(&mut self, peer: PeerId, process: Option<u32>) {
        self.owed.retain(|(owed, _), _| *owed != peer);
        if self.is_asked(peer) {
            self.given_up.insert(peer, process);
        } else {
            self.in_use.remove(&peer);
        }
    }

    /// Peers that were given up before they had let go, and whose processes are known.
    pub(crate) fn given_up(&self) -> Vec<(PeerId, u32)> {
        self.given_up.iter().filter_map(|(peer, process)| Some((*peer, (*process)?))).collect()
    }

    /// A peer is gone. Returns the regions that it need not let go any more.
    pub(crate) fn forget(&mut self, peer: PeerId) -> Vec<u32> {
        self.owed.retain(|(owed, _), _| *owed != peer);
        self.in_use.remove(&peer);
        self.given_up.remove(&peer);
        let is_its = |(asked, _): &&(PeerId, u32)| *asked == peer;
        let freed = self.asked.iter().filter(is_its).map(|(_, region)| *region).collect();
        self.asked.retain(|(asked, _)| *asked != peer);
        freed
    }

    /// This side is to let a peer's region go, which so many transfers use and whose mappings have these traces.
    pub(crate) fn owe(&mut self, peer: PeerId, region: u32, users: usize, traces: Vec<Weak<()>>) {
        self.owed.insert((peer, region), Owed { users, traces });
    }

    /// Whether this side is to let a peer's region go.
    pub(crate) fn is_owed(&self, peer: PeerId, region: u32) -> bool {
        self.owed.contains_key(&(peer, region))
    }

    /// A transfer that used these regions of peers is over.
    pub(crate) fn user_ended(&mut self, regions: &[(PeerId, u32)]) {
        for region in regions {
            if let Some(owed) = self.owed.get_mut(region) {
                owed.users = owed.users.saturating_sub(1);
            }
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

    /// Takes what can be answered: what nothing uses any more.
    pub(crate) fn take_due(&mut self) -> Vec<(PeerId, u32)> {
        let due: Vec<(PeerId, u32)> =
            self.owed.iter().filter(|(_, owed)| owed.is_due()).map(|(region, _)| *region).collect();
        for region in &due {
            self.owed.remove(region);
        }
        due
    }
}

/// Traces of what was mapped of the regions of agents, by the agent's life and the region: each is gone when its mapping was undone.
/// A mapping may outlive the connection that it was made for.
#[derive(Default)]
pub(crate) struct Traces {
    by_region: BTreeMap<(Incarnation, u32), Vec<Weak<()>>>,
    /// How many regions there may be before those of which nothing is mapped are forgotten.
    room: usize,
}

impl Traces {
    /// For a mapping that is to be made, which drops it when it was undone.
    pub(crate) fn begin(&mut self, owner: Incarnation, region: u32) -> Arc<()> {
        if self.by_region.len() >= self.room {
            // Entries of owners and regions that are gone would grow without end.
            self.by_region.retain(|_, traces| traces.iter().any(|trace| trace.strong_count() > 0));
            self.room = 2 * self.by_region.len() + 1;
        }
        let trace = Arc::new(());
        let traces = self.by_region.entry((owner, region)).or_default();
        traces.retain(|trace| trace.strong_count() > 0);
        traces.push(Arc::downgrade(&trace));
        trace
    }

    /// Those of a region.
    pub(crate) fn of(&self, owner: Incarnation, region: u32) -> Vec<Weak<()>> {
        self.by_region.get(&(owner, region)).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_of_a_region_is_known_until_it_was_undone() {
        let (a, b) = (Incarnation(1), Incarnation(2));
        let mut traces = Traces::default();
        let (first, second, other) = (traces.begin(a, 3), traces.begin(a, 3), traces.begin(a, 4));
        let live = |traces: &[Weak<()>]| traces.iter().filter(|trace| trace.strong_count() > 0).count();
        assert_eq!((live(&traces.of(a, 3)), live(&traces.of(a, 4)), traces.of(b, 3).len()), (2, 1, 0));
        let mut revocations = Revocations::default();
        let peer = PeerId::from_raw(1);
        revocations.owe(peer, 3, 0, traces.of(a, 3));
        drop(first);
        assert!(revocations.take_due().is_empty());
        drop(second);
        assert_eq!(revocations.take_due(), [(peer, 3)]);
        for region in 0..1000 {
            drop(traces.begin(b, region));
            assert!(traces.by_region.len() <= 4, "of regions that are gone");
        }
        assert_eq!((traces.of(a, 3).len(), live(&traces.of(a, 4))), (0, 1));
        drop(other);
    }

    #[test]
    fn each_peer_answers_once_or_is_gone() {
        let (a, b) = (PeerId::from_raw(1), PeerId::from_raw(2));
        let mut revocations = Revocations::default();
        assert!(revocations.ask(a, 3) && !revocations.ask(a, 3) && revocations.ask(b, 3) && revocations.ask(b, 4));
        assert_eq!(revocations.borrowers(3).collect::<Vec<_>>(), [a, b]);
        assert!(revocations.answered(a, 3) && !revocations.answered(a, 3) && !revocations.answered(a, 4));
        revocations.note_use(a);
        revocations.note_use(b);
        assert!(revocations.is_in_use(b) && revocations.ask(a, 5) && revocations.ask(a, 6));
        assert_eq!(revocations.holders().into_iter().collect::<Vec<_>>(), [a, b]);
        assert!(revocations.answered(a, 5) && revocations.is_in_use(a), "of one more it has not said so");
        assert!(revocations.answered(a, 6) && !revocations.is_in_use(a));
        assert_eq!(revocations.forget(b), [3, 4]);
        assert!(!revocations.is_in_use(b));
        assert_eq!(revocations.borrowers(3).count(), 0);
    }

    #[test]
    fn a_peer_that_was_given_up_is_still_asked() {
        let (a, b, c) = (PeerId::from_raw(1), PeerId::from_raw(2), PeerId::from_raw(3));
        let mut revocations = Revocations::default();
        assert!(revocations.ask(a, 3) && revocations.ask(a, 4) && revocations.ask(b, 3));
        revocations.note_use(a);
        revocations.note_use(c);
        revocations.owe(a, 7, 0, Vec::new());
        revocations.give_up(a, Some(70));
        revocations.give_up(b, None);
        revocations.give_up(c, Some(71));
        assert_eq!(revocations.given_up(), [(a, 70)], "of one nothing is known, and one uses nothing");
        assert!(revocations.is_in_use(a) && !revocations.is_in_use(c) && !revocations.are_owed());
        assert_eq!(revocations.borrowers(3).collect::<Vec<_>>(), [a, b]);
        assert!(revocations.answered(a, 3) && revocations.is_in_use(a));
        assert_eq!(revocations.forget(a), [4]);
        assert!(revocations.given_up().is_empty() && !revocations.is_in_use(a));
        assert!(revocations.answered(b, 3) && !revocations.are_open());
    }

    #[test]
    fn what_is_owed_is_due_when_nothing_uses_it() {
        let (a, b) = (PeerId::from_raw(1), PeerId::from_raw(2));
        let mut revocations = Revocations::default();
        revocations.owe(a, 1, 0, vec![Weak::new()]);
        revocations.owe(a, 3, 2, Vec::new());
        revocations.owe(b, 2, 0, Vec::new());
        assert!(revocations.forget(b).is_empty() && revocations.is_owed(a, 3) && !revocations.is_owed(b, 2));
        assert_eq!(revocations.take_due(), [(a, 1)]);
        revocations.user_ended(&[(a, 1), (a, 3), (b, 3)]);
        assert_eq!((revocations.take_due(), revocations.are_owed()), (Vec::new(), true));
        revocations.user_ended(&[(a, 3)]);
        assert_eq!(revocations.take_due(), [(a, 3)]);
        assert!(!revocations.are_owed());
    }
}
