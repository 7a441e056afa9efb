//! Bytes between device memory and messages: by way of pinned host memory, which a device copies from and to while it computes.
//!
//! The driver's own synchronous copies go by the default stream, which waits for all that the engine computes, and from
//! memory that is not pinned they return before the bytes are on the device.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::batch::BATCH_STRETCHES;
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

/// Looks at a copy that is under way before others are let have the processor.
const SPINS: u64 = 1000;

/// A staged copy, see [`Stage::read`] and [`Stage::write`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(usize);

/// What is known of a slot of the pinned memory.
#[derive(Default)]
struct Slot {
    is_taken: bool,
    /// Bytes in it.
    len: usize,
    /// Launches for it that have not ended.
    launches: usize,
    /// What has gone wrong.
    error: Option<Error>,
}

/// Copies between one device's memory and pinned memory.
pub struct Stage {
    copier: Copier,
    /// [`SLOTS`] times [`STAGED_BYTES`] of pinned memory.
    pinned: *mut u8,
    slots: [Slot; SLOTS],
    /// The slots of the launches under way, in the order of their ends.
    running: VecDeque<usize>,
}

// SAFETY: the address may be used by any thread, one at a time, which `&mut self` sees to.
unsafe impl Send for Stage {}

impl Stage {
    /// Takes time, and may wait for the device.
    ///
    /// # Errors
    /// What the driver says.
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

    /// Begins to copy parts of registered ranges of the device's memory, [`STAGED_BYTES`] together at most. `None` while others
    /// take all the room. [`Stage::next_ended`] tells when the bytes are there, for [`Stage::take`].
    ///
    /// The owners of the ranges promised ([`MemoryRange::new`](crate::mem::MemoryRange::new)) that they are mapped while they are
    /// registered; the caller keeps them registered until the copy has ended.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] for what leaves its range or is too much; what the driver says. Nothing is under way then.
    pub fn read(&mut self, iovs: &[Iov]) -> Result<Option<Ticket>> {
        self.begin(iovs, None)
    }

    /// Begins to put `data`, as long as all of them together, in place; otherwise as [`Stage::read`]. The data has been taken
    /// when this returns, unless it returns `None`.
    ///
    /// # Errors
    /// As [`Stage::read`]; [`ErrorKind::Corrupt`] for data of another length.
    pub fn write(&mut self, iovs: &[Iov], data: &[u8]) -> Result<Option<Ticket>> {
        self.begin(iovs, Some(data))
    }

