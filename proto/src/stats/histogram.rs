//! Histograms of fixed buckets: those of two ranks, or of two times, merge by addition.

use std::marker::PhantomData;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Buckets of every histogram, the last of which has no upper bound.
pub const BUCKETS: usize = 20;

/// The unit of a histogram.
pub trait Unit: Copy {
    /// Upper bounds of all buckets but the last, each inclusive, ascending.
    const BOUNDS: [u64; BUCKETS - 1];
}

/// Microseconds, from 10 us to 30 s. From one block within a host to a read that is about to time out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Micros;

impl Unit for Micros {
    const BOUNDS: [u64; BUCKETS - 1] = [
        10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
        2_500_000, 10_000_000, 30_000_000,
    ];
}

/// Bytes, in powers of two from 64 KiB to 16 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes;

impl Unit for Bytes {
    const BOUNDS: [u64; BUCKETS - 1] = {
        let (mut bounds, mut index) = ([0; BUCKETS - 1], 0);
        let mut bound = 1 << 16;
        while index < BUCKETS - 1 {
            #[allow(clippy::indexing_slicing, reason = "evaluated when this is compiled")]
            {
                bounds[index] = bound;
            }
            bound <<= 1;
            index += 1;
        }
        bounds
    };
}

/// How many values fell into which bucket, and their sum. On the wire a map of `counts`, without the zeros at their
/// end, and `sum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Histogram<U> {
    counts: [u64; BUCKETS],
    sum: u64,
    unit: PhantomData<U>,
}

impl<U: Unit> Histogram<U> {
    /// Counts one value. Everything saturates.
    pub fn observe(&mut self, value: u64) {
        let bucket = U::BOUNDS.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count = count.saturating_add(1);
        }
        self.sum = self.sum.saturating_add(value);
    }

    /// Adds what `other` counted.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count = count.saturating_add(more);
        }
        self.sum = self.sum.saturating_add(other.sum);
    }

    /// How many values fell into each bucket.
    pub fn counts(&self) -> &[u64; BUCKETS] {
        &self.counts
    }

    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The sum of all values, in the unit.
    pub fn sum(&self) -> u64 {
        self.sum
    }
}

#[derive(Serialize)]
struct EncodedHistogram<'a> {
    counts: &'a [u64],
    sum: u64,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct DecodedHistogram {
    counts: Vec<u64>,
    sum: u64,
}

impl<U> Serialize for Histogram<U> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let used = self.counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        EncodedHistogram { counts: self.counts.get(..used).unwrap_or_default(), sum: self.sum }.serialize(serializer)
    }
}

impl<'de, U> Deserialize<'de> for Histogram<U> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let DecodedHistogram { counts: given, sum } = DecodedHistogram::deserialize(deserializer)?;
        let mut counts = [0; BUCKETS];
        let Some(used) = counts.get_mut(..given.len()) else {
            let text = format!("a histogram of {} buckets, expected at most {BUCKETS}", given.len());
            return Err(serde::de::Error::custom(text));
        };
        used.copy_from_slice(&given);
        Ok(Histogram { counts, sum, unit: PhantomData })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[u64]) -> Histogram<Micros> {
        let mut histogram = Histogram::default();
        values.iter().for_each(|value| histogram.observe(*value));
        histogram
    }

    #[test]
    fn bounds_ascend_and_belong_to_their_bucket() {
        fn check<U: Unit + Default>() {
            assert!(U::BOUNDS.is_sorted_by(|a, b| a < b));
            for (index, bound) in U::BOUNDS.iter().enumerate() {
                let (mut at, mut over) = (Histogram::<U>::default(), Histogram::<U>::default());
                at.observe(*bound);
                over.observe(bound + 1);
                assert_eq!((at.counts().get(index), over.counts().get(index + 1)), (Some(&1), Some(&1)));
            }
        }
        check::<Micros>();
        check::<Bytes>();
    }

    #[test]
    fn longer_lists_and_other_types_are_refused() {
        let long = serde_json::json!({"counts": vec![1; BUCKETS + 1], "sum": 3});
        let error = serde_json::from_value::<Histogram<Micros>>(long).unwrap_err().to_string();
        assert!(error.contains("21 buckets") && error.contains("at most 20"), "{error}");
        assert!(serde_json::from_value::<Histogram<Micros>>(serde_json::json!(7)).is_err());
        assert!(serde_json::from_value::<Histogram<Micros>>(serde_json::json!({"counts": [-1]})).is_err());
        let whole = serde_json::json!({"counts": vec![1; BUCKETS]});
        assert_eq!(serde_json::from_value::<Histogram<Micros>>(whole).unwrap().count(), BUCKETS as u64);
    }

    #[test]
    fn everything_saturates() {
        let mut sum = of(&[u64::MAX]);
        sum.merge(&of(&[u64::MAX, 1]));
        assert_eq!((sum.count(), sum.sum()), (3, u64::MAX));
    }

    proptest! {
        #[test]
        fn merging_is_counting_together_and_the_wire_keeps_everything(
            a in proptest::collection::vec(0..100_000_000_u64, 0..30),
            b in proptest::collection::vec(0..100_000_000_u64, 0..30),
        ) {
            let (mut left, mut right) = (of(&a), of(&b));
            left.merge(&of(&b));
            right.merge(&of(&a));
            let together = of(&[a, b].concat());
            prop_assert_eq!(left, together);
            prop_assert_eq!(right, together);
            let wire = rmp_serde::to_vec_named(&together).unwrap();
            prop_assert_eq!(rmp_serde::from_slice::<Histogram<Micros>>(&wire).unwrap(), together);
        }
    }
}
