//! What a request asks to load.

use std::ops::Range;

use crate::proto::wire::Blocks;

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

impl Wanted<'_> {
    pub(super) fn is_null(&self, id: u32) -> bool {
        self.null_block == Some(id)
    }

    pub(super) fn tokens(&self) -> Range<u64> {
        self.tokens.0..self.tokens.1
    }
}
