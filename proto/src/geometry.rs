//! Where a rank keeps which part of the KV cache: a strided address map.

mod bounds;
mod overlap;
mod table;

use std::fmt;

use serde::{Deserialize, Serialize};

use super::wire::RegionMetadata;
use crate::error::Result;

pub(crate) use bounds::{Axes, Piece, fold, runs};

/// Most KV-cache groups of a rank. vLLM's hybrid models have fewer than ten.
pub const MAX_GROUPS: usize = 256;
/// Most areas of a rank. About as many fit into a rank metadata message of 4 MiB.
pub const MAX_AREAS: usize = 16_384;
/// Longest layer name in bytes.
pub const MAX_LAYER_BYTES: usize = 256;
/// Longest part name and longest format in bytes.
pub const MAX_PART_BYTES: usize = 64;
/// Most tokens per block, and most heads of a model.
pub const MAX_AXIS: u32 = 1 << 20;
/// Most contiguous runs per block of all of a rank's areas together. 160 layers of 16 heads by 64 tokens with nothing
/// contiguous make 160 Ki.
pub const MAX_RUNS: u64 = 1 << 20;

/// The kind of cache that a KV-cache group holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// Every token of the sequence.
    Full,
    /// The last `window` tokens.
    SlidingWindow {
        /// Tokens in the window.
        window: u32,
    },
    /// The tokens of the last chunk that is begun (chunked local attention): those from the largest multiple of `chunk`.
    Chunked {
        /// Tokens in a chunk.
        chunk: u32,
    },
    /// Compressed latents, the same on every tensor-parallel rank (MLA).
    Latent,
    /// A state without token positions (Mamba, SSM): one block per sequence.
    State,
}

impl GroupKind {
    /// True if every token's cache is kept. The first tokens can then be read before the end is known.
    pub fn keeps_all(self) -> bool {
        matches!(self, GroupKind::Full | GroupKind::Latent)
    }

    /// The first token that attention still reads for the last of `tokens` tokens. None where every token is.
    pub fn front(self, tokens: u64) -> Option<u64> {
        match self {
            GroupKind::SlidingWindow { window } => Some(tokens.saturating_sub(window.into())),
            GroupKind::Chunked { chunk } => {
                let chunk = u64::from(chunk.max(1));
                Some(tokens.saturating_sub(1) / chunk * chunk)
            }
            GroupKind::Full | GroupKind::Latent | GroupKind::State => None,
        }
    }
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupKind::Full => f.write_str("full"),
            GroupKind::SlidingWindow { window } => write!(f, "sliding window of {window} tokens"),
            GroupKind::Chunked { chunk } => write!(f, "chunks of {chunk} tokens"),
            GroupKind::Latent => f.write_str("latent"),
            GroupKind::State => f.write_str("state"),
        }
    }
}

/// One KV-cache group: layers that share one block table.
///
/// With decode context parallelism the tokens are dealt out: of every `token_interleave * token_ranks` tokens this rank
/// holds the `token_rank`-th `token_interleave`. One entry of a block list then stands for [`Group::span`] tokens, of
/// which the rank's block holds `block_size`, in their order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Group {
    /// Kind of cache.
    pub kind: GroupKind,
    /// Tokens per block on this rank; 1 for [`GroupKind::State`].
    pub block_size: u32,
    /// Over how many ranks the tokens are dealt; 1 without decode context parallelism.
    #[serde(default = "one")]
    pub token_ranks: u32,
    /// This rank's place among them.
    #[serde(default)]
    pub token_rank: u32,
    /// Consecutive tokens that go to the same rank; divides `block_size`.
    #[serde(default = "one")]
    pub token_interleave: u32,
}

fn one() -> u32 {
    1
}

impl Group {
    /// A group whose tokens are all on this rank.
    pub fn new(kind: GroupKind, block_size: u32) -> Group {
        Group { kind, block_size, token_ranks: 1, token_rank: 0, token_interleave: 1 }
    }

    /// Tokens per entry of a block list, over all ranks that share them; at least 1.
    pub fn span(&self) -> u64 {
        u64::from(self.block_size).saturating_mul(self.token_ranks.into()).max(1)
    }

    /// The place in its block of the `token`-th token of a span. None if another rank holds it.
    pub fn position(&self, token: u64) -> Option<u64> {
        let interleave = u64::from(self.token_interleave.max(1));
        let (turn, within) = (token / interleave, token % interleave);
        let ranks = u64::from(self.token_ranks.max(1));
        (turn % ranks == u64::from(self.token_rank))
            .then(|| (turn / ranks).saturating_mul(interleave).saturating_add(within))
    }
}

