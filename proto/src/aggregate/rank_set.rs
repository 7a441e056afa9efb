//! A set of small numbers: one bit per rank, 8 bytes for engines of up to 64 ranks.

/// Indices into an aggregator's list of ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct RankSet(Vec<u64>);

impl RankSet {
    /// Adds `index`; whether it was not in the set yet.
    pub(super) fn insert(&mut self, index: usize) -> bool {
        let (word, bit) = (index / 64, 1u64 << (index % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        match self.0.get_mut(word) {
            Some(bits) if *bits & bit == 0 => {
                *bits |= bit;
                true
            }
            _ => false,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|bits| bits.count_ones() as usize).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_set() {
        let mut set = RankSet::default();
        assert!(set.insert(3) && set.insert(64) && set.insert(4095));
        assert!(!set.insert(64));
        assert_eq!(set.len(), 3);
    }
}
