//! The work of an engine step, from the scheduler side to the workers.

use serde::{Deserialize, Serialize};

use super::Blocks;
use crate::ids::{EngineId, Incarnation, RequestId};
use crate::plan::{Holding, Wanted};

/// Where a remotely prefilled request's blocks are, from `kv_transfer_params`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    /// The producer engine.
    pub engine: EngineId,
    /// The life of the producer engine that granted the lease, when the params say it.
    pub incarnation: Option<Incarnation>,
    /// The request as the producer names it.
    pub request: RequestId,
    /// Host of the producer's handshake listener.
    pub host: String,
    /// Port of the producer's handshake listener.
    pub port: u16,
    /// The lease that the producer granted, in milliseconds, counted from when its params were made.
    pub lease_ms: u64,
    /// The producer's grant that is meant, so that a request id used again is not taken for its predecessor. 0 when
    /// the params do not say it.
    #[serde(default)]
    pub lease_id: u64,
    /// True if other requests of this engine may share the lease. It is then kept for a moment after this one.
    #[serde(default)]
    pub shared: bool,
}

/// Producer: the blocks of a finished prefill are kept until read, released or expired. Everything that they are to hold is
/// written when a worker is given this.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The request.
    pub request: RequestId,
    /// How long without a heartbeat, in milliseconds from the arrival of this step.
    pub lease_ms: u64,
    /// Which grant of this engine it is, from 1.
    #[serde(default)]
    pub lease_id: u64,
    /// The name by which consumers know it, if not the request's id.
    #[serde(default)]
    pub name: Option<RequestId>,
    /// True for a conversation that is kept for its next turn. Nobody has to come for it, so it is not counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub history: bool,
}

/// Consumer: a request with a remote prefill has arrived. Connect early and keep its lease alive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The request as this engine names it.
    pub request: RequestId,
    /// Where it was prefilled.
    pub remote: Remote,
}

/// Consumer: blocks are allocated, read them now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The request as this engine names it.
    pub request: RequestId,
    /// Where it was prefilled.
    pub remote: Remote,
    /// Per KV-cache group of this engine, the ids of the blocks to fill, see [`Wanted::local`].
    pub local_blocks: Vec<Blocks>,
    /// Per KV-cache group of the producer, its block ids, see [`Wanted::remote`]. Empty if they are to be awaited.
    pub remote_blocks: Vec<Blocks>,
    /// The tokens to load: from the first up to, not including, the second.
    pub tokens: (u64, u64),
    /// Tokens that the producer's blocks hold.
    pub remote_tokens: u64,
    /// True if the prefill may still be under way. The producer's listener gives its blocks, tokens and lease, and
    /// tells when it is over.
    #[serde(default)]
    pub awaits: bool,
    /// The id that stands for no block.
    pub null_block: Option<u32>,
    /// See [`Wanted::window_only`].
    pub window_only: bool,
    /// Why the load is impossible, if the scheduler side found that. Nothing is read, the leases are released, and the
    /// load fails as an invalid request with this explanation.
    #[serde(default)]
    pub refused: Option<String>,
}

impl Load {
    /// The load as the planner takes it.
    pub fn wanted(&self) -> Wanted<'_> {
        Wanted {
            local: &self.local_blocks,
            remote: &self.remote_blocks,
            tokens: self.tokens,
            remote_tokens: self.remote_tokens,
            null_block: self.null_block,
            window_only: self.window_only,
        }
    }
}

/// Consumer: the request needs nothing (more) from the producer; let it free the blocks. No report follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// The request as this engine names it.
    pub request: RequestId,
    /// Where it was prefilled.
    pub remote: Remote,
}

/// One step's work for every worker of an engine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StepMetadata {
    /// Producer: leases granted.
    #[serde(default)]
    pub grants: Vec<Grant>,
    /// Producer: requests that ended without a hand-over, as consumers call them. Early messages about them are
    /// answered `Unknown`.
    #[serde(default)]
    pub dropped: Vec<RequestId>,
    /// Consumer: leases to keep alive from now on.
    #[serde(default)]
    pub holds: Vec<Hold>,
    /// Consumer: reads to start. Each gets exactly one terminal report from each rank.
    #[serde(default)]
    pub loads: Vec<Load>,
    /// Consumer: leases to release.
    #[serde(default)]
    pub releases: Vec<Release>,
    /// Consumer: loads to abort. Each still gets its one terminal report.
    #[serde(default)]
    pub aborts: Vec<RequestId>,
    /// The holdings of every rank of this engine; once, before the first load. So a worker knows which ranks read from a
    /// producer's rank.
    #[serde(default)]
    pub engine: Vec<Holding>,
}

impl StepMetadata {
    /// True if the step carries no work.
    pub fn is_empty(&self) -> bool {
        self.grants.is_empty()
            && self.dropped.is_empty()
            && self.holds.is_empty()
            && self.loads.is_empty()
            && self.releases.is_empty()
            && self.aborts.is_empty()
            && self.engine.is_empty()
    }
}
