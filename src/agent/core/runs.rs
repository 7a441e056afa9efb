//! Sets of region indices that may come in any number and are mostly neighbours.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_set_of_runs_has_what_was_added_in_as_few_runs_as_can_be() {
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
    fn the_highest_index_has_no_neighbour_above() {
        let mut runs = Runs::default();
        assert_eq!(runs.add(u32::MAX..=u32::MAX), u32::MAX..=u32::MAX);
        let (above, below) = (5, 4);
        assert!(runs.add(above..=below).is_empty());
        assert_eq!(runs.add(0..=3), 0..=3);
        assert!(runs.has_any_of(2..=9) && !runs.has_any_of(4..=9) && runs.contains(u32::MAX));
        assert_eq!(runs.add(4..=u32::MAX - 1), 0..=u32::MAX);
        assert_eq!(runs.len(), 1);
    }
}