    fn begin(&mut self, iovs: &[Iov], data: Option<&[u8]>) -> Result<Option<Ticket>> {
        let place = |iov: &Iov| Ok((iov.range.slice(iov.offset, iov.len.into())?, iov.len as usize));
        let places = iovs.iter().map(place).collect::<Result<Vec<_>>>()?;
        let len: usize = places.iter().map(|(_, len)| *len).sum();
        if len > STAGED_BYTES || places.len().div_ceil(BATCH_STRETCHES) > BATCHES {
            return Err(Error::new(ErrorKind::OutOfRange, format!("{len} bytes are more than are staged at a time")));
        }
        if data.is_some_and(|data| data.len() != len) {
            return Err(Error::corrupt(format!("{} bytes arrived, expected {len}", data.map_or(0, <[u8]>::len))));
        }
        let Some(number) = self.slots.iter().position(|slot| !slot.is_taken) else { return Ok(None) };
        if self.copier.free_batches() < places.len().div_ceil(BATCH_STRETCHES).max(1) {
            return Ok(None);
        }
        // SAFETY: within the pinned memory.
        let start = unsafe { self.pinned.add(number * STAGED_BYTES) };
        if let Some(data) = data {
            // SAFETY: the slot has room for `len` bytes, and nothing is under way from or to it.
            unsafe { ptr::copy_nonoverlapping(data.as_ptr(), start, len) };
        }
        let mut slot = Slot { is_taken: true, len, launches: 0, error: None };
        let mut at = start.expose_provenance() as u64;
        for batch in places.chunks(BATCH_STRETCHES) {
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
                    *place = Slot { error, ..slot };
                }
                Ok(Some(Ticket(number)))
            }
        }
    }

    /// A copy that has ended and how, if any has that was not told before.
    pub fn next_ended(&mut self) -> Option<(Ticket, Result<()>)> {
        loop {
            // Of nothing.
            if let Some(number) = self.slots.iter().position(|slot| slot.is_taken && slot.launches == 0) {
                return Some((Ticket(number), self.end(number)));
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

    /// Appends the bytes of a copy that [`Stage::next_ended`] has just told the end of, before another begins.
    pub fn take(&mut self, ticket: Ticket, out: &mut Vec<u8>) {
        let Some(slot) = self.slots.get(ticket.0).filter(|slot| !slot.is_taken) else { return };
        // SAFETY: so many bytes of the slot were written, and nothing is under way to it.
        out.extend_from_slice(unsafe {
            std::slice::from_raw_parts(self.pinned.add(ticket.0 * STAGED_BYTES), slot.len)
        });
    }

    /// Whether anything is under way or not told.
    pub fn is_running(&self) -> bool {
        self.slots.iter().any(|slot| slot.is_taken)
    }

    /// Waits for the end of the only copy.
    fn wait(&mut self) -> Result<Ticket> {
        for turn in 0u64.. {
            if let Some((ticket, ended)) = self.next_ended() {
                return ended.map(|()| ticket);
            }
            // Others may have the processor where it takes longer than usual.
            if turn < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Err(Error::new(ErrorKind::Internal, "a copy that never ends"))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let context = Arc::clone(self.copier.context());
        self.copier.finish();
        if let Ok(_entered) = context.enter() {
            // SAFETY: made by `new`, freed once; nothing is under way any more.
            let _ = unsafe { sys::cuMemFreeHost(self.pinned.cast()) };
        }
    }
}

/// One stage per device for copies that are waited for, of all agents of the process, until it ends.
static STAGES: Mutex<BTreeMap<u32, Arc<Mutex<Stage>>>> = Mutex::new(BTreeMap::new());

/// Lends a device's stage.
fn with<T>(device: u32, act: impl FnOnce(&mut Stage) -> Result<T>) -> Result<T> {
    let mut stages = STAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let stage = match stages.entry(device) {
        Entry::Occupied(made) => Arc::clone(made.get()),
        Entry::Vacant(place) => Arc::clone(place.insert(Arc::new(Mutex::new(Stage::new(device)?)))),
    };
    drop(stages);
    act(&mut stage.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Appends the bytes of parts of registered ranges in memory of `device` to `out`. They are there when this returns; it waits
/// for no stream but our own.
///
/// # Errors
/// [`ErrorKind::OutOfRange`] for what leaves its range; what the driver says.
pub(in crate::mem) fn read(device: u32, iovs: &[Iov], out: &mut Vec<u8>) -> Result<()> {
    with(device, |stage| {
        for iovs in portions(iovs) {
            stage.read(&iovs)?.ok_or_else(no_room)?;
            let ticket = stage.wait()?;
            stage.take(ticket, out);
        }
        Ok(())
    })
}

/// Puts `data`, as long as they are together, at parts of registered ranges in memory of `device`, one after the other. It is
/// there when this returns; it waits for no stream but our own.
///
/// # Errors
/// As [`read`].
pub(in crate::mem) fn write(device: u32, iovs: &[Iov], mut data: &[u8]) -> Result<()> {
    with(device, |stage| {
        for iovs in portions(iovs) {
            let len: usize = iovs.iter().map(|iov| iov.len as usize).sum();
            let Some((part, rest)) = data.split_at_checked(len) else { break };
            data = rest;
            stage.write(&iovs, part)?.ok_or_else(no_room)?;
            stage.wait()?;
        }
        Ok(())
    })
}

fn no_room() -> Error {
    Error::new(ErrorKind::Internal, "a copy that is waited for has left another one under way")
}

/// The same places in portions that are staged at a time.
fn portions(iovs: &[Iov]) -> Vec<Vec<Iov>> {
    let (mut portions, mut portion, mut room) = (Vec::new(), Vec::new(), STAGED_BYTES);
    for iov in iovs {
        let mut rest = *iov;
        while rest.len > 0 {
            if room == 0 || portion.len() == BATCH_STRETCHES {
                portions.push(std::mem::take(&mut portion));
                room = STAGED_BYTES;
            }
            let len = rest.len.min(u32::try_from(room).unwrap_or(u32::MAX));
            portion.push(Iov { len, ..rest });
            room -= len as usize;
            rest.len -= len;
            rest.offset = rest.offset.saturating_add(len.into());
        }
    }
    if !portion.is_empty() {
        portions.push(portion);
    }
    portions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::MemoryRange;

    #[test]
    fn portions_have_all_bytes_once_and_are_no_longer_than_is_staged() {
        let range = MemoryRange::leaked(16);
        let iov = |offset, len| Iov { range, offset, len };
        let mut iovs = vec![iov(0, 3), iov(10, 0), iov(20, STAGED_BYTES as u32 * 2), iov(7_000_000, 1)];
        iovs.extend((0..3000).map(|n| iov(8_000_000 + n * 5, 4)));
        let portions = portions(&iovs);
        let len = |portion: &[Iov]| portion.iter().map(|iov| iov.len as usize).sum::<usize>();
        assert!(portions.iter().all(|portion| portion.len() <= BATCH_STRETCHES && len(portion) <= STAGED_BYTES));
        let bytes = |iovs: &[Iov]| -> Vec<u64> {
            iovs.iter().flat_map(|iov| iov.offset..iov.offset + u64::from(iov.len)).collect()
        };
        assert_eq!(bytes(&portions.concat()), bytes(&iovs));
    }
}
