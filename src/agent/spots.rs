//! Places in this process's registered memory, and the copies between them and messages.

use twox_hash::XxHash3_128;

use crate::error::{Error, Result};
use crate::mem::{MemoryRange, copy};

/// Part of a registered range: offset and length in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    pub(super) range: MemoryRange,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// Bytes of a digest.
const DIGEST_LEN: usize = 16;
/// Bytes that are hashed at a time: half of a usual second-level cache.
const DIGEST_PART: usize = 256 << 10;

/// Bytes in all of them.
pub(super) fn total(spots: &[Spot]) -> u64 {
    spots.iter().map(|spot| u64::from(spot.len)).sum()
}

/// Appends the bytes of all to `out`.
pub(super) fn gather(spots: &[Spot], out: &mut Vec<u8>) -> Result<()> {
    spots.iter().try_for_each(|spot| copy::read(&spot.range, spot.offset, spot.len as usize, out))
}

/// Puts `data` in place. Nothing is written unless it has the right length.
pub(super) fn scatter(spots: &[Spot], mut data: &[u8]) -> Result<()> {
    if total(spots) != data.len() as u64 {
        return Err(Error::corrupt(format!("{} bytes arrived, expected {}", data.len(), total(spots))));
    }
    for spot in spots {
        let Some((part, rest)) = data.split_at_checked(spot.len as usize) else { break };
        copy::write(&spot.range, spot.offset, part)?;
        data = rest;
    }
    Ok(())
}

/// The digest of the bytes of all, one after the other: XXH3 of 128 bits, big-endian. It finds damage; it does not prove
/// who sent what.
pub(super) fn digest(spots: &[Spot]) -> Result<[u8; DIGEST_LEN]> {
    let mut hasher = XxHash3_128::new();
    let mut part = Vec::new();
    for spot in spots {
        let (mut offset, mut left) = (spot.offset, spot.len as usize);
        // By way of a buffer that stays in the processor's cache, because others may write the memory meanwhile.
        while left > 0 {
            let len = left.min(DIGEST_PART);
            part.clear();
            copy::read(&spot.range, offset, len, &mut part)?;
            hasher.write(&part);
            offset = offset.saturating_add(len as u64);
            left -= len;
        }
    }
    Ok(hasher.finish_128().to_be_bytes())
}
