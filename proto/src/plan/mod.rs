//! Turns the geometries of two engines and a request's block lists into copy operations.
//!
//! [`assign`] says what each consumer rank reads from which producer rank. [`RankPlan`] is computed once
//! per such pair of ranks: the intersection of their address maps, cut into [`Segment`]s that repeat at every block.
//! [`RankPlan::request`] adds a request's block lists, which gives a [`CopyPlan`]. [`Expander`] turns that into
//! operations while they are posted, merging neighbours.

mod block_grid;
mod expand;
mod holding;
mod ids;
mod rank;
mod request;
mod template;
mod wanted;

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::wire::Blocks;

pub use expand::{Expander, Operation, SegmentBlocks};
pub use holding::{Cell, HeldPart, Holding, Share, assign};
pub use rank::{LocalRank, RankIndex, RankPlan, check_ranks};
pub use wanted::{LoadPart, Wanted};

/// The bytes per run, on average, below which a transfer between host memories is gathered into messages instead of
/// moving run by run. Measured with `scripts/bench transfer --with gather_below=0` between two processes of a 2-core virtual
/// machine, `process_vm_readv` against messages over TCP loopback: gathering moves 1.5 times as much in runs of 512
/// bytes, as much in runs of 1 and 2 KiB (docs/benchmarks.md).
pub const GATHER_BELOW: u64 = 1536;

/// How many pairs of a list are put in order at once. Other transfers of the agent wait for that: sorting this many takes
/// some 40 us with empty caches. Fewer would leave more neighbours apart.
pub const ORDERED_PAIRS: usize = 4096;

/// A run of bytes that repeats at every entry of a pair of block lists. Entry `i` of the lists copies `len` bytes
/// between `local_offset + local_ids[i] * local_stride` and `remote_offset + remote_ids[i] * remote_stride` (offsets
/// and strides in bytes, within the named regions).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Which pair of block lists applies.
    pub list: u32,
    /// Local region index, in export order.
    pub local_region: u32,
    /// Remote region index, in export order.
    pub remote_region: u32,
    /// Bytes from the local region's base.
    pub local_offset: u64,
    /// Bytes from the remote region's base.
    pub remote_offset: u64,
    /// Bytes from a local block to the next.
    pub local_stride: u64,
    /// Bytes from a remote block to the next.
    pub remote_stride: u64,
    /// Bytes per block.
    pub len: u64,
}

impl Segment {
    /// True if consecutive blocks are contiguous on both sides, so that operations merge across blocks.
    pub fn is_dense(&self) -> bool {
        self.len == self.local_stride && self.len == self.remote_stride
    }
}

/// A pair of block lists of equal length. Ids count whatever the segments' strides step over: blocks, or parts of
/// blocks where the two sides' block sizes differ.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockPair {
    /// Local block ids.
    pub local: Blocks,
    /// Remote block ids.
    pub remote: Blocks,
}

impl BlockPair {
    /// Sorts the pairs from `from` on by their remote ids, [`ORDERED_PAIRS`] of them. Returns where the next ones begin.
    fn order(&mut self, from: usize) -> usize {
        let end = self.local.len().min(self.remote.len()).min(from.saturating_add(ORDERED_PAIRS));
        if self.remote.ids().get(from..end).is_none_or(<[u32]>::is_sorted) {
            return end;
        }
        if let (Some(local), Some(remote)) =
            (self.local.make_mut().get_mut(from..end), self.remote.make_mut().get_mut(from..end))
        {
            // Sorting pairs as words is faster than by a key.
            let both = remote.iter().zip(local.iter());
            let mut words: Vec<u64> = both.map(|(&r, &l)| u64::from(r) << 32 | u64::from(l)).collect();
            words.sort_unstable();
            for ((r, l), word) in remote.iter_mut().zip(local).zip(words) {
                (*r, *l) = ((word >> 32) as u32, word as u32);
            }
        }
        end
    }

    /// Runs of pairs in which both sides' ids go up by one.
    fn breaks(&self) -> u64 {
        let pairs = || self.local.ids().iter().zip(self.remote.ids());
        let follows =
            |(a, b): ((&u32, &u32), (&u32, &u32))| a.0.checked_add(1) == Some(*b.0) && a.1.checked_add(1) == Some(*b.1);
        let merged = pairs().zip(pairs().skip(1)).filter(|pair| follows(*pair)).count();
        pairs().count().saturating_sub(merged) as u64
    }
}

