//! The blocks and tokens that a request loads.

use std::ops::Range;

use crate::geometry::GroupKind;
use crate::wire::Blocks;

/// The blocks and tokens that one request loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// Per local KV-cache group, the blocks to be filled in token order. The last one holds the token before
    /// `tokens.1`; in a group without a window or chunks the first one holds the token `tokens.0`.
    pub local: &'a [Blocks],
    /// Per remote KV-cache group, the blocks that the other side holds in token order. The last one holds the token
    /// before `remote_tokens`.
    pub remote: &'a [Blocks],
    /// The tokens to load: from the first up to, not including, the second. What follows the second in its block is
    /// copied along, because neither side has anything there yet.
    pub tokens: (u64, u64),
    /// The tokens that the other side holds.
    pub remote_tokens: u64,
    /// The block id that stands for "no block here" on either side.
    pub null_block: Option<u32>,
    /// How to treat a block of which the other side has dropped tokens. These are tokens in front of a sliding window
    /// or chunk that share a local block with loaded ones. True leaves those tokens as they are (nobody will read
    /// them); false is an error (a host that reuses whole blocks for other requests would read them).
    pub window_only: bool,
}

/// The part of a load to plan: all of it, or one chunk after the other of a prefill under way. Chunks are of the
/// groups that keep all tokens; of the others, what is to be loaded is known when the prefill is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadPart {
    /// All of it.
    Whole,
    /// In groups that keep all tokens: from the first up to, not including, the second. Either is where the request begins or
    /// ends, or a multiple of [`RankPlan::chunk_multiple`](super::RankPlan::chunk_multiple). Lists of other groups are ignored.
    Chunk(u64, u64),
    /// The rest after the chunks up to this token.
    Rest(u64),
}

impl LoadPart {
    /// The tokens of a group that are planned, of all that are to be loaded; `None` to leave the group alone.
    pub(super) fn of(self, kind: GroupKind, all: Range<u64>) -> Option<Range<u64>> {
        let keeps_all = kind.keeps_all();
        match self {
            LoadPart::Chunk(from, to) if keeps_all => Some(from.max(all.start)..to.min(all.end)),
            LoadPart::Chunk(..) => None,
            LoadPart::Rest(from) if keeps_all => Some(from.clamp(all.start, all.end)..all.end),
            LoadPart::Whole | LoadPart::Rest(_) => Some(all),
        }
    }
}

impl Wanted<'_> {
    pub(super) fn is_null(&self, id: u32) -> bool {
        self.null_block == Some(id)
    }

    pub(super) fn tokens(&self) -> Range<u64> {
        self.tokens.0..self.tokens.1
    }
}
