//! Maps whose keys are ids of this agent's own.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map by id.
pub(crate) type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;
/// A set of ids.
pub(crate) type IdSet<K> = HashSet<K, BuildHasherDefault<IdHasher>>;

/// Spreads numbers that are counted up. Nobody else chooses them, so nobody can make them collide, against which std's own
/// hash guards, at a cost that small transfers feel.
#[derive(Debug, Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // Multiplied by 2^64 / the golden ratio, as in Knuth's multiplicative hashing; maps take both ends of the result.
        let product = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ product >> 32;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn numbers_that_follow_each_other_are_spread() {
        let hash = |number: u64| {
            let mut hasher = IdHasher::default();
            hasher.write_u64(number);
            hasher.finish()
        };
        let salt = 0x1234_u64 << 48;
        let ends: BTreeSet<u64> = (0..128).map(|number| hash(salt + number) & 127).collect();
        let tops: BTreeSet<u64> = (0..128).map(|number| hash(salt + number) >> 57).collect();
        assert!(ends.len() > 64 && tops.len() > 64, "{} and {}", ends.len(), tops.len());
    }
}
