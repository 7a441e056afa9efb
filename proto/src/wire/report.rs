//! Reports of workers to their scheduler side.

use serde::{Deserialize, Serialize};

use super::{Blocks, Cause};
use crate::ids::{RankId, RequestId};
use crate::stats::Stats;

/// A receive that failed on this rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecvFailure {
    /// The request.
    pub request: RequestId,
    /// Why, for programs.
    pub cause: Cause,
    /// Why, for people.
    pub message: String,
    /// The local blocks that were to be written, of every KV-cache group. Their contents are undefined.
    pub invalid_blocks: Blocks,
}

/// Figures of one completed or failed receive on this rank.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RecvRecord {
    /// The request as this engine names it.
    pub request: RequestId,
    /// The request as the producer names it.
    pub remote_request: RequestId,
    /// Blocks asked for, over all groups.
    pub blocks: u64,
    /// Bytes moved to this rank.
    pub bytes: u64,
    /// UCX operations posted.
    pub operations: u64,
    /// From the step's arrival at the worker to the first posted operation, in microseconds.
    pub queued_us: u64,
    /// From the first posted operation to the end of the first transfer, in microseconds. With several producer ranks each
    /// has a transfer of its own; with one it is `transfer_us`.
    #[serde(default)]
    pub first_us: u64,
    /// From the first posted operation to the last byte, in microseconds.
    pub transfer_us: u64,
    /// From the last byte to the producer's verdict, in microseconds.
    pub confirm_us: u64,
    /// None when it succeeded.
    pub cause: Option<Cause>,
}

/// The events of one rank since its last report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// The reporting rank.
    pub rank: RankId,
    /// Producer: granted requests that consumers may await, as this engine calls them. They have a name
    /// ([`Grant::name`](super::Grant::name)), and this rank has the lease. The step with the grant came when
    /// everything was written, so they may be read.
    #[serde(default)]
    pub granted: Vec<RequestId>,
    /// Sends over: each granted request once, whether read, released or expired.
    #[serde(default)]
    pub finished_sending: Vec<RequestId>,
    /// Receives over: each load once, whether it succeeded or failed.
    #[serde(default)]
    pub finished_recving: Vec<RequestId>,
    /// Those of `finished_recving` that failed.
    #[serde(default)]
    pub failed_recving: Vec<RecvFailure>,
    /// Figures of the receives of this report.
    #[serde(default)]
    pub records: Vec<RecvRecord>,
    /// Counters since the last report.
    #[serde(default)]
    pub stats: Stats,
}

impl WorkerReport {
    /// A report of nothing.
    pub fn new(rank: RankId) -> WorkerReport {
        WorkerReport {
            rank,
            granted: Vec::new(),
            finished_sending: Vec::new(),
            finished_recving: Vec::new(),
            failed_recving: Vec::new(),
            records: Vec::new(),
            stats: Stats::default(),
        }
    }
}
