//! Copying out of and into registered memory by the processor, where no transport does it one-sided.

use super::cuda::staging;
use super::iov::{Iov, total};
use crate::error::{Error, Result};
use crate::proto::wire::MemoryKind;

/// Places of one device that follow each other in a list.
struct Run<'a> {
    device: u32,
    iovs: &'a [Iov],
    bytes: usize,
}

/// The parts of device memory at the beginning of `iovs`, of one device; `None` where host memory or nothing is there.
fn run_of(iovs: &[Iov]) -> Option<Run<'_>> {
    let MemoryKind::Cuda { device } = iovs.first()?.range.kind() else { return None };
    let count = iovs.iter().take_while(|iov| iov.range.kind() == MemoryKind::Cuda { device }).count();
    let iovs = iovs.get(..count)?;
    Some(Run { device, iovs, bytes: usize::try_from(total(iovs)).ok()? })
}

/// The device whose memory all of them are; `None` where there is none such.
pub fn device_of(iovs: &[Iov]) -> Option<u32> {
    run_of(iovs).filter(|run| run.iovs.len() == iovs.len()).map(|run| run.device)
}

/// Appends the bytes of all to `out`.
///
/// # Errors
/// [`ErrorKind::OutOfRange`](crate::ErrorKind::OutOfRange) for what leaves its range,
/// [`ErrorKind::Cuda`](crate::ErrorKind::Cuda) where the driver refuses.
pub fn gather(mut iovs: &[Iov], out: &mut Vec<u8>) -> Result<()> {
    while let [first, rest @ ..] = iovs {
        if let Some(run) = run_of(iovs) {
            staging::read(run.device, run.iovs, out)?;
            iovs = iovs.get(run.iovs.len()..).unwrap_or_default();
        } else {
            read_host(first, out)?;
            iovs = rest;
        }
    }
    Ok(())
}

fn read_host(iov: &Iov, out: &mut Vec<u8>) -> Result<()> {
    let len = iov.len as usize;
    let from = iov.range.slice(iov.offset, iov.len.into())?;
    out.reserve(len);
    let to = out.spare_capacity_mut().as_mut_ptr().cast::<u8>();
    // SAFETY: whoever made the range promised that it is mapped while it is registered; `to` has room for `len` bytes and is
    // not part of it, because it is the vector's own. These bytes of the vector are written by it.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance(from as usize), to, len);
        out.set_len(out.len() + len);
    }
    Ok(())
}

/// Puts `data` in place. Nothing is written unless it has the right length.
///
/// # Errors
/// As [`gather`]; [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) for another length.
pub fn scatter(mut iovs: &[Iov], mut data: &[u8]) -> Result<()> {
    if total(iovs) != data.len() as u64 {
        return Err(Error::corrupt(format!("{} bytes arrived, expected {}", data.len(), total(iovs))));
    }
    while let [first, rest @ ..] = iovs {
        let run = run_of(iovs);
        let bytes = run.as_ref().map_or(first.len as usize, |run| run.bytes);
        let Some((part, behind)) = data.split_at_checked(bytes) else { break };
        data = behind;
        if let Some(run) = run {
            staging::write(run.device, run.iovs, part)?;
            iovs = iovs.get(run.iovs.len()..).unwrap_or_default();
        } else {
            let to = first.range.slice(first.offset, first.len.into())?;
            let to = std::ptr::with_exposed_provenance_mut(to as usize);
            // SAFETY: whoever made the range promised that it may be written while it is registered, and that no reference to
            // it is in use meanwhile; `part`, a live reference, is thus no part of it.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            iovs = rest;
        }
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
        assert_eq!(out.len(), 5);
        assert_eq!(memory.get(95..), Some(&[95, 96, 1, 2, 3][..]));
    }
}
