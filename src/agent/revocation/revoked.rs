//! Regions that were revoked, in as few runs of indices as can be.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::proto::wire::MemoryKind;

/// Runs that a hello names at most: they fit it. Where there are more, the peer uses no memory of this side by itself: it may have
/// metadata of regions that the hello does not name.
const MAX_RUNS: usize = 4096;

/// A set of region indices, kept as runs of consecutive ones: the last of each by its first.
#[derive(Default)]
pub(crate) struct Runs(BTreeMap<u32, u32>);

impl Runs {
    /// Adds the indices of a run. Returns the run that they are in now.
    pub(crate) fn add(&mut self, run: RangeInclusive<u32>) -> RangeInclusive<u32> {
        if run.is_empty() {
            return run;
        }
        let (mut first, mut last) = run.into_inner();
        // Those that overlap it or touch it, from the last one down.
        while let Some((&low, &high)) = self.0.range(..=last.saturating_add(1)).next_back()
            && high.saturating_add(1) >= first
        {
            self.0.remove(&low);
            (first, last) = (first.min(low), last.max(high));
        }
        self.0.insert(first, last);
        first..=last
    }

    /// Tells whether any index of a run is in the set.
    pub(crate) fn has_any_of(&self, run: RangeInclusive<u32>) -> bool {
        let (first, last) = run.into_inner();
        self.0.range(..=last).next_back().is_some_and(|(_, high)| *high >= first)
    }

    /// Tells whether an index is in the set.
    pub(crate) fn contains(&self, index: u32) -> bool {
        self.has_any_of(index..=index)
    }

    /// How many runs there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// First and last of each run, ascending.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (u32, u32)> + ExactSizeIterator {
        self.0.iter().map(|(first, last)| (*first, *last))
    }
}

/// The regions that this side has revoked in its life, as hellos name them: at most one run more than there are others.
#[derive(Default)]
pub(crate) struct RevokedRegions {
    all: Runs,
    /// Those runs of all that device memory is in.
    devices: Runs,
}

impl RevokedRegions {
    /// A region is being deregistered.
    pub(crate) fn add(&mut self, index: u32, kind: MemoryKind) {
        let run = self.all.add(index..=index);
        if kind != MemoryKind::Host || self.devices.has_any_of(run.clone()) {
            // With the host memory beside it, which is gone too: else the runs of an agent with both would be ever
            // more.
            let _ = self.devices.add(run);
        }
    }

    /// Those that matter to a peer: all to one that may copy host memory by itself, else those with device memory.
    fn of(&self, is_near: bool) -> &Runs {
        if is_near { &self.all } else { &self.devices }
    }

    /// First and last of each run that a hello to a peer names, ascending: the latest ones.
    pub(crate) fn named(&self, is_near: bool) -> Vec<(u32, u32)> {
        let runs = self.of(is_near);
        runs.iter().skip(runs.len().saturating_sub(MAX_RUNS)).collect()
    }

    /// Whether a hello to a peer cannot name all.
    pub(crate) fn are_cut(&self, is_near: bool) -> bool {
        self.of(is_near).len() > MAX_RUNS
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const DEVICE: MemoryKind = MemoryKind::Cuda { device: 0 };

    #[test]
    fn runs_hold_what_was_added_and_merge() {
        let (mut runs, mut model, mut random) = (Runs::default(), BTreeSet::new(), 7_u32);
        for _ in 0..300 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (first, len) = (random >> 16 & 1023, random >> 28);
            let _ = runs.add(first..=first + len);
            model.extend(first..=first + len);
            assert_eq!(runs.iter().flat_map(|(first, last)| first..=last).collect::<BTreeSet<_>>(), model);
            let ends = model.iter().filter(|index| !model.contains(&(*index + 1))).count();
            assert_eq!((runs.len(), runs.iter().len()), (ends, ends), "neighbours are one run");
            assert_eq!(runs.contains(random >> 20 & 1023), model.contains(&(random >> 20 & 1023)));
        }
    }

    #[test]
    fn runs_end_at_the_highest_index() {
        let mut runs = Runs::default();
        assert_eq!(runs.add(u32::MAX..=u32::MAX), u32::MAX..=u32::MAX);
        let (above, below) = (5, 4);
        assert!(runs.add(above..=below).is_empty());
        assert_eq!(runs.add(0..=3), 0..=3);
        assert!(runs.has_any_of(2..=9) && !runs.has_any_of(4..=9) && runs.contains(u32::MAX));
        assert_eq!(runs.add(4..=u32::MAX - 1), 0..=u32::MAX);
        assert_eq!(runs.len(), 1);
    }

    #[test]
    fn revoked_indices_become_runs_in_any_order() {
        let mut revoked = RevokedRegions::default();
        for index in [5, 9, 7, 0, u32::MAX, 6, 1, 6, 5] {
            revoked.add(index, if index == 9 { DEVICE } else { MemoryKind::Host });
        }
        assert_eq!(revoked.named(true), [(0, 1), (5, 7), (9, 9), (u32::MAX, u32::MAX)]);
        assert_eq!(revoked.named(false), [(9, 9)]);
        assert!(!revoked.are_cut(true));
        for index in 5000..15_000 {
            revoked.add(index * 2, MemoryKind::Host);
        }
        let named = revoked.named(true);
        assert_eq!(
            (named.len(), named.first(), named.last()),
            (MAX_RUNS, Some(&(21_810, 21_810)), Some(&(u32::MAX, u32::MAX)))
        );
        assert!(revoked.are_cut(true) && !revoked.are_cut(false));
    }

    /// However many regions of either kind there were.
    #[test]
    fn revoked_runs_grow_with_registered_regions() {
        let mut revoked = RevokedRegions::default();
        for index in (0..100_000).filter(|index| index % 1000 != 0) {
            revoked.add(index, if index % 2 == 0 { DEVICE } else { MemoryKind::Host });
        }
        assert_eq!((revoked.all.len(), revoked.devices.len()), (100, 100));
        let of_devices = revoked.named(false);
        assert_eq!((of_devices.first(), of_devices.last()), (Some(&(1, 999)), Some(&(99_001, 99_999))));
        let mut revoked = RevokedRegions::default();
        for (index, kind) in [(1, MemoryKind::Host), (3, DEVICE), (5, MemoryKind::Host)] {
            revoked.add(index, kind);
        }
        assert_eq!(revoked.named(false), [(3, 3)]);
        revoked.add(2, MemoryKind::Host);
        assert_eq!((revoked.named(false), revoked.named(true)), (vec![(1, 3)], vec![(1, 3), (5, 5)]));
    }
}
