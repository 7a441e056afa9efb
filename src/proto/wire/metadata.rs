//! Who an agent and a rank are, and how their memory is reached.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::proto::geometry::Geometry;
use crate::proto::ids::{EngineId, Incarnation, RankId};

/// Where a region's bytes live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Ordinary process memory.
    Host,
    /// Memory of a CUDA device, by its ordinal in the owning process.
    Cuda {
        /// The device ordinal.
        device: u32,
    },
}

/// One registered region as a remote agent needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionMetadata {
    /// Virtual address of the first byte in the owning process.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
    /// The packed rkey in its checked envelope.
    #[serde(with = "serde_bytes")]
    pub rkey: Vec<u8>,
}

/// All that a remote agent needs to connect and to read or write registered regions. Its size grows with regions,
/// never with blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentMetadata {
    /// A name for logs, chosen by the owner.
    pub name: String,
    /// This life of the agent.
    pub incarnation: Incarnation,
    /// Version text of the UCX that the agent uses.
    pub ucx_version: String,
    /// UCX worker address in its checked envelope.
    #[serde(with = "serde_bytes")]
    pub address: Vec<u8>,
    /// Exported regions. Their order is the region index in [`Geometry`] and in transfers.
    pub regions: Vec<RegionMetadata>,
}

/// How an engine is split over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineShape {
    /// Tensor-parallel size, at least 1.
    pub tp: u32,
    /// Pipeline-parallel size, at least 1.
    pub pp: u32,
    /// Decode-context-parallel size, at least 1.
    pub dcp: u32,
}

impl EngineShape {
    /// Ranks in the engine. Saturates.
    pub fn ranks(&self) -> u32 {
        self.tp.saturating_mul(self.pp)
    }

    /// Whether `rank` is one of the engine's.
    pub fn contains(&self, rank: RankId) -> bool {
        rank.pp < self.pp && rank.tp < self.tp
    }
}

impl fmt::Display for EngineShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp {} x pp {} x dcp {}", self.tp, self.pp, self.dcp)
    }
}

/// One fact that must be the same on both engines (model, dtype, ...), compared by name so that an error can say
/// which field differs and what either side has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompatField {
    /// The field's name, such as `model`.
    pub name: String,
    /// Its value as text.
    pub value: String,
}

/// What one rank of an engine tells the ranks of another in the handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMetadata {
    /// The engine that the rank belongs to.
    pub engine: EngineId,
    /// The rank's place in it.
    pub rank: RankId,
    /// The engine's shape.
    pub shape: EngineShape,
    /// Facts that both engines must share.
    pub compat: Vec<CompatField>,
    /// Where the rank keeps which part of the cache.
    pub geometry: Geometry,
    /// How to reach its memory.
    pub agent: AgentMetadata,
}

/// An opaque encoded [`RankMetadata`].
pub(super) type Blob = ByteBuf;
