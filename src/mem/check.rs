//! The checks that a registration starts with.

use super::{MemoryRange, cuda, host};
use crate::error::Result;
use crate::proto::wire::MemoryKind;

/// Checks that `range` is what it says it is: mapped host memory that no CUDA device owns, or an allocation of the
/// stated CUDA device that holds the whole range.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for memory of another kind or device,
/// [`ErrorKind::OutOfRange`](crate::ErrorKind::OutOfRange) for a range that is not mapped or leaves its allocation,
/// [`ErrorKind::Cuda`](crate::ErrorKind::Cuda) where the CUDA driver is absent or refuses,
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for managed memory.
pub fn check(range: &MemoryRange) -> Result<()> {
    match range.kind() {
        MemoryKind::Host => {
            cuda::check_not_device(range)?;
            host::check_mapped(range)
        }
        MemoryKind::Cuda { device } => cuda::check_device(range, device),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn range(addr: u64, len: u64) -> MemoryRange {
        // SAFETY: nothing is registered, so nothing is accessed.
        unsafe { MemoryRange::new(addr, len, MemoryKind::Host) }.unwrap()
    }

    #[test]
    fn owned_memory_passes_and_unmapped_memory_does_not() {
        let bytes = vec![7u8; 100_000];
        let good = range(bytes.as_ptr() as u64, bytes.len() as u64);
        check(&good).unwrap();
        // The first page of the address space is never mapped for ordinary processes (vm.mmap_min_addr).
        let error = check(&range(16, 64)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfRange);
        assert!(error.message().contains("not mapped"), "{error}");
    }
}
