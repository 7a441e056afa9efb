//! Messages between the workers of two engines, carried as agent messages.

use serde::{Deserialize, Serialize};

use crate::ids::{EngineId, Incarnation, RankId, RequestId};

/// The consumer rank that reads (or declines to read) a request's blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Reader {
    /// The consumer's engine.
    pub engine: EngineId,
    /// The life of the consumer rank's agent.
    pub incarnation: Incarnation,
    /// The consumer's rank.
    pub rank: RankId,
}

/// The producer's answer to a reader that says it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The lease held until now: what was read is right.
    Valid,
    /// The lease had run out: what was read may be wrong.
    Expired,
    /// The producer does not know the request: it never granted it, or it ended long ago; or another engine is the
    /// lease's consumer. What was read may be wrong.
    Unknown,
}

/// One message between a consumer's worker and a producer's worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerMessage {
    /// Consumer to producer: these requests still need their leases, renew them.
    Heartbeat {
        /// Request ids as the producer named them.
        requests: Vec<RequestId>,
        /// The lease of each request, in their order; 0, or missing at the end, where it is not known.
        #[serde(default)]
        leases: Vec<u64>,
        /// The rank that needs them. `None` from a consumer that does not say it.
        #[serde(default)]
        reader: Option<Reader>,
    },
    /// Consumer to producer: the reads of this rank have completed. The producer answers with [`PeerMessage::Verdict`].
    Done {
        /// The request as the producer named it.
        request: RequestId,
        /// The lease under which it was read; 0 when that is not known.
        #[serde(default)]
        lease_id: u64,
        /// The rank that read.
        reader: Reader,
        /// How many readers this producer rank will hear from in all (from the plan).
        readers: u32,
        /// The reader's number of the request that has read, echoed in the verdict. A `Done` with a number that the
        /// producer has judged before gets the same answer; another number is another read, judged anew.
        serial: u64,
        /// True if this reader still needs the lease, for another request: then it says `Done` or `Release` again.
        #[serde(default)]
        more: bool,
    },
    /// Consumer to producer: this reader will not read (any more). Nothing is answered.
    Release {
        /// The request as the producer named it.
        request: RequestId,
        /// The lease that is released; 0 when that is not known.
        #[serde(default)]
        lease_id: u64,
        /// The rank that declines.
        reader: Reader,
        /// How many readers this producer rank will hear from in all.
        readers: u32,
    },
    /// Producer to consumer: whether the lease held.
    Verdict {
        /// The request as the producer named it.
        request: RequestId,
        /// The answer.
        verdict: Verdict,
        /// The number in the `Done` that it answers.
        serial: u64,
    },
}
