//! What a request asks to load.

use std::ops::Range;

use crate::geometry::GroupKind;
use crate::wire::Blocks;

/// What one request loads.
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
    /// What is to be done where the other side has dropped tokens in front of a sliding window or chunk that share a
    /// local block with tokens in it: true leaves them as they are (nobody will read them), false is an error (a host that
    /// reuses whole blocks for other requests would read them).
    pub window_only: bool,
}

/// Which of what a request loads is planned: all of it at once, or, of a prefill under way, one portion after the other. Portions are
/// of the groups that keep all tokens; of the others, what is to be loaded is known when the prefill is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// In groups that keep all tokens: from the first up to, not including, the second. Either is where the request begins or
    /// ends, or a multiple of [`RankPlan::portion_tokens`](super::RankPlan::portion_tokens). Lists of other groups are not looked at.
    Portion(u64, u64),
    /// What portions up to this token leave.
    Rest(u64),
}

impl Part {
    /// The tokens of a group that are planned, of all that are to be loaded; `None` to leave the group alone.
    pub(super) fn of(self, kind: GroupKind, all: Range<u64>) -> Option<Range<u64>> {
        let keeps_all = kind.keeps_all();
        match self {
            Part::Portion(from, to) if keeps_all => Some(from.max(all.start)..to.min(all.end)),
            Part::Portion(..) => None,
            Part::Rest(from) if keeps_all => Some(from.clamp(all.start, all.end)..all.end),
            Part::Whole | Part::Rest(_) => Some(all),
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
