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