/// One part of one layer on one rank, such as K, or V, or both packed. A map of bytes over (block, head, token,
/// content).
///
/// Byte `c` of unit `u` of head `h` and token position `t` of block `b` lies in the region at
/// `offset + b*block_stride + (h - first_head)*head_stride + (t / tokens)*page_stride + (t % tokens)*token_stride
/// + u*unit_stride + c`, for `b < num_blocks`, `first_head <= h < first_head + heads`, `t < pages*tokens`, `u < units`,
/// `c < content`.
///
/// Without heads or tokens the axes serve for whatever a state is cut by: a Mamba state sharded by channels has its
/// channels as heads.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Area {
    /// The layer's global name, the same on both engines (vLLM: the attention layer's name).
    pub layer: String,
    /// The part of the layer: `k`, `v`, `kv` (K, then V), `latent`, `conv`, `ssm`.
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
    /// The first of them, counted over all KV heads of this layer.
    pub first_head: u32,
    /// KV heads of this layer over all ranks, copies counted once. Layers may have different numbers of them.
    pub total_heads: u32,
    /// True if `first_head` and `total_heads` count the same head on two ranks twice. The engine then does not know
    /// which ranks hold copies. Such a layer is copied between equal tensor-parallel sizes only.
    #[serde(default)]
    pub heads_by_rank: bool,
    /// Bytes from a head to the next.
    pub head_stride: u64,
    /// Physical blocks ("kernel blocks") per block of the block table, in token order.
    #[serde(default = "one")]
    pub pages: u32,
    /// Bytes from one of them to the next.
    #[serde(default)]
    pub page_stride: u64,
    /// Token positions per physical block. `pages * tokens` is the group's block size. With a single page and 1 here
    /// where the group's block size is larger, `content` holds a block's tokens in an order of the engine's own: such a
    /// block moves whole, between equal block sizes only.
    pub tokens: u32,
    /// Bytes from a token to the next.
    pub token_stride: u64,
    /// Runs per (block, head, token). More than 1 where a token's bytes are spread, as in a K that is kept with its
    /// tokens next to each other.
    #[serde(default = "one")]
    pub units: u32,
    /// Bytes from one of these runs to the next.
    #[serde(default)]
    pub unit_stride: u64,
    /// Contiguous bytes per (block, head, token, unit).
    pub content: u64,
    /// The format of the bytes beyond this map. It names the type of an element, and the writer where a block's
    /// tokens or heads can't be told apart. The same on both engines; empty where it is not stated, which is then not
    /// compared.
    #[serde(default)]
    pub format: String,
}

impl Default for Area {
    /// One block of one byte, without names: to be filled in.
    fn default() -> Area {
        Area {
            layer: String::new(),
            part: String::new(),
            group: 0,
            region: 0,
            offset: 0,
            num_blocks: 1,
            block_stride: 1,
            heads: 1,
            first_head: 0,
            total_heads: 1,
            heads_by_rank: false,
            head_stride: 1,
            pages: 1,
            page_stride: 0,
            tokens: 1,
            token_stride: 1,
            units: 1,
            unit_stride: 0,
            content: 1,
            format: String::new(),
        }
    }
}

/// All of a rank's cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
pub struct Geometry {
    /// The KV-cache groups, in the engine's order.
    pub groups: Vec<Group>,
    /// The areas, in any order.
    #[serde(with = "table")]
    pub areas: Vec<Area>,
}

impl Area {
    /// The same place without the names of layer, part and format.
    pub(crate) fn nameless(&self) -> Area {
        Area { layer: String::new(), part: String::new(), format: String::new(), ..*self }
    }

    /// Bytes from the region's base to the end of the last block. None when that does not fit 64 bits.
    pub fn end(&self) -> Option<u64> {
        let blocks = self.block_stride.checked_mul(u64::from(self.num_blocks).checked_sub(1)?)?;
        self.offset.checked_add(blocks)?.checked_add(self.extent()?)
    }

    /// Bytes from a block's first byte to after its last, gaps included. None when that does not fit 64 bits.
    pub fn extent(&self) -> Option<u64> {
        self.axes().into_iter().try_fold(self.content, |sum, (count, [stride])| {
            sum.checked_add(stride.checked_mul(u64::from(count).checked_sub(1)?)?)
        })
    }

    /// Bytes of cache per (block, head, token). Saturates.
    pub fn token_bytes(&self) -> u64 {
        u64::from(self.units).saturating_mul(self.content)
    }

    /// Token positions per block. Saturates.
    pub fn positions(&self) -> u32 {
        self.pages.saturating_mul(self.tokens)
    }
}

impl fmt::Display for Area {
    /// The layer and part, for messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {:?} part {:?}", self.layer, self.part)
    }
}

impl Geometry {
    /// Checks that the map fits `regions`. Counts are within this module's limits, no axis is empty, every layer and
    /// part comes once, all indices are in range, every byte of every block is inside its region, and no two places
    /// of one group's cache are on the same byte.
    ///
    /// Two groups may share memory, as vLLM's hybrid cache does with one tensor for layers of several groups, provided
    /// that they share it block by block: block `b` of the one touches bytes of block `b` of the other only.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument),
    /// [`ErrorKind::OutOfRange`](crate::ErrorKind::OutOfRange) for bytes outside a region,
    /// [`ErrorKind::AlreadyExists`](crate::ErrorKind::AlreadyExists) for places on the same byte,
    /// [`ErrorKind::Exhausted`](crate::ErrorKind::Exhausted) for one over a limit.
    pub fn validate(&self, regions: &[RegionMetadata]) -> Result<()> {
        self.shared_groups(regions).map(|_| ())
    }

    /// As [`Geometry::validate`]; gives the pairs of groups (lower first, sorted) that share memory block by block.
    pub(crate) fn shared_groups(&self, regions: &[RegionMetadata]) -> Result<Vec<(u32, u32)>> {
        bounds::check(self, regions)?;
        overlap::check(self)
    }

    /// Blocks that every area of `group` has: ids below this exist. None for a group without areas.
    pub fn num_blocks(&self, group: u32) -> Option<u32> {
        self.areas.iter().filter(|area| area.group == group).map(|area| area.num_blocks).min()
    }
}

#[cfg(test)]
mod tests;
