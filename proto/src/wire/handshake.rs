//! The handshake: a client asks an engine's listener for the metadata of the ranks that it needs, in one round trip.

use serde::{Deserialize, Serialize};

use super::metadata::Blob;
use crate::ids::{EngineId, Incarnation, RankId, RequestId};
use crate::wire::{Blocks, EngineShape};

/// A request of a client to the listener.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HandshakeRequest {
    /// Asks for ranks' metadata.
    Query {
        /// Echoed in the reply, to match it to its query.
        id: u64,
        /// The engine that the client expects here; another engine is a refusal that names both.
        engine: Option<EngineId>,
        /// The ranks wanted; empty means all.
        ranks: Vec<RankId>,
    },
    /// A host without its own RPC pushes one rank's metadata. Accepted when the listener was started for pushes.
    Push {
        /// Echoed in the reply.
        id: u64,
        /// The engine's ranks are complete when this many have pushed.
        expected: u32,
        /// The encoded `RankMetadata`.
        metadata: Blob,
    },
    /// Asks to be told when prefills are over, or have come far enough. Answered when one of them is, or when the same client
    /// asks again.
    Await {
        /// Echoed in the reply.
        id: u64,
        /// The engine that the client expects here.
        engine: EngineId,
        /// The prefills, by their `transfer_id`.
        requests: Vec<RequestId>,
        /// For each of them, from how many written tokens on it is far enough; 0, or no entry: only when it is over. A listener
        /// that does not know this tells of those that are over.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        from_tokens: Vec<u64>,
    },
}

impl HandshakeRequest {
    /// The request's id, which the reply echoes.
    pub fn id(&self) -> u64 {
        match self {
            Self::Query { id, .. } | Self::Push { id, .. } | Self::Await { id, .. } => *id,
        }
    }
}

/// A prefill that is over or far enough, for a consumer that awaited it. It has the rest of its `kv_transfer_params`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefill {
    /// Its `transfer_id`, by which the producer's ranks know it.
    pub request: RequestId,
    /// Per KV-cache group of the producer, its block ids. While the prefill is under way, none of groups with windows, chunks or
    /// states.
    pub blocks: Vec<Blocks>,
    /// Tokens whose cache the blocks hold.
    pub tokens: u64,
    /// The lease granted, or to be granted, in milliseconds.
    pub lease_ms: u64,
    /// Which of the producer's grants it is, from 1. Another one than was told before of a prefill under way: its blocks were
    /// given away meanwhile, and what was read of them is void.
    pub lease_id: u64,
}

/// One rank's encoded `RankMetadata`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankBlob {
    /// Which rank.
    pub rank: RankId,
    /// Its encoded metadata.
    pub metadata: Blob,
}

/// Why a listener refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalCode {
    /// Not all ranks have reported yet; try again.
    NotReady,
    /// Another engine listens here.
    WrongEngine,
    /// No such rank in this engine.
    UnknownRank,
    /// The message could not be understood.
    Malformed,
    /// The message's version is not spoken here.
    Version,
    /// Pushes are not accepted, or contradict an earlier push.
    Push,
    /// The answer would be over the limit; ask for fewer ranks at once.
    TooLarge,
    /// The request is in clear and the listener has a key, or the other way round; or its key is another one.
    Key,
    /// A reason that this build does not know yet; the message tells it.
    #[serde(other)]
    Other,
}

/// The listener's reply to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HandshakeReply {
    /// The ranks asked for.
    Ranks {
        /// The query's id.
        id: u64,
        /// The engine.
        engine: EngineId,
        /// This life of the engine.
        incarnation: Incarnation,
        /// Its shape.
        shape: EngineShape,
        /// One entry per rank asked for.
        ranks: Vec<RankBlob>,
    },
    /// A push was taken.
    Pushed {
        /// The push's id.
        id: u64,
        /// Ranks still missing.
        missing: u32,
    },
    /// Prefills that were awaited and are over or far enough; none if the client has asked again.
    Prefills {
        /// The id of the request that awaited them.
        id: u64,
        /// The engine.
        engine: EngineId,
        /// This life of the engine.
        incarnation: Incarnation,
        /// Those whose blocks are kept.
        ready: Vec<Prefill>,
        /// Those of which nothing is kept (any more).
        gone: Vec<RequestId>,
        /// Those that are under way, and have as many tokens written as was asked for.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        partial: Vec<Prefill>,
    },
    /// No.
    Refused {
        /// The request's id; 0 when it could not be read.
        id: u64,
        /// Why, for programs.
        code: RefusalCode,
        /// Why, for people: what was wrong, what was expected, what to do.
        message: String,
    },
}

impl HandshakeReply {
    /// The request's id; 0 in a refusal of one that could not be read.
    pub fn id(&self) -> u64 {
        match self {
            Self::Ranks { id, .. } | Self::Pushed { id, .. } | Self::Prefills { id, .. } | Self::Refused { id, .. } => {
                *id
            }
        }
    }
}
