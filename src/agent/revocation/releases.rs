//! Regions of peers that this side must release once it no longer uses them.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use crate::agent::core::ids::{PeerId, TransferId};
use crate::proto::ids::Incarnation;

/// The uses that must end before a region can be released.
struct Uses {
    /// Transfers that read or write it.
    transfers: Vec<TransferId>,
    /// Traces of its mappings, which end with them.
    traces: Vec<Weak<()>>,
}

/// Regions that peers have revoked and this side has yet to release.
#[derive(Default)]
pub(crate) struct Releases(BTreeMap<(PeerId, u32), Uses>);

impl Releases {
    /// A peer has revoked a region, which these transfers use and whose mappings have these traces.
    pub(crate) fn insert(&mut self, peer: PeerId, region: u32, transfers: Vec<TransferId>, traces: Vec<Weak<()>>) {
        self.0.insert((peer, region), Uses { transfers, traces });
    }

    /// Whether this side has yet to release a region.
    pub(crate) fn contains(&self, peer: PeerId, region: u32) -> bool {
        self.0.contains_key(&(peer, region))
    }

    /// Whether there is nothing to release.
    pub(crate) fn are_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A peer is gone.
    pub(crate) fn forget(&mut self, peer: PeerId) {
        self.0.retain(|(of, _), _| *of != peer);
    }

    /// Takes what nothing uses any more. `is_going_on` tells whether a transfer is not over.
    pub(crate) fn take_unused(&mut self, is_going_on: impl Fn(TransferId) -> bool) -> Vec<(PeerId, u32)> {
        let mut unused = Vec::new();
        self.0.retain(|region, Uses { transfers, traces }| {
            transfers.retain(|transfer| is_going_on(*transfer));
            let is_used = !transfers.is_empty() || traces.iter().any(|trace| trace.strong_count() > 0);
            if !is_used {
                unused.push(*region);
            }
            is_used
        });
        unused
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

    const PEER: PeerId = PeerId(1);

    #[test]
    fn mapped_region_is_in_use_until_unmapped() {
        let (a, b) = (Incarnation(1), Incarnation(2));
        let mut traces = Traces::default();
        let (first, second, other) = (traces.begin(a, 3), traces.begin(a, 3), traces.begin(a, 4));
        let live = |traces: &[Weak<()>]| traces.iter().filter(|trace| trace.strong_count() > 0).count();
        assert_eq!((live(&traces.of(a, 3)), live(&traces.of(a, 4)), traces.of(b, 3).len()), (2, 1, 0));
        let mut releases = Releases::default();
        releases.insert(PEER, 3, Vec::new(), traces.of(a, 3));
        drop(first);
        assert!(releases.take_unused(|_| false).is_empty());
        drop(second);
        assert_eq!(releases.take_unused(|_| false), [(PEER, 3)]);
        for region in 0..1000 {
            drop(traces.begin(b, region));
            assert!(traces.by_region.len() <= 4, "of regions that are gone");
        }
        assert_eq!((traces.of(a, 3).len(), live(&traces.of(a, 4))), (0, 1));
        drop(other);
    }

    #[test]
    fn unused_regions_are_released() {
        let [one, other] = [11, 12].map(TransferId::from_raw);
        let mut releases = Releases::default();
        releases.insert(PEER, 1, Vec::new(), vec![Weak::new()]);
        releases.insert(PEER, 3, vec![one, other], Vec::new());
        releases.insert(PeerId(2), 2, Vec::new(), Vec::new());
        releases.forget(PeerId(2));
        assert!(releases.contains(PEER, 3) && !releases.contains(PeerId(2), 2));
        assert_eq!(releases.take_unused(|_| true), [(PEER, 1)]);
        assert!(releases.take_unused(|transfer| transfer == one).is_empty() && !releases.are_empty());
        assert_eq!(releases.take_unused(|_| false), [(PEER, 3)]);
        assert!(releases.are_empty());
    }
}
