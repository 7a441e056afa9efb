//! The lives of requests, for a trace.

use crate::ids::{EngineId, RequestId};
use crate::time::Time;
use crate::wire::RecvRecord;

/// An event in the life of a request. The numbers tell requests of one machine apart, also those of the same name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceEvent {
    /// The consumer heard of a request, by a hold or by a load.
    RecvBegan {
        /// The request's number.
        number: u64,
        /// The request as this engine names it.
        request: RequestId,
        /// When.
        at: Time,
    },
    /// A load is over.
    RecvEnded {
        /// The number in its begin event.
        number: u64,
        /// How it went.
        receive: Box<ReceiveTrace>,
    },
    /// A request that was held is over without a load.
    RecvReleased {
        /// The number in its begin event.
        number: u64,
        /// The request in its begin event.
        request: RequestId,
        /// When.
        at: Time,
    },
    /// The producer keeps a request's blocks.
    SendBegan {
        /// As the producer names it.
        request: RequestId,
        /// When.
        at: Time,
    },
    /// The producer no longer keeps a request's blocks.
    SendEnded {
        /// The request in its begin event.
        request: RequestId,
        /// When.
        at: Time,
        /// Why.
        how: LeaseEnd,
    },
}

/// How a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseEnd {
    /// A consumer has read.
    Read,
    /// Consumers declined.
    Released,
    /// Nobody came in time.
    Expired,
    /// This engine ended it.
    Dropped,
}

impl LeaseEnd {
    /// The name in a trace.
    pub fn name(self) -> &'static str {
        match self {
            LeaseEnd::Read => "read",
            LeaseEnd::Released => "released",
            LeaseEnd::Expired => "expired",
            LeaseEnd::Dropped => "dropped",
        }
    }
}

/// The stages of one load. What it did not reach is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveTrace {
    /// The engine that it read from.
    pub engine: EngineId,
    /// The worker first heard of the request.
    pub known: Time,
    /// The load arrived.
    pub queued: Time,
    /// The handshake that it waited for: its begin, and when the first rank was connected. `None` when it waited for
    /// none.
    pub handshake: Option<(Time, Option<Time>)>,
    /// The first rank was connected, and the reads from those that were are planned.
    pub planned: Option<Time>,
    /// The first operation was posted.
    pub posted: Option<Time>,
    /// The last one was.
    pub all_posted: Option<Time>,
    /// The last byte came.
    pub last_byte: Option<Time>,
    /// The last verdict said that the lease held.
    pub confirmed: Option<Time>,
    /// It was over.
    pub over: Time,
    /// The chunks read while its prefill was under way, in the order of posting.
    pub chunks: Vec<ReceivedChunk>,
    /// Its figures.
    pub record: RecvRecord,
    /// Why it failed, if it did.
    pub message: Option<String>,
}

/// A chunk of a prefill under way, read from one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedChunk {
    /// The tokens: from the first up to, not including, the second.
    pub tokens: (u64, u64),
    /// Bytes moved.
    pub bytes: u64,
    /// The first operation was posted.
    pub posted: Time,
    /// The last byte came.
    pub over: Time,
}
