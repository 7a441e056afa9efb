//! Bytes between device memory and messages: by way of pinned host memory, which a device copies from and to while it computes.
//!
//! The driver's own synchronous copies go by the default stream, which waits for all that the engine computes, and from
//! memory that is not pinned they return before the bytes are on the device.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::copier::Copier;
use super::{PrimaryContext, ok};
use crate::error::Result;

/// Bytes of pinned memory per device: two chunks of a transfer.
const STAGE_BYTES: usize = 1 << 20;

/// From this length on the driver copies a piece: its copies between host and device have engines of their own, and wait for
/// nothing that computes.
const LONG_BYTES: u64 = 16 << 10;

/// Looks at a copy that is under way before others are let have the processor.
const SPINS: u64 = 1000;

/// One device's. Of all agents of the process, until it ends.
struct Stage {
    copier: Copier,
    /// [`STAGE_BYTES`] of pinned memory.
    pinned: *mut u8,
}

// SAFETY: the address may be used by any thread, one at a time, which the stage's lock sees to.
unsafe impl Send for Stage {}

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

/// Makes a device's stage, which takes time and may wait for the device.
///
/// # Errors
/// What the driver says.
pub fn prepare(device: u32) -> Result<()> {
    with(device, |_| Ok(()))
}

/// Appends the bytes at some addresses (with lengths) in memory of `device` to `out`. They are there when this returns; it
/// waits for no stream but our own.
///
/// # Safety
/// They are mapped, and nobody writes them meanwhile.
///
/// # Errors
/// What the driver says.
pub(in crate::mem) unsafe fn read(device: u32, places: &[(u64, usize)], out: &mut Vec<u8>) -> Result<()> {
    with(device, |stage| {
        let mut places = Cursor { places, at: 0 };
        loop {
            let mut filled = 0;
            while let Some((from, len)) = places.next(STAGE_BYTES - filled, &stage.copier) {
                let to = stage.pinned.expose_provenance() as u64 + filled as u64;
                // SAFETY: the caller promises the one place; the other is this stage's, and `run` waits.
                let added = unsafe { stage.copier.add(from, to, len as u64) };
                if added.is_err() {
                    stage.run()?;
                }
                added?;
                filled += len;
            }
            if filled == 0 {
                return Ok(());
            }
            stage.run()?;
            // SAFETY: so many bytes of the stage have just been written.
            out.extend_from_slice(unsafe { std::slice::from_raw_parts(stage.pinned, filled) });
        }
    })
}

/// Puts `data` at some addresses (with lengths, which are `data`'s together) in memory of `device`, one after the other. It is
/// there when this returns; it waits for no stream but our own.
///
/// # Safety
/// They are mapped, and nobody reads or writes them meanwhile.
///
/// # Errors
/// What the driver says.
pub(in crate::mem) unsafe fn write(device: u32, places: &[(u64, usize)], mut data: &[u8]) -> Result<()> {
    with(device, |stage| {
        let mut places = Cursor { places, at: 0 };
        loop {
            let mut filled = 0;
            while let Some((to, len)) = places.next(STAGE_BYTES - filled, &stage.copier) {
                let Some((part, rest)) = data.split_at_checked(len) else { break };
                data = rest;
                // SAFETY: the stage has room for what `next` was told, and no copy of it is under way.
                let from = unsafe {
                    let from = stage.pinned.add(filled);
                    ptr::copy_nonoverlapping(part.as_ptr(), from, len);
                    from.expose_provenance() as u64
                };
                // SAFETY: the caller promises the one place; the other is this stage's, and `run` waits.
                let added = unsafe { stage.copier.add(from, to, len as u64) };
                if added.is_err() {
                    stage.run()?;
                }
                added?;
                filled += len;
            }
            if filled == 0 {
                return Ok(());
            }
            stage.run()?;
        }
    })
}

/// Places that are taken in parts.
struct Cursor<'a> {
    places: &'a [(u64, usize)],
    /// Bytes of the first that were taken.
    at: usize,
}

impl Cursor<'_> {
    /// The next part that has room in so many bytes and in the copier's batch.
    fn next(&mut self, room: usize, copier: &Copier) -> Option<(u64, usize)> {
        let ((addr, len), rest) = self.places.split_first()?;
        let left = len.saturating_sub(self.at);
        let part = usize::try_from(copier.fits(left.min(room) as u64)).unwrap_or(0);
        if part == 0 && left > 0 {
            return None;
        }
        let from = addr.saturating_add(self.at as u64);
        if part == left {
            (self.places, self.at) = (rest, 0);
        } else {
            self.at += part;
        }
        Some((from, part))
    }
}

impl Stage {
    fn new(device: u32) -> Result<Stage> {
        let context = Arc::new(PrimaryContext::retain(device)?);
        let copier = Copier::new(Arc::clone(&context), LONG_BYTES)?;
        let _entered = context.enter()?;
        let mut pinned = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address. Never freed: the stage lives as long as the process.
        ok("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut pinned, STAGE_BYTES, flags) })?;
        Ok(Stage { copier, pinned: pinned.cast() })
    }

    /// Has the batch copied, and waits for that.
    fn run(&mut self) -> Result<()> {
        let (is_under_way, launched) = self.copier.launch();
        if !is_under_way {
            return launched;
        }
        for turn in 0u64.. {
            if let Some(ended) = self.copier.next_ended() {
                return launched.and(ended);
            }
            // Others may have the processor where it takes longer than usual.
            if turn < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        launched
    }
}
