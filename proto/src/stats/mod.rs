//! Counters, gauges and histograms that merge: associative, commutative, with the default as identity.
//!
//! [`METRICS`] names and explains each of them; [`prometheus`] writes them down.

mod histogram;
mod metrics;
mod prometheus;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use histogram::{BUCKETS, Bytes, Histogram, Micros, Unit};
pub use metrics::{METRICS, Metric, MetricKind, MetricScope};
pub use prometheus::{Row, prometheus};

use super::wire::Cause;

/// Counters of one worker since its last report; merging adds them. [`METRICS`] has the meaning of each.
///
/// Gauges are sent as changes since the last report. Their sum over reports is the present value, and their sum over
/// ranks is the value for all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Receives that succeeded.
    pub recvs: u64,
    /// Receives that failed, by cause.
    pub recv_failures: BTreeMap<Cause, u64>,
    /// Requests without a hand-over. A host counts them: a worker does not hear of them.
    pub local_requests: u64,
    /// Bytes received.
    pub bytes: u64,
    /// Those of `bytes` whose reads began before the end of the prefill was known.
    pub ahead_bytes: u64,
    /// Blocks received.
    pub blocks: u64,
    /// UCX operations posted.
    pub operations: u64,
    /// Leases granted.
    pub sends_granted: u64,
    /// Sends that a consumer confirmed.
    pub sends_read: u64,
    /// Sends that a consumer released without reading.
    pub sends_released: u64,
    /// Sends whose lease ran out.
    pub sends_expired: u64,
    /// Leases renewed by heartbeats.
    pub renewals: u64,
    /// Handshakes that succeeded.
    pub handshakes: u64,
    /// Handshakes that failed.
    pub handshake_failures: u64,
    /// Time from the worker's first word of a request to the report of its receive.
    pub handover_time: Histogram<Micros>,
    /// From a load's arrival to its first posted operation.
    pub queued_time: Histogram<Micros>,
    /// From a load's first posted operation to its last posted one.
    pub posting_time: Histogram<Micros>,
    /// From a load's first posted operation to its last byte.
    pub transfer_time: Histogram<Micros>,
    /// From a load's last byte to the producer's verdict.
    pub confirm_time: Histogram<Micros>,
    /// From a handshake's begin until every rank needed is connected.
    pub handshake_time: Histogram<Micros>,
    /// Bytes per receive.
    pub recv_bytes: Histogram<Bytes>,
    /// Gauge: leases that hold.
    pub leases: i64,
    /// Gauge: agents known as peers.
    pub peers: i64,
    /// Gauge: UCX endpoints.
    pub endpoints: i64,
    /// Gauge: registered bytes.
    pub registered_bytes: i64,
}

