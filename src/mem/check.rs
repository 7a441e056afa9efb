//! The checks that a registration starts with.

use super::{MemoryRange, cuda, host};
use crate::error::Result;
use crate::proto::wire::MemoryKind;

/// Checks that `range` is the kind of memory that it says. That is mapped host memory that no CUDA device owns, or an
/// allocation of the stated CUDA device that holds the whole range. Returns whether it is host memory whose missing
/// pages the kernel alone fills.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for memory of another kind or device,
/// [`ErrorKind::OutOfRange`](crate::ErrorKind::OutOfRange) for a range that is not mapped or leaves its allocation,
/// [`ErrorKind::Cuda`](crate::ErrorKind::Cuda) where the CUDA driver is absent or refuses,
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for managed memory.
pub fn check(range: &MemoryRange) -> Result<bool> {
    match range.kind() {
        MemoryKind::Host => {
            cuda::check_not_device(range)?;
            host::check_mapped(range)
        }
        MemoryKind::Cuda { device } => cuda::check_device(range, device).map(|()| false),
    }
}
