//! The batch of one launch: a table of block ids and of runs over them, and the kernels that read it.

use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;

use super::ipc::Imported;
use super::ok;
use crate::error::{Error, ErrorKind, Result};

/// Runs in one launch.
pub const BATCH_RUNS: usize = 1024;
/// Pairs of block ids in one launch.
const BATCH_PAIRS: usize = 8192;
/// The bytes that a warp copies at a time. As the kernel has it, eight loads and stores of 16 bytes a thread.
pub const ITEM_BYTES: u64 = 4096;
const THREADS: c_uint = 256;
const WARPS: u32 = THREADS / 32;

/// An entry of the kernel's table: `len` bytes for each of some pairs of ids.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CopyRun {
    from: u64,
    to: u64,
    from_stride: u64,
    to_stride: u64,
    len: u64,
    /// The number of its first item in the launch.
    first: u32,
    /// Items per pair.
    parts: u32,
    /// Where its pairs begin.
    pairs: u32,
    unused: u32,
}

/// Two ids, as the kernel has them: where a block is read, and where it is written.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AddressPair {
    pub(super) from: u32,
    pub(super) to: u32,
}

const PAIRS_BYTES: usize = BATCH_PAIRS * size_of::<AddressPair>();
/// Pairs, and what has been added of runs behind them.
const TABLE_BYTES: usize = PAIRS_BYTES + BATCH_RUNS * size_of::<CopyRun>();

/// The copies of one launch.
pub(super) struct CopyBatch {
    /// A number that no other batch of the process has had.
    pub(super) number: u64,
    /// [`TABLE_BYTES`] of pinned host memory: pairs first, runs behind them when it is launched.
    table: *mut u8,
    /// As much of the device's memory, where the kernel has the table; 0 where there was none, and it reads the other.
    on_device: sys::CUdeviceptr,
    runs: Vec<CopyRun>,
    /// Pairs in the table.
    pairs: usize,
    /// Items of the runs.
    items: u32,
    /// Pieces that are left to the driver, which it has.
    pub(super) by_driver: usize,
    pub(super) bytes: u64,
    pub(super) done: sys::CUevent,
    /// True if it was launched and has not been seen to end.
    pub(super) launched: bool,
    /// True if `done` was recorded behind it.
    pub(super) is_marked: bool,
    /// Mappings that it copies from or to.
    pub(super) holds: Vec<Arc<Imported>>,
}

impl CopyRun {
    /// Blocks of `len` bytes, at addresses and so many times strides as their ids say.
    pub(super) fn new((from, from_stride): (u64, u64), (to, to_stride): (u64, u64), len: u64) -> CopyRun {
        let parts = u32::try_from(len.div_ceil(ITEM_BYTES)).unwrap_or(u32::MAX);
        CopyRun { from, to, from_stride, to_stride, len, first: 0, parts, pairs: 0, unused: 0 }
    }
}

