//! Sizes that several parts, and both sides of a connection, agree on.

use crate::error::{Error, Result};

/// The longest message between agents, in bytes. Far above what the connector sends (block lists do not travel as
/// messages), low enough that one message holds up the loop for a few milliseconds at most.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Bytes moved by one chunk. Large enough that system calls and wake-ups do not count, small enough that it is still in the
/// processor's cache when it is put in place, and that a message in between waits for a fraction of a millisecond.
pub(crate) const CHUNK_BYTES: u64 = 512 << 10;
/// Bytes moved by one chunk whose pieces are gathered first. Where TCP paces what is sent (BBR), a longer one is a burst
/// that has to wait.
pub(crate) const GATHERED_BYTES: u64 = 256 << 10;
/// Pieces in one chunk, so that a request of scattered tiny pieces stays under 64 KiB.
pub(crate) const CHUNK_PIECES: usize = 3000;
/// Pieces that are at least this long on average are sent from where they are, shorter ones are gathered: of those, the
/// few parts that a message may have would make many small messages.
pub(crate) const PART_BYTES: u64 = 8 << 10;
/// Requests of one peer that may wait: reads, 48 MiB of them at the most, and what a device has to do with its memory first, with
/// the bytes of writes. A peer keeps to its window, which may not be larger; one that does not is cut off.
pub(crate) const MAX_WAITING: usize = 1024;

/// Bytes of a transfer or a message that is small enough for a caller's thread.
pub(crate) const LIGHT_BYTES: u64 = 64 << 10;
/// Pieces of such a transfer, one for each segment and block.
pub(crate) const LIGHT_PIECES: u64 = 64;
/// So many such transfers may be under way while callers drive the engine.
pub(crate) const MAX_LIGHT: usize = 16;

/// Refuses a message over the limit.
pub(crate) fn check_message(data: &[u8]) -> Result<()> {
    if data.len() > MAX_MESSAGE_BYTES {
        return Err(Error::invalid(format!(
            "a message of {} bytes is over the limit of {MAX_MESSAGE_BYTES}; move bulk data by transfers",
            data.len()
        )));
    }
    Ok(())
}
