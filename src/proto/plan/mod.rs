//! From two geometries and a request's block lists to copy operations.

use std::sync::Arc;

use crate::proto::wire::Blocks;

/// A run of bytes that repeats at every block of one KV-cache group: block `i` of the lists copies `len` bytes between
/// `local_offset + local_ids[i] * local_stride` and `remote_offset + remote_ids[i] * remote_stride` (offsets and
/// strides in bytes, within the named regions).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Which pair of block lists applies (the KV-cache group).
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

/// A pair of block lists of equal length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockPair {
    /// Local block ids.
    pub local: Blocks,
    /// Remote block ids.
    pub remote: Blocks,
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
