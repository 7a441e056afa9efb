//! Places in this process's registered memory, and the copies between them and messages.

use twox_hash::XxHash3_128;

use crate::error::{Error, Result};
use crate::mem::{MemoryRange, copy};

/// Part of a registered range: offset and length in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Iov {
    pub(crate) range: MemoryRange,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// Bytes of a digest.
const DIGEST_LEN: usize = 16;
/// Bytes that are hashed at a time: half of a usual second-level cache.
const DIGEST_PART: usize = 256 << 10;

/// Bytes in all of them.
pub(crate) fn total(iovs: &[Iov]) -> u64 {
    iovs.iter().map(|iov| u64::from(iov.len)).sum()
}

/// Appends the bytes of all to `out`.
pub(crate) fn gather(iovs: &[Iov], out: &mut Vec<u8>) -> Result<()> {
    iovs.iter().try_for_each(|iov| copy::read(&iov.range, iov.offset, iov.len as usize, out))
}

/// Puts `data` in place. Nothing is written unless it has the right length.
pub(crate) fn scatter(iovs: &[Iov], mut data: &[u8]) -> Result<()> {
    if total(iovs) != data.len() as u64 {
        return Err(Error::corrupt(format!("{} bytes arrived, expected {}", data.len(), total(iovs))));
    }
    for iov in iovs {
        let Some((part, rest)) = data.split_at_checked(iov.len as usize) else { break };
        copy::write(&iov.range, iov.offset, part)?;
        data = rest;
    }
    Ok(())
}

/// The digest of the bytes of all, one after the other: XXH3 of 128 bits, big-endian. It finds damage; it does not prove
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
            copy::read(&iov.range, offset, len, &mut part)?;
            hasher.write(&part);
            offset = offset.saturating_add(len as u64);
            left -= len;
        }
    }
    Ok(hasher.finish_128().to_be_bytes())
}
