//! Bytes between device memory and messages: by way of pinned host memory, which a device copies from and to while it computes.
//!
//! The driver's own synchronous copies go by the default stream, which waits for all that the engine computes, and from
//! memory that is not pinned they return before the bytes are on the device.

use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::batch::BATCH_RUNS;
use super::copier::{BATCHES, Copier};
use super::{PrimaryContext, ok};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::Iov;

/// Bytes of one staged copy: as long as a chunk of a transfer.
pub const STAGED_BYTES: usize = 512 << 10;
/// Staged copies under way at a time.
const SLOTS: usize = BATCHES;

/// From this length on the driver copies a piece: its copies between host and device have engines of their own, and wait for
/// nothing that computes. Shorter ones take one entry of a launch's table each.
const LONG_BYTES: u64 = 16 << 10;

/// A staged copy, see [`Stage::begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StagedCopy(usize);

/// The state of a slot of the pinned memory.
#[derive(Default)]
struct StageSlot {
    is_taken: bool,
    /// Bytes in it.
    len: usize,
    /// Launches for it that have not ended.
    launches: usize,
    /// The first error.
    error: Option<Error>,
}

/// Copies between one device's memory and pinned memory.
pub struct Stage {
    copier: Copier,
    /// [`SLOTS`] times [`STAGED_BYTES`] of pinned memory.
    pinned: *mut u8,
    slots: [StageSlot; SLOTS],
    /// The slots of the launches under way, in the order of their ends.
    running: VecDeque<usize>,
}

// SAFETY: the address may be used by any thread, one at a time, which `&mut self` sees to.
unsafe impl Send for Stage {}

impl Stage {
    /// Takes time, and may wait for the device.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn new(device: u32) -> Result<Stage> {
        let context = Arc::new(PrimaryContext::retain(device)?);
        let copier = Copier::new(Arc::clone(&context), LONG_BYTES)?;
        let _entered = context.enter()?;
        let mut pinned = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address.
        ok("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut pinned, SLOTS * STAGED_BYTES, flags) })?;
        Ok(Stage { copier, pinned: pinned.cast(), slots: Default::default(), running: VecDeque::new() })
    }

    /// Begins to copy parts of registered device memory, [`STAGED_BYTES`] together at most. With `data`, as long as
    /// all of them together, it puts that in place; the data are taken when this returns. `None`, with nothing done,
    /// while others take all the room. [`Stage::next_ended`] tells when the bytes are there, for [`Stage::take`].
    ///
    /// The owners of the ranges promised ([`MemoryRange::new`](crate::mem::MemoryRange::new)) that they are mapped while they are
    /// registered; the caller keeps them registered until the copy has ended.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] for what leaves its range or is too much; [`ErrorKind::Corrupt`] for data of another length; what
    /// the driver says. Nothing is under way then.
    pub fn begin(&mut self, iovs: &[Iov], data: Option<&[u8]>) -> Result<Option<StagedCopy>> {
        let place = |iov: &Iov| Ok((iov.range.slice(iov.offset, iov.len.into())?, iov.len as usize));
        let places = iovs.iter().map(place).collect::<Result<Vec<_>>>()?;
        let len: usize = places.iter().map(|(_, len)| *len).sum();
        if len > STAGED_BYTES || places.len().div_ceil(BATCH_RUNS) > BATCHES {
            return Err(Error::new(ErrorKind::OutOfRange, format!("{len} bytes are more than are staged at a time")));
        }
        if data.is_some_and(|data| data.len() != len) {
            return Err(Error::corrupt(format!("{} bytes arrived, expected {len}", data.map_or(0, <[u8]>::len))));
        }
        let Some(number) = self.slots.iter().position(|slot| !slot.is_taken) else { return Ok(None) };
        if self.copier.free_batches() < places.len().div_ceil(BATCH_RUNS).max(1) {
            return Ok(None);
        }
        // SAFETY: within the pinned memory.
        let start = unsafe { self.pinned.add(number * STAGED_BYTES) };
        if let Some(data) = data {
            // SAFETY: the slot has room for `len` bytes, and nothing is under way from or to it.
            unsafe { ptr::copy_nonoverlapping(data.as_ptr(), start, len) };
        }
        let mut slot = StageSlot { is_taken: true, len, launches: 0, error: None };
        let mut at = start.expose_provenance() as u64;
        for batch in places.chunks(BATCH_RUNS) {
            let added = batch.iter().filter(|(_, len)| *len > 0).try_for_each(|(addr, len)| {
                let (from, to) = if data.is_some() { (at, *addr) } else { (*addr, at) };
                at += *len as u64;
                // SAFETY: the ranges' owners promise the one place (above), the other is the slot's, which is given out again
                // only when all of its launches have ended.
                unsafe { self.copier.add(from, to, *len as u64) }
            });
            let (is_under_way, launched) = self.copier.launch();
            if is_under_way {
                self.running.push_back(number);
                slot.launches += 1;
            }
            if let Err(error) = added.and(launched) {
                slot.error = Some(error);
                break;
            }
        }
        match (slot.launches, slot.error.take()) {
            (0, Some(error)) => Err(error),
            (_, error) => {
                if let Some(place) = self.slots.get_mut(number) {
                    *place = StageSlot { error, ..slot };
                }
                Ok(Some(StagedCopy(number)))
            }
        }
    }

    /// A copy that has ended and how, if any has that was not told before.
    pub fn next_ended(&mut self) -> Option<(StagedCopy, Result<()>)> {
        loop {
            // Of nothing.
            if let Some(number) = self.slots.iter().position(|slot| slot.is_taken && slot.launches == 0) {
                return Some((StagedCopy(number), self.end(number)));
            }
            let ended = self.copier.next_ended()?;
            let slot = self.running.pop_front().and_then(|number| self.slots.get_mut(number))?;
            slot.launches = slot.launches.saturating_sub(1);
            if let Err(error) = ended {
                slot.error.get_or_insert(error);
            }
        }
    }

    /// Marks a slot as told of, which is free from then on; its bytes stay until the next copy begins.
    fn end(&mut self, number: usize) -> Result<()> {
        let Some(slot) = self.slots.get_mut(number) else { return Ok(()) };
        slot.is_taken = false;
        slot.error.take().map_or(Ok(()), Err)
    }

    /// Appends the bytes of a copy that has just ended ([`Stage::next_ended`]). To be called before another begins.
    pub fn take(&mut self, copy: StagedCopy, out: &mut Vec<u8>) {
        let Some(slot) = self.slots.get(copy.0).filter(|slot| !slot.is_taken) else { return };
        // SAFETY: so many bytes of the slot were written, and nothing is under way to it.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(self.pinned.add(copy.0 * STAGED_BYTES), slot.len) });
    }

    /// Waits for all that is under way. Returns whether nothing is any more, which it is not where the driver refuses to wait.
    pub fn finish(&mut self) -> bool {
        self.copier.finish()
    }

    /// True if anything is under way or not told.
    pub fn is_running(&self) -> bool {
        self.slots.iter().any(|slot| slot.is_taken)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let context = Arc::clone(self.copier.context());
        // Else the device may still write there.
        if self.copier.finish()
            && let Ok(_entered) = context.enter()
        {
            // SAFETY: made by `new`, freed once; nothing is under way any more.
            let _ = unsafe { sys::cuMemFreeHost(self.pinned.cast()) };
        }
    }
}
