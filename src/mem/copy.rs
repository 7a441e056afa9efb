//! Copying out of and into registered host memory by the processor, where no transport does it one-sided. Device memory is
//! copied by its device ([`staging`](super::cuda::staging)).

use super::iov::{Iov, total};
use crate::error::{Error, Result};
use crate::proto::wire::MemoryKind;

/// The device whose memory all of them are; `None` where there is none such.
pub fn device_of(iovs: &[Iov]) -> Option<u32> {
    let MemoryKind::Cuda { device } = iovs.first()?.range.kind() else { return None };
    iovs.iter().all(|iov| iov.range.kind() == MemoryKind::Cuda { device }).then_some(device)
}

/// Where a part of host memory is.
fn address(iov: &Iov) -> Result<usize> {
    if iov.range.kind() != MemoryKind::Host {
        return Err(Error::invalid(format!("{} is among pieces of other memory; all must be of one kind", iov.range)));
    }
    // An address, which is as long as a pointer.
    Ok(iov.range.slice(iov.offset, iov.len.into())? as usize)
}

/// Appends the bytes of all, which are host memory, to `out`.
///
/// # Errors
/// [`ErrorKind::OutOfRange`](crate::ErrorKind::OutOfRange) for what leaves its range,
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for device memory.
pub fn gather(iovs: &[Iov], out: &mut Vec<u8>) -> Result<()> {
    for iov in iovs {
        let (from, len) = (address(iov)?, iov.len as usize);
        out.reserve(len);
        let to = out.spare_capacity_mut().as_mut_ptr().cast::<u8>();
        // SAFETY: whoever made the range promised that it is mapped while it is registered; `to` has room for `len` bytes and is
        // not part of it, because it is the vector's own. These bytes of the vector are written by it.
        unsafe {
            std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance(from), to, len);
            out.set_len(out.len() + len);
        }
    }
    Ok(())
}

/// Puts `data` in place in host memory. Nothing is written unless it has the right length.
///
/// # Errors
/// As [`gather`]; [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) for another length.
pub fn scatter(iovs: &[Iov], mut data: &[u8]) -> Result<()> {
    if total(iovs) != data.len() as u64 {
        return Err(Error::corrupt(format!("{} bytes arrived, expected {}", data.len(), total(iovs))));
    }
    for iov in iovs {
        let to = std::ptr::with_exposed_provenance_mut(address(iov)?);
        let Some((part, behind)) = data.split_at_checked(iov.len as usize) else { break };
        data = behind;
        // SAFETY: whoever made the range promised that it may be written while it is registered, and that no reference to
        // it is in use meanwhile; `part`, a live reference, is thus no part of it.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::mem::MemoryRange;

    #[test]
    fn bytes_are_copied_within_the_range_only() {
        let mut memory: Vec<u8> = (0..100).collect();
        // SAFETY: `memory` outlives the range and is not used while it is copied.
        let range = unsafe { MemoryRange::new(memory.as_mut_ptr().expose_provenance() as u64, 100, MemoryKind::Host) };
        let range = range.unwrap();
        let iov = |offset, len| Iov { range, offset, len };
        let mut out = vec![255];
        gather(&[iov(10, 3), iov(99, 1)], &mut out).unwrap();
        assert_eq!(out, [255, 10, 11, 12, 99]);
        scatter(&[iov(97, 1), iov(98, 2)], &[1, 2, 3]).unwrap();
        for (offset, len) in [(98, 3), (100, 1), (u64::MAX, 2), (0, 101)] {
            assert_eq!(gather(&[iov(offset, len)], &mut out).unwrap_err().kind(), ErrorKind::OutOfRange);
            let bytes = vec![0; len as usize];
            assert_eq!(scatter(&[iov(offset, len)], &bytes).unwrap_err().kind(), ErrorKind::OutOfRange);
        }
        assert_eq!(scatter(&[iov(0, 3)], &[0, 0]).unwrap_err().kind(), ErrorKind::Corrupt);
        let of_a_device = Iov { range: range.described_as(MemoryKind::Cuda { device: 0 }), offset: 0, len: 1 };
        assert_eq!(gather(&[iov(0, 1), of_a_device], &mut Vec::new()).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(scatter(&[of_a_device], &[0]).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(out.len(), 5);
        assert_eq!(memory.get(95..), Some(&[95, 96, 1, 2, 3][..]));
    }
}