/// A number that no batch of the process has had.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl CopyBatch {
    /// In the current context.
    pub(super) fn new() -> Result<CopyBatch> {
        let mut done = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: writes one handle.
        ok("cuEventCreate", unsafe { sys::cuEventCreate(&mut done, flags) })?;
        let mut batch = CopyBatch {
            number: next_number(),
            table: ptr::null_mut(),
            on_device: 0,
            runs: Vec::with_capacity(BATCH_RUNS),
            pairs: 0,
            items: 0,
            by_driver: 0,
            bytes: 0,
            done,
            launched: false,
            is_marked: false,
            holds: Vec::new(),
        };
        let mut table = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address.
        ok("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut table, TABLE_BYTES, flags) })?;
        batch.table = table.cast();
        // SAFETY: writes one address.
        if let Err(error) = ok("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut batch.on_device, TABLE_BYTES) }) {
            // A device may have no memory to spare.
            log::debug!("tables of copies stay in the host's memory, which is slower: {error}");
            batch.on_device = 0;
        }
        Ok(batch)
    }

    /// Has the kernels copy what the table says, in the current context, `blocks` blocks of threads at most.
    pub(super) fn copy(
        &mut self,
        stream: sys::CUstream,
        (fetch, kernel): (sys::CUfunction, sys::CUfunction),
        blocks: u32,
    ) -> Result<()> {
        if self.items == 0 {
            return Ok(());
        }
        let (pairs, runs) = (self.pairs * size_of::<AddressPair>(), self.runs.len() * size_of::<CopyRun>());
        // SAFETY: the table has room for all pairs and, behind those, all runs, and nothing is under way from it.
        unsafe { ptr::copy_nonoverlapping(self.runs.as_ptr().cast::<u8>(), self.table.add(pairs), runs) };
        // Pinned memory has one address for all devices and the host.
        let mut from = self.table.expose_provenance() as u64;
        let mut at = from;
        if self.on_device != 0 {
            at = self.on_device;
            let mut words = u32::try_from((pairs + runs) / size_of::<u64>()).unwrap_or(0);
            let mut parameters: [*mut c_void; 3] =
                [(&raw mut from).cast(), (&raw mut at).cast(), (&raw mut words).cast()];
            // SAFETY: it takes two addresses and a 32-bit number. The table has that many words and is as long on the device,
            // where the last batch that used it has ended; it stays as it is here until this one has.
            unsafe { run(stream, fetch, words.div_ceil(THREADS), &mut parameters) }?;
        }
        let mut runs_at = at + pairs as u64;
        let (mut count, mut items) = (u32::try_from(self.runs.len()).unwrap_or(0), self.items);
        let mut parameters: [*mut c_void; 4] =
            [(&raw mut at).cast(), (&raw mut runs_at).cast(), (&raw mut count).cast(), (&raw mut items).cast()];
        // SAFETY: it takes two addresses and two 32-bit numbers. It reads the table, which is there until the batch has ended,
        // and copies what that says, of which whoever added it was promised that it may.
        unsafe { run(stream, kernel, blocks.min(items.div_ceil(WARPS)), &mut parameters) }
    }

    /// Makes it an empty one, when nothing of it is under way.
    pub(super) fn clear(&mut self) {
        self.number = next_number();
        (self.pairs, self.items, self.by_driver, self.bytes, self.launched) = (0, 0, 0, 0, false);
        self.runs.clear();
        self.holds.clear();
    }

    /// How many runs, pieces of the driver's with them, and how many pairs it has room for.
    pub(super) fn room(&self) -> (usize, usize) {
        let runs = BATCH_RUNS.saturating_sub(self.runs.len() + self.by_driver);
        (runs, BATCH_PAIRS.saturating_sub(self.pairs))
    }

    /// Adds pairs of ids, `count` at most, to the table. Returns where they begin there.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] for more than fit.
    pub(super) fn add_pairs(&mut self, count: usize, pairs: impl IntoIterator<Item = AddressPair>) -> Result<u32> {
        let (_, room) = self.room();
        if count > room {
            return Err(Error::new(ErrorKind::Exhausted, format!("{count} pairs of blocks do not fit the batch")));
        }
        let at = self.pairs;
        for pair in pairs.into_iter().take(count) {
            // SAFETY: the table has room for `BATCH_PAIRS`, of which `room` are free, and what was under way from it has ended.
            unsafe { self.table.cast::<AddressPair>().add(self.pairs).write(pair) };
            self.pairs += 1;
        }
        Ok(u32::try_from(at).unwrap_or(u32::MAX))
    }

    /// Adds a run for `count` pairs of the table, from `pairs` on.
    ///
    /// # Safety
    /// Until the batch has ended, the device reaches all that the run says of these pairs, and nobody else writes to it.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] for one that does not fit.
    pub(super) unsafe fn add_run(&mut self, pairs: u32, count: usize, run: CopyRun) -> Result<()> {
        let items = u32::try_from(count).ok().and_then(|n| self.items.checked_add(run.parts.checked_mul(n)?));
        let (Some(items), (1.., _)) = (items, self.room()) else {
            let text = format!("{count} blocks of {} bytes do not fit the batch", run.len);
            return Err(Error::new(ErrorKind::Exhausted, text));
        };
        self.runs.push(CopyRun { first: self.items, pairs, ..run });
        self.items = items;
        self.bytes = self.bytes.saturating_add(run.len.saturating_mul(count as u64));
        Ok(())
    }
}

/// Runs a kernel with [`THREADS`] threads a block.
///
/// # Safety
/// The kernel takes such parameters, and may do what it does with them until the stream has ended it.
unsafe fn run(
    stream: sys::CUstream,
    kernel: sys::CUfunction,
    blocks: u32,
    parameters: &mut [*mut c_void],
) -> Result<()> {
    let parameters = parameters.as_mut_ptr();
    // SAFETY: this function's contract; the parameters are copied before the call returns.
    ok("cuLaunchKernel", unsafe {
        sys::cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, ptr::null_mut())
    })
}

impl Drop for CopyBatch {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once; nothing is under way any more (`Copier::drop`). At the end of the process the driver
        // may be down already, and says so.
        unsafe {
            let _ = sys::cuEventDestroy_v2(self.done);
            if !self.table.is_null() {
                let _ = sys::cuMemFreeHost(self.table.cast());
            }
            if self.on_device != 0 {
                let _ = sys::cuMemFree_v2(self.on_device);
            }
        }
    }
}