impl Stats {
    /// Adds `other`'s figures to these. All saturate.
    pub fn merge(&mut self, other: &Stats) {
        // Named one by one, so that a new figure that is not merged does not compile.
        let Stats {
            recvs,
            recv_failures,
            local_requests,
            bytes,
            ahead_bytes,
            blocks,
            operations,
            sends_granted,
            sends_read,
            sends_released,
            sends_expired,
            renewals,
            handshakes,
            handshake_failures,
            handover_time,
            queued_time,
            posting_time,
            transfer_time,
            confirm_time,
            handshake_time,
            recv_bytes,
            leases,
            peers,
            endpoints,
            registered_bytes,
        } = other;
        for (sum, more) in [
            (&mut self.recvs, recvs),
            (&mut self.local_requests, local_requests),
            (&mut self.bytes, bytes),
            (&mut self.ahead_bytes, ahead_bytes),
            (&mut self.blocks, blocks),
            (&mut self.operations, operations),
            (&mut self.sends_granted, sends_granted),
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
        for (sum, more) in [
            (&mut self.handover_time, handover_time),
            (&mut self.queued_time, queued_time),
            (&mut self.posting_time, posting_time),
            (&mut self.transfer_time, transfer_time),
            (&mut self.confirm_time, confirm_time),
            (&mut self.handshake_time, handshake_time),
        ] {
            sum.merge(more);
        }
        self.recv_bytes.merge(recv_bytes);
        for (sum, more) in [
            (&mut self.leases, leases),
            (&mut self.peers, peers),
            (&mut self.endpoints, endpoints),
            (&mut self.registered_bytes, registered_bytes),
        ] {
            *sum = sum.saturating_add(*more);
        }
    }

    /// True if nothing was counted.
    pub fn is_empty(&self) -> bool {
        let Stats { recv_failures, .. } = self;
        recv_failures.values().all(|&n| n == 0)
            && Stats { recv_failures: BTreeMap::new(), ..self.clone() } == Stats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram<U: Unit + Default>(value: u64) -> Histogram<U> {
        let mut histogram = Histogram::default();
        histogram.observe(value);
        histogram
    }

    /// Every counter a different prime multiple of `n`.
    fn sample(n: u64) -> Stats {
        let gauge = |factor: i64| factor * i64::try_from(n).unwrap_or(0);
        Stats {
            recvs: 2 * n,
            recv_failures: BTreeMap::from([(Cause::Timeout, 3 * n), (Cause::Aborted, n % 2)]),
            local_requests: 101 * n,
            bytes: 5 * n,
            ahead_bytes: 97 * n,
            blocks: 7 * n,
            operations: 11 * n,
            sends_granted: 13 * n,
            sends_read: 23 * n,
            sends_released: 29 * n,
            sends_expired: 31 * n,
            renewals: 37 * n,
            handshakes: 41 * n,
            handshake_failures: 43 * n,
            handover_time: histogram(47 * n),
            queued_time: histogram(53 * n),
            posting_time: histogram(59 * n),
            transfer_time: histogram(61 * n),
            confirm_time: histogram(67 * n),
            handshake_time: histogram(71 * n),
            recv_bytes: histogram(73_000 * n),
            leases: gauge(-79),
            peers: gauge(83),
            endpoints: gauge(89),
            registered_bytes: gauge(97),
        }
    }

    fn sum(parts: &[&Stats]) -> Stats {
        let mut sum = Stats::default();
        parts.iter().for_each(|part| sum.merge(part));
        sum
    }

    /// Every number in a stats map, by its path.
    fn numbers(value: &serde_json::Value, path: &str, out: &mut BTreeMap<String, i64>) {
        match value {
            serde_json::Value::Object(map) => map.iter().for_each(|(k, v)| numbers(v, &format!("{path}.{k}"), out)),
            serde_json::Value::Array(list) => {
                list.iter().enumerate().for_each(|(i, v)| numbers(v, &format!("{path}[{i}]"), out));
            }
            other => drop(out.insert(path.to_owned(), other.as_i64().unwrap_or(i64::MIN))),
        }
    }

    #[test]
    fn merging_adds_every_figure() {
        let tree = |stats: &Stats| {
            let mut out = BTreeMap::new();
            numbers(&serde_json::to_value(stats).unwrap_or_default(), "", &mut out);
            out
        };
        let mut expected = tree(&sample(1));
        for (path, number) in tree(&sample(2)) {
            *expected.entry(path).or_default() += number;
        }
        let mut merged = tree(&sum(&[&sample(1), &sample(2)]));
        // Zeros at the end of one histogram are there in a longer one.
        expected.retain(|_, n| *n != 0);
        merged.retain(|_, n| *n != 0);
        assert_eq!(merged, expected);
    }

    #[test]
    fn merging_is_associative_and_commutative_with_nothing_as_identity() {
        let (a, b, c) = (sample(1), sample(4), sample(9));
        assert_eq!(sum(&[&sum(&[&a, &b]), &c]), sum(&[&a, &sum(&[&b, &c])]));
        assert_eq!(sum(&[&a, &b]), sum(&[&b, &a]));
        assert_eq!(sum(&[&a, &Stats::default()]), a);
    }

    #[test]
    fn figures_stop_at_their_end() {
        let most = Stats {
            bytes: u64::MAX,
            peers: i64::MAX,
            recv_failures: BTreeMap::from([(Cause::Timeout, u64::MAX)]),
            ..Stats::default()
        };
        let sum = sum(&[&most, &sample(1)]);
        assert_eq!((sum.bytes, sum.peers), (u64::MAX, i64::MAX));
        assert_eq!(sum.recv_failures.get(&Cause::Timeout), Some(&u64::MAX));
    }

    #[test]
    fn only_zeros_are_empty() {
        assert!(Stats::default().is_empty());
        assert!(Stats { recv_failures: BTreeMap::from([(Cause::Timeout, 0)]), ..Stats::default() }.is_empty());
        assert!(!Stats { confirm_time: histogram(0), ..Stats::default() }.is_empty());
        assert!(!Stats { leases: -1, ..Stats::default() }.is_empty());
        assert!(!Stats { recv_failures: BTreeMap::from([(Cause::Timeout, 1)]), ..Stats::default() }.is_empty());
    }
}
