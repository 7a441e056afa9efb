//! Copying out of and into registered memory by the processor, where no transport does it one-sided.

use cudarc::driver::sys;

use super::MemoryRange;
use super::cuda::ok;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::wire::MemoryKind;

/// The address of `len` bytes at `offset`, if they lie inside `range`.
fn slice(range: &MemoryRange, offset: u64, len: usize) -> Result<u64> {
    match offset.checked_add(len as u64) {
        Some(end) if end <= range.len() => Ok(range.addr() + offset),
        _ => Err(Error::new(ErrorKind::OutOfRange, format!("{len} bytes at offset {offset} leave {range}"))),
    }
}

/// Appends `len` bytes at `offset` of a registered range to `out`.
///
/// # Errors
/// [`ErrorKind::OutOfRange`] when they leave the range, [`ErrorKind::Cuda`] where the driver refuses.
pub fn read(range: &MemoryRange, offset: u64, len: usize, out: &mut Vec<u8>) -> Result<()> {
    let from = slice(range, offset, len)?;
    out.reserve(len);
    let to = out.spare_capacity_mut().as_mut_ptr().cast::<u8>();
    match range.kind() {
        MemoryKind::Host => {
            // SAFETY: whoever made the range promised that it is mapped while it is registered; `to` has room for
            // `len` bytes and is not part of it, because it is the vector's own.
            unsafe { std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance(from as usize), to, len) };
        }
        // SAFETY: as above, for device memory; the driver has copied when it returns.
        MemoryKind::Cuda { .. } => ok("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(to.cast(), from, len) })?,
    }
    // SAFETY: these bytes were reserved and have just been written.
    unsafe { out.set_len(out.len() + len) };
    Ok(())
}

/// Writes `data` at `offset` of a registered range.
///
/// # Errors
/// As [`read`].
pub fn write(range: &MemoryRange, offset: u64, data: &[u8]) -> Result<()> {
    let to = slice(range, offset, data.len())?;
    match range.kind() {
        MemoryKind::Host => {
            let to = std::ptr::with_exposed_provenance_mut(to as usize);
            // SAFETY: whoever made the range promised that it may be written while it is registered, and that no
            // reference to it is in use meanwhile; `data`, a live reference, is thus no part of it.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
            Ok(())
        }
        MemoryKind::Cuda { .. } => {
            // SAFETY: as above, for device memory; the driver has taken the bytes when it returns.
            ok("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(to, data.as_ptr().cast(), data.len()) })
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_copied_within_the_range_only() {
        let mut memory: Vec<u8> = (0..100).collect();
        // SAFETY: `memory` outlives the range and is not used while it is copied.
        let range = unsafe { MemoryRange::new(memory.as_mut_ptr().expose_provenance() as u64, 100, MemoryKind::Host) };
        let range = range.unwrap();
        let mut out = vec![255];
        read(&range, 10, 3, &mut out).unwrap();
        read(&range, 99, 1, &mut out).unwrap();
        assert_eq!(out, [255, 10, 11, 12, 99]);
        write(&range, 97, &[1, 2, 3]).unwrap();
        for (offset, len) in [(98, 3), (100, 1), (u64::MAX, 2), (0, 101)] {
            assert_eq!(read(&range, offset, len, &mut out).unwrap_err().kind(), ErrorKind::OutOfRange);
            assert_eq!(write(&range, offset, &vec![0; len]).unwrap_err().kind(), ErrorKind::OutOfRange);
        }
        assert_eq!(out.len(), 5);
        assert_eq!(memory.get(95..), Some(&[95, 96, 1, 2, 3][..]));
    }
}
