//! Parts of registered memory.

use super::MemoryRange;

/// Part of a registered range: offset and length in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Iov {
    /// The range.
    pub range: MemoryRange,
    /// Offset of the part, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u32,
}

/// Bytes in all of them.
pub fn total(iovs: &[Iov]) -> u64 {
    iovs.iter().map(|iov| u64::from(iov.len)).sum()
}
