//! Why a transfer failed.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a request's transfer failed. Counted per cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The other side died, restarted or broke the connection.
    PeerDied,
    /// The producer's lease had run out, or the producer no longer knew the request.
    LeaseExpired,
    /// The producer's listener could not be reached or refused.
    HandshakeFailed,
    /// The two engines' caches do not fit together.
    Incompatible,
    /// UCX reported an error.
    TransportError,
    /// This engine aborted the request.
    Aborted,
    /// A stated time ran out.
    Timeout,
    /// The request's own data was unusable (block ids out of range, unequal counts).
    InvalidRequest,
    /// The worker was shut down.
    ShutDown,
    /// The bytes that arrived were not those that the producer has.
    DigestMismatch,
}

impl Cause {
    /// All causes, in the order in which they are counted and printed.
    pub const ALL: [Cause; 10] = [
        Cause::PeerDied,
        Cause::LeaseExpired,
        Cause::HandshakeFailed,
        Cause::Incompatible,
        Cause::TransportError,
        Cause::Aborted,
        Cause::Timeout,
        Cause::InvalidRequest,
        Cause::ShutDown,
        Cause::DigestMismatch,
    ];

    /// The name used in logs, metrics and reports; the same as on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Cause::PeerDied => "peer_died",
            Cause::LeaseExpired => "lease_expired",
            Cause::HandshakeFailed => "handshake_failed",
            Cause::Incompatible => "incompatible",
            Cause::TransportError => "transport_error",
            Cause::Aborted => "aborted",
            Cause::Timeout => "timeout",
            Cause::InvalidRequest => "invalid_request",
            Cause::ShutDown => "shut_down",
            Cause::DigestMismatch => "digest_mismatch",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