/// One request's copies between this rank and one remote rank. Its size grows with segments and block ids, never with
/// their product: the operations are expanded and merged while they are posted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CopyPlan {
    /// The runs, shared by all requests between the same two ranks.
    pub segments: Arc<[Segment]>,
    /// The block lists, indexed by [`Segment::list`].
    pub lists: Vec<BlockPair>,
}

impl CopyPlan {
    /// Bytes that the plan moves. Saturates, so that a plan that [`CopyPlan::check`] refuses has a figure too.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().fold(0u64, |sum, s| sum.saturating_add(s.len.saturating_mul(self.pairs(s.list))))
    }

    /// Pairs of blocks in all lists, whether any segment uses them or not.
    pub fn blocks(&self) -> u64 {
        (0..self.lists.len()).fold(0u64, |sum, list| sum.saturating_add(self.pairs(list as u32)))
    }

    /// The number of runs: the operations of an expansion without a bound on their length. Takes time for each pair
    /// of blocks in a list, not for each operation.
    pub fn runs(&self) -> u64 {
        let breaks: Vec<u64> = self.lists.iter().map(BlockPair::breaks).collect();
        self.segments.iter().filter(|s| s.len > 0).fold(0u64, |sum, s| {
            let breaks = if s.is_dense() { breaks.get(s.list as usize).copied() } else { None };
            sum.saturating_add(breaks.unwrap_or_else(|| self.pairs(s.list)))
        })
    }

    /// Bytes per run; none for a plan that moves nothing.
    pub fn mean_run(&self) -> Option<u64> {
        self.bytes().checked_div(self.runs())
    }

    /// True if the plan moves nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes() == 0
    }

    /// The plan's operations, in an order of its choosing. None is longer than `max_op_bytes` (0 counts as 1).
    pub fn expand(self, max_op_bytes: u64) -> Expander {
        Expander::new(self, max_op_bytes)
    }

    /// Checks a plan from outside against the lengths in bytes of both sides' regions. Every segment names existing
    /// regions and lists, lists have equal lengths, and every byte of every block lies inside its region. A plan of
    /// [`RankPlan::request`] has been checked already.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] for unequal lists and unknown indices, [`ErrorKind::OutOfRange`] for a
    /// block outside its region.
    pub fn check(&self, local_len: impl Fn(u32) -> Option<u64>, remote_len: impl Fn(u32) -> Option<u64>) -> Result<()> {
        for (index, pair) in self.lists.iter().enumerate() {
            if pair.local.len() != pair.remote.len() {
                return Err(Error::invalid(format!(
                    "block list {index} has {} local and {} remote ids; the two must pair up",
                    pair.local.len(),
                    pair.remote.len()
                )));
            }
        }
        let highest: Vec<Option<(u32, u32)>> = self
            .lists
            .iter()
            .map(|pair| Some((*pair.local.ids().iter().max()?, *pair.remote.ids().iter().max()?)))
            .collect();
        for (index, s) in self.segments.iter().enumerate() {
            let Some(highest) = highest.get(s.list as usize) else {
                return Err(Error::invalid(format!(
                    "segment {index} names block list {}, the plan has {}",
                    s.list,
                    self.lists.len()
                )));
            };
            let sides = [
                (
                    "local",
                    s.local_region,
                    local_len(s.local_region),
                    s.local_offset,
                    s.local_stride,
                    highest.map(|h| h.0),
                ),
                (
                    "remote",
                    s.remote_region,
                    remote_len(s.remote_region),
                    s.remote_offset,
                    s.remote_stride,
                    highest.map(|h| h.1),
                ),
            ];
            for (side, region, region_len, offset, stride, highest) in sides {
                let Some(region_len) = region_len else {
                    return Err(Error::invalid(format!("segment {index} names {side} region {region}, which is none")));
                };
                let Some(id) = highest else { continue };
                let end = stride.checked_mul(id.into()).and_then(|x| x.checked_add(offset)?.checked_add(s.len));
                if end.is_none_or(|end| end > region_len) {
                    return Err(Error::new(
                        ErrorKind::OutOfRange,
                        format!(
                            "segment {index}: {side} block {id} ({} bytes at {offset} + {id} * {stride}) ends outside \
                             region {region} of {region_len} bytes",
                            s.len
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    fn pairs(&self, list: u32) -> u64 {
        self.lists.get(list as usize).map_or(0, |pair| pair.local.len().min(pair.remote.len()) as u64)
    }
}
