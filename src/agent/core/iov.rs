//! Places in this process's registered memory, and the copies between them and messages.

use twox_hash::XxHash3_128;

use crate::error::Result;
pub(crate) use crate::mem::Iov;
pub(crate) use crate::mem::copy::{device_of, gather, scatter};
pub(crate) use crate::mem::iov::total;

/// Bytes of a digest.
const DIGEST_LEN: usize = 16;
/// Bytes that are hashed at a time: half of a usual second-level cache.
const DIGEST_PART: usize = 256 << 10;

/// The digest of the bytes of all, which are host memory, one after the other: XXH3 of 128 bits, big-endian. It finds damage; it does not prove
/// who sent what.
pub(crate) fn digest(iovs: &[Iov]) -> Result<[u8; DIGEST_LEN]> {
    let mut hasher = XxHash3_128::new();
    let mut part = Vec::new();
    for iov in iovs {
        let (mut offset, mut left) = (iov.offset, iov.len as usize);
        // By way of a buffer that stays in the processor's cache, because others may write the memory meanwhile.
        while left > 0 {
            let len = left.min(DIGEST_PART);
            part.clear();
            gather(&[Iov { range: iov.range, offset, len: u32::try_from(len).unwrap_or(u32::MAX) }], &mut part)?;
            hasher.write(&part);
            offset = offset.saturating_add(len as u64);
            left -= len;
        }
    }
    Ok(hasher.finish_128().to_be_bytes())
}

/// Returns the digest of bytes that were copied out of an iov.
pub(crate) fn digest_of(bytes: &[u8]) -> [u8; DIGEST_LEN] {
    XxHash3_128::oneshot(bytes).to_be_bytes()
}
