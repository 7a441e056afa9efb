//! Counters that merge: associative, commutative, with the default as identity.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::wire::Cause;

/// What a worker counted. All counters are totals since the last report; merging adds them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Receives that succeeded.
    pub recvs: u64,
    /// Receives that failed, by cause.
    pub recv_failures: BTreeMap<Cause, u64>,
    /// Bytes received.
    pub bytes: u64,
    /// Blocks received.
    pub blocks: u64,
    /// UCX operations posted.
    pub operations: u64,
    /// Sum of transfer times in microseconds.
    pub transfer_us: u64,
    /// Sum of times from a step's arrival to the first posted operation, in microseconds.
    pub queued_us: u64,
    /// Sum of times from the last byte to the producer's verdict, in microseconds.
    pub confirm_us: u64,
    /// Sends that a consumer confirmed.
    pub sends_read: u64,
    /// Sends that a consumer released without reading.
    pub sends_released: u64,
    /// Sends whose lease ran out.
    pub sends_expired: u64,
    /// Heartbeats received for granted requests.
    pub renewals: u64,
    /// Handshakes that succeeded.
    pub handshakes: u64,
    /// Handshakes that failed.
    pub handshake_failures: u64,
}

impl Stats {
    /// Adds `other`'s counters to these. Counters saturate.
    pub fn merge(&mut self, other: &Stats) {
        // Named one by one, so that a new counter that is not merged does not compile.
        let Stats {
            recvs,
            recv_failures,
            bytes,
            blocks,
            operations,
            transfer_us,
            queued_us,
            confirm_us,
            sends_read,
            sends_released,
            sends_expired,
            renewals,
            handshakes,
            handshake_failures,
        } = other;
        for (sum, more) in [
            (&mut self.recvs, recvs),
            (&mut self.bytes, bytes),
            (&mut self.blocks, blocks),
            (&mut self.operations, operations),
            (&mut self.transfer_us, transfer_us),
            (&mut self.queued_us, queued_us),
            (&mut self.confirm_us, confirm_us),
            (&mut self.sends_read, sends_read),
            (&mut self.sends_released, sends_released),
            (&mut self.sends_expired, sends_expired),
            (&mut self.renewals, renewals),
            (&mut self.handshakes, handshakes),
            (&mut self.handshake_failures, handshake_failures),
        ] {
            *sum = sum.saturating_add(*more);
        }
        for (&cause, &more) in recv_failures.iter().filter(|&(_, &more)| more > 0) {
            let sum = self.recv_failures.entry(cause).or_default();
            *sum = sum.saturating_add(more);
        }
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        let Stats { recv_failures, .. } = self;
        recv_failures.values().all(|&n| n == 0)
            && Stats { recv_failures: BTreeMap::new(), ..self.clone() } == Stats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every counter a different prime multiple of `n`.
    fn sample(n: u64) -> Stats {
        Stats {
            recvs: 2 * n,
            recv_failures: BTreeMap::from([(Cause::Timeout, 3 * n), (Cause::Aborted, n % 2)]),
            bytes: 5 * n,
            blocks: 7 * n,
            operations: 11 * n,
            transfer_us: 13 * n,
            queued_us: 17 * n,
            confirm_us: 19 * n,
            sends_read: 23 * n,
            sends_released: 29 * n,
            sends_expired: 31 * n,
            renewals: 37 * n,
            handshakes: 41 * n,
            handshake_failures: 43 * n,
        }
    }

    fn sum(parts: &[&Stats]) -> Stats {
        let mut sum = Stats::default();
        parts.iter().for_each(|part| sum.merge(part));
        sum
    }

    #[test]
    fn merging_adds_every_counter() {
        let mut expected = sample(3);
        expected.recv_failures = BTreeMap::from([(Cause::Timeout, 9), (Cause::Aborted, 1)]);
        assert_eq!(sum(&[&sample(1), &sample(2)]), expected);
    }

    #[test]
    fn merging_is_associative_and_commutative_with_nothing_as_identity() {
        let (a, b, c) = (sample(1), sample(4), sample(9));
        assert_eq!(sum(&[&sum(&[&a, &b]), &c]), sum(&[&a, &sum(&[&b, &c])]));
        assert_eq!(sum(&[&a, &b]), sum(&[&b, &a]));
        assert_eq!(sum(&[&a, &Stats::default()]), a);
    }

    #[test]
    fn counters_stop_at_their_end() {
        let most =
            Stats { bytes: u64::MAX, recv_failures: BTreeMap::from([(Cause::Timeout, u64::MAX)]), ..Stats::default() };
        let sum = sum(&[&most, &sample(1)]);
        assert_eq!((sum.bytes, sum.recv_failures.get(&Cause::Timeout)), (u64::MAX, Some(&u64::MAX)));
    }

    #[test]
    fn only_zeros_are_empty() {
        assert!(Stats::default().is_empty());
        assert!(Stats { recv_failures: BTreeMap::from([(Cause::Timeout, 0)]), ..Stats::default() }.is_empty());
        assert!(!Stats { confirm_us: 1, ..Stats::default() }.is_empty());
        assert!(!Stats { recv_failures: BTreeMap::from([(Cause::Timeout, 1)]), ..Stats::default() }.is_empty());
    }
}
