//! Where a rank keeps which part of the KV cache: a strided address map.

use serde::{Deserialize, Serialize};

/// What kind of cache a KV-cache group holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// Every token of the sequence.
    Full,
    /// The last `window` tokens.
    SlidingWindow {
        /// Tokens in the window.
        window: u32,
    },
    /// Compressed latents, the same on every tensor-parallel rank (MLA).
    Latent,
    /// A state without token positions (Mamba, SSM): one block per sequence.
    State,
}

/// One KV-cache group: layers that share one block table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Kind of cache.
    pub kind: GroupKind,
    /// Tokens per block; 1 for [`GroupKind::State`].
    pub block_size: u32,
}

/// One part (such as K, or V, or both packed) of one layer on one rank: bytes over (block, head, token, content).
///
/// The byte at (b, h, t, c) lies at `offset + b*block_stride + (h - first_head)*head_stride + t*token_stride + c` in
/// the region, for `b < num_blocks`, `first_head <= h < first_head + heads`, `t < tokens`, `c < content`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    /// The layer's global name, the same on both engines (vLLM: the attention layer's name).
    pub layer: String,
    /// Which part of the layer: `k`, `v`, `kv` (packed in the content), `latent`, `conv`, `ssm`.
    pub part: String,
    /// Index into [`Geometry::groups`].
    pub group: u32,
    /// Index into the agent's exported regions.
    pub region: u32,
    /// Bytes from the region's base to (0, first_head, 0, 0).
    pub offset: u64,
    /// Blocks in the region.
    pub num_blocks: u32,
    /// Bytes from a block to the next.
    pub block_stride: u64,
    /// KV heads that this rank holds.
    pub heads: u32,
    /// The first of them, counted over the whole model.
    pub first_head: u32,
    /// KV heads of the whole model.
    pub total_heads: u32,
    /// Bytes from a head to the next.
    pub head_stride: u64,
    /// Token positions per block in this area.
    pub tokens: u32,
    /// Bytes from a token to the next.
    pub token_stride: u64,
    /// Contiguous bytes per (block, head, token).
    pub content: u64,
}

/// All of a rank's cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Geometry {
    /// The KV-cache groups, in the engine's order.
    pub groups: Vec<Group>,
    /// The areas, in any order.
    pub areas: Vec<Area>,
}
