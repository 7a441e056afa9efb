//! Copies from and to device memory, many pieces at a time: by a kernel that takes a table of them, on a stream of our own.
//!
//! The driver takes microseconds for each copy of its own, batched ones (`cuMemcpyBatchAsync`) too, in which a large device
//! copies several MiB. The kernel takes the first free processors (the stream has the highest priority), and no stream of the process
//! waits for it, nor it for them.
//!
//! The table has block ids and what they count, not a piece each: the device works out where a block is in no time, for
//! which this thread would take some 25 ns. It is copied to the device first, because a warp that reads it from the host's
//! memory waits for that longer than for its 4 KiB.

use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::ipc::Imported;
use super::{PrimaryContext, ok};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{MemoryRange, Way};
use crate::proto::wire::MemoryKind;

/// The kernel, for the driver to compile. With a terminating zero.
const KERNEL: &str = concat!(include_str!("copy_pieces.ptx"), "\0");
/// Stretches in one launch.
pub const BATCH_STRETCHES: usize = 1024;
/// Pairs of block ids in one launch.
const BATCH_PAIRS: usize = 8192;
/// Batches under way at a time.
pub(super) const BATCHES: usize = 8;
/// What a warp copies at a time, as the kernel has it: eight loads and stores of 16 bytes a thread.
pub const ITEM_BYTES: u64 = 4096;
const THREADS: c_uint = 256;
const WARPS: u32 = THREADS / 32;
/// Half of what a processor has room for, which gives all of them enough to wait for.
const BLOCKS_PER_PROCESSOR: u32 = 4;

/// An entry of the kernel's table: `len` bytes for each of some pairs of ids.
#[repr(C)]
#[derive(Clone, Copy)]
struct Stretch {
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
struct Pair {
    from: u32,
    to: u32,
}

const PAIRS_BYTES: usize = BATCH_PAIRS * size_of::<Pair>();
/// Pairs, and what has been added of stretches behind them.
const TABLE_BYTES: usize = PAIRS_BYTES + BATCH_STRETCHES * size_of::<Stretch>();

/// What one launch copies.
struct Batch {
    /// [`TABLE_BYTES`] of pinned host memory: pairs first, stretches behind them when it is launched.
    table: *mut u8,
    /// As much of the device's memory, where the kernel has the table.
    on_device: sys::CUdeviceptr,
    stretches: Vec<Stretch>,
    /// Pairs in the table.
    pairs: usize,
    /// Items of the stretches.
    items: u32,
    /// Pieces that are left to the driver, which it has.
    by_driver: usize,
    bytes: u64,
    done: sys::CUevent,
    /// Whether it was launched and has not been seen to end.
    launched: bool,
    /// Mappings that it copies from or to.
    holds: Vec<Arc<Imported>>,
}

/// Copies on one device.
pub struct Copier {
    context: Arc<PrimaryContext>,
    stream: sys::CUstream,
    module: sys::CUmodule,
    kernel: sys::CUfunction,
    blocks: u32,
    /// From which length on the driver copies a piece.
    long: u64,
    batches: Vec<Batch>,
    /// The batch that is being made, and the oldest one under way; they go round.
    making: usize,
    oldest: usize,
    /// Batches that were launched or given up.
    made: u64,
}

// SAFETY: the driver's handles and the tables' addresses may be used by any thread, one at a time, which `&mut self` sees to.
unsafe impl Send for Copier {}

impl Copier {
    /// For the device of `context`; pieces of at least `long` bytes are left to the driver.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] when the driver has no room for it or does not take the kernel.
    pub fn new(context: Arc<PrimaryContext>, long: u64) -> Result<Copier> {
        let mut copier = Copier {
            context: Arc::clone(&context),
            stream: ptr::null_mut(),
            module: ptr::null_mut(),
            kernel: ptr::null_mut(),
            blocks: 1,
            long: long.max(1),
            batches: Vec::new(),
            making: 0,
            oldest: 0,
            made: 0,
        };
        let _entered = context.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two numbers.
        ok("cuCtxGetStreamPriorityRange", unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) })?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: writes one handle, for the current context.
        ok("cuStreamCreateWithPriority", unsafe {
            sys::cuStreamCreateWithPriority(&mut copier.stream, flags, greatest)
        })?;
        if let Err(error) = copier.load() {
            copier.long = 1;
            log::warn!("CUDA device {} copies pieces one by one, which is slow: {error}", context.ordinal());
        }
        copier.blocks = context.processors()?.saturating_mul(BLOCKS_PER_PROCESSOR).max(1);
        for _ in 0..BATCHES {
            let batch = Batch::new()?;
            copier.batches.push(batch);
        }
        Ok(copier)
    }

    /// Loads the kernel into the current context.
    fn load(&mut self) -> Result<()> {
        // SAFETY: writes one handle; the image is a text that ends in a zero.
        ok("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut self.module, KERNEL.as_ptr().cast()) })?;
        let name = c"kvferry_copy_pieces";
        // SAFETY: writes one handle; the name ends in a zero.
        ok("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&mut self.kernel, self.module, name.as_ptr()) })
    }

    /// The context that it copies in.
    pub fn context(&self) -> &Arc<PrimaryContext> {
        &self.context
    }

    /// The number of the batch that is being made.
    fn number(&self) -> u64 {
        self.made
    }

    /// Bytes in the batch that is being made.
    pub fn bytes(&self) -> u64 {
        self.batches.get(self.making).filter(|batch| !batch.launched).map_or(0, |batch| batch.bytes)
    }

    /// Batches that are not under way.
    pub(super) fn free_batches(&self) -> usize {
        self.batches.iter().filter(|batch| !batch.launched).count()
    }

    /// How many entries the batch has room for. For none while all batches are under way.
    fn room(&self) -> (usize, usize) {
        self.batches.get(self.making).filter(|batch| !batch.launched).map_or((0, 0), |batch| {
            let stretches = BATCH_STRETCHES.saturating_sub(batch.stretches.len() + batch.by_driver);
            (stretches, BATCH_PAIRS.saturating_sub(batch.pairs))
        })
    }

    /// How much of a piece of `len` bytes fits the batch.
    pub fn fits(&self, len: u64) -> u64 {
        match self.room() {
            (1.., 1..) => len,
            _ => 0,
        }
    }

    /// For adding pieces of a registered range of memory of this device and of a region of another agent to the batch.
    ///
    /// The owners of both promised ([`MemoryRange::new`]) that they are there and may be read and written while they are
    /// registered; the caller keeps the range registered until the batch has ended, and the batch keeps the mapping.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for memory that is not this device's.
    pub fn between(&mut self, way: Way, here: MemoryRange, there: &Arc<Imported>) -> Result<Between<'_>> {
        if here.kind() != (MemoryKind::Cuda { device: self.context.ordinal() }) {
            return Err(Error::invalid(format!("{here} is not of CUDA device {}", self.context.ordinal())));
        }
        Ok(Between { copier: self, way, here, there: Arc::clone(there), is_held: false })
    }

    /// Keeps a mapping until the batch that is being made has ended.
    fn hold(&mut self, mapping: &Arc<Imported>) {
        if let Some(batch) = self.batches.get_mut(self.making).filter(|batch| !batch.launched)
            && !batch.holds.iter().rev().any(|held| Arc::ptr_eq(held, mapping))
        {
            batch.holds.push(Arc::clone(mapping));
        }
    }

    /// Adds a piece.
    ///
    /// # Safety
    /// Until the batch has ended, the device reaches both places, and nobody else writes to either.
    ///
    /// # Errors
    /// [`Exhausted`](crate::ErrorKind::Exhausted) for more than fits, of which nothing was added; what the driver says.
    pub(super) unsafe fn add(&mut self, from: u64, to: u64, len: u64) -> Result<()> {
        if self.fits(len) < len {
            return Err(Error::new(ErrorKind::Exhausted, format!("a piece of {len} bytes does not fit the batch")));
        }
        if len < self.long {
            let pairs = self.add_pairs(1, [Pair { from: 0, to: 0 }])?;
            return self.add_stretch(pairs, 1, Stretch::new((from, 0), (to, 0), len));
        }
        let Some(batch) = self.batches.get_mut(self.making) else { return Ok(()) };
        let _entered = self.context.enter()?;
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: both places are there until the batch has ended, and this copy is before its end on the stream.
        ok("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, size, self.stream) })?;
        batch.by_driver += 1;
        batch.bytes = batch.bytes.saturating_add(len);
        Ok(())
    }

    /// Adds pairs of ids, `count` at most, to the batch's table. Returns where they begin there.
    fn add_pairs(&mut self, count: usize, pairs: impl IntoIterator<Item = Pair>) -> Result<u32> {
        let (_, room) = self.room();
        let Some(batch) = self.batches.get_mut(self.making).filter(|_| count <= room) else {
            return Err(Error::new(ErrorKind::Exhausted, format!("{count} pairs of blocks do not fit the batch")));
        };
        // SAFETY: the table has room for `BATCH_PAIRS`, of which `room` are free, and what was under way from it has ended.
        let place = unsafe { batch.table.cast::<Pair>().add(batch.pairs) };
        for (number, pair) in pairs.into_iter().take(count).enumerate() {
            // SAFETY: one of those.
            unsafe { place.add(number).write(pair) };
        }
        let at = u32::try_from(batch.pairs).unwrap_or(u32::MAX);
        batch.pairs += count;
        Ok(at)
    }

    /// Adds a stretch for `count` pairs of the table, from `pairs` on.
    fn add_stretch(&mut self, pairs: u32, count: usize, stretch: Stretch) -> Result<()> {
        let (room, _) = self.room();
        let Some(batch) = self.batches.get_mut(self.making).filter(|_| room > 0) else {
            return Err(Error::new(ErrorKind::Exhausted, "a stretch does not fit the batch"));
        };
        let Some(items) =
            u32::try_from(count).ok().and_then(|n| batch.items.checked_add(stretch.parts.checked_mul(n)?))
        else {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{count} blocks of {} bytes in a batch", stretch.len),
            ));
        };
        batch.stretches.push(Stretch { first: batch.items, pairs, ..stretch });
        batch.items = items;
        batch.bytes = batch.bytes.saturating_add(stretch.len.saturating_mul(count as u64));
        Ok(())
    }

    /// Gives up the batch that is being made, which nothing was added to.
    pub fn discard(&mut self) {
        self.made += 1;
        if let Some(batch) = self.batches.get_mut(self.making).filter(|batch| !batch.launched && batch.by_driver == 0) {
            batch.clear();
        }
    }

    /// Hands the batch to the device. Batches end in this order. Returns whether any of it is under way, so that
    /// [`Copier::next_ended`] will tell its end, and what the driver says.
    pub fn launch(&mut self) -> (bool, Result<()>) {
        let making = self.making;
        self.made += 1;
        let Some(batch) = self.batches.get_mut(making).filter(|batch| !batch.launched) else { return (false, Ok(())) };
        let entered = match self.context.enter() {
            Ok(entered) => entered,
            Err(error) => {
                wait_for(self.stream);
                batch.clear();
                return (false, Err(error));
            }
        };
        let launched = if batch.items == 0 {
            Ok(())
        } else {
            let blocks = self.blocks.min(batch.items.div_ceil(WARPS));
            let (pairs, stretches) = (batch.pairs * size_of::<Pair>(), batch.stretches.len() * size_of::<Stretch>());
            // SAFETY: the table has room for all pairs and, behind those, all stretches, and nothing is under way from it.
            unsafe {
                ptr::copy_nonoverlapping(batch.stretches.as_ptr().cast::<u8>(), batch.table.add(pairs), stretches);
            }
            let mut pairs_at = batch.on_device;
            let mut stretches_at = batch.on_device + pairs as u64;
            let (mut count, mut items) = (u32::try_from(batch.stretches.len()).unwrap_or(0), batch.items);
            let mut parameters: [*mut c_void; 4] = [
                (&raw mut pairs_at).cast(),
                (&raw mut stretches_at).cast(),
                (&raw mut count).cast(),
                (&raw mut items).cast(),
            ];
            // SAFETY: the table is as long on the device, where the last batch that used it has ended, and stays as it is here
            // until this one has.
            ok("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(batch.on_device, batch.table.cast(), pairs + stretches, self.stream)
            })
            // SAFETY: the kernel takes two addresses and two 32-bit numbers, which are copied before the call returns. It
            // reads the table, which is on the device until the batch has ended, and copies what that says, of which whoever
            // added it was promised that it may.
            .and_then(|()| {
                ok("cuLaunchKernel", unsafe {
                    sys::cuLaunchKernel(
                        self.kernel,
                        blocks,
                        1,
                        1,
                        THREADS,
                        1,
                        1,
                        0,
                        self.stream,
                        parameters.as_mut_ptr(),
                        ptr::null_mut(),
                    )
                })
            })
        };
        // SAFETY: the event and the stream are of this context.
        let recorded = ok("cuEventRecord", unsafe { sys::cuEventRecord(batch.done, self.stream) });
        drop(entered);
        if let Err(error) = recorded {
            // An event that was not recorded says that all is done.
            wait_for(self.stream);
            batch.clear();
            return (false, launched.and(Err(error)));
        }
        batch.launched = true;
        self.making = (making + 1) % BATCHES;
        (true, launched)
    }

    /// Waits for all that is under way.
    pub(super) fn finish(&mut self) {
        let context = Arc::clone(&self.context);
        if !self.stream.is_null()
            && let Ok(_entered) = context.enter()
        {
            wait_for(self.stream);
        }
    }

    /// Whether the oldest batch that was launched has ended, and how; `None` while it has not, or there is none.
    pub fn next_ended(&mut self) -> Option<Result<()>> {
        let batch = self.batches.get_mut(self.oldest).filter(|batch| batch.launched)?;
        // SAFETY: an event of this process.
        let result = match unsafe { sys::cuEventQuery(batch.done) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => return None,
            other => ok("copying device memory", other),
        };
        if result.is_err() {
            wait_for(self.stream);
        }
        batch.clear();
        self.oldest = (self.oldest + 1) % BATCHES;
        Some(result)
    }
}

/// Two regions, see [`Copier::between`].
pub struct Between<'a> {
    copier: &'a mut Copier,
    way: Way,
    here: MemoryRange,
    there: Arc<Imported>,
    /// Whether the batch has the mapping.
    is_held: bool,
}

/// Pairs of block ids in a batch, for stretches of it.
#[derive(Debug, Clone, Copy)]
pub struct Pairs {
    /// The batch, by a number that no other has.
    batch: u64,
    at: u32,
    len: usize,
    /// The highest ids.
    here: u32,
    there: u32,
}

impl Between<'_> {
    /// How much of a piece of `len` bytes fits the batch if that is not to have more than `most` bytes.
    pub fn fits(&self, len: u64, most: u64) -> u64 {
        let len = len.min(most.saturating_sub(self.copier.bytes()));
        self.copier.fits(len)
    }

    /// Of how many blocks `len` bytes each fit the batch, likewise; `pairs` of them are in it already.
    pub fn fits_blocks(&self, len: u64, most: u64, pairs: Option<&Pairs>) -> usize {
        let by_bytes = most.saturating_sub(self.copier.bytes()).checked_div(len).unwrap_or(u64::MAX);
        let by_bytes = usize::try_from(by_bytes).unwrap_or(usize::MAX);
        match self.copier.room() {
            (0, _) => 0,
            (_, room) => by_bytes.min(pairs.map_or(room, |pairs| pairs.len)),
        }
    }

    /// Adds `len` bytes at offset `here` of the range and `there` of the region, no more than fits. The pieces of a batch are
    /// copied in any order.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] for bytes that leave either; what the driver says. What was added before is still to be
    /// launched, which says when nothing of it is under way any more.
    #[inline]
    pub fn push(&mut self, here: u64, there: u64, len: u64) -> Result<()> {
        let (from, to) = self.in_order(self.here.slice(here, len)?, self.there.slice(there, len)?);
        self.hold();
        // SAFETY: both places are there until the batch has ended: their owners promised that, the caller keeps the range
        // registered, and the batch holds the mapping.
        unsafe { self.copier.add(from, to, len) }
    }

    /// Adds pairs of block ids to the batch, no more than fit.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] for more than fit.
    pub fn pairs(&mut self, here: &[u32], there: &[u32]) -> Result<Pairs> {
        let len = here.len().min(there.len());
        let highest = |ids: &[u32]| ids.iter().max().copied().unwrap_or(0);
        let (from, to) = self.in_order(here, there);
        let both = from.iter().zip(to).map(|(&from, &to)| Pair { from, to });
        let at = self.copier.add_pairs(len, both)?;
        let batch = self.copier.number();
        Ok(Pairs { batch, at, len, here: highest(here), there: highest(there) })
    }

    /// Adds blocks of `len` bytes: the first `count` of `pairs`. A block is at an offset and so many times a stride as its id
    /// says, in the range as in the region.
    ///
    /// # Errors
    /// As [`Between::push`]; [`ErrorKind::InvalidArgument`] for pairs of another batch.
    pub fn push_blocks(
        &mut self,
        (pairs, count): (&Pairs, usize),
        here: (u64, u64),
        there: (u64, u64),
        len: u64,
    ) -> Result<()> {
        if pairs.batch != self.copier.number() || count > pairs.len {
            return Err(Error::invalid("pairs of blocks that are not in this batch"));
        }
        let last = |(offset, stride): (u64, u64), id: u32| {
            stride.checked_mul(id.into()).and_then(|at| at.checked_add(offset)).unwrap_or(u64::MAX)
        };
        // Where the blocks with the highest ids lie within both, so do the others.
        self.here.slice(last(here, pairs.here), len)?;
        self.there.slice(last(there, pairs.there), len)?;
        let (ours, theirs) = ((self.here.slice(here.0, 0)?, here.1), (self.there.slice(there.0, 0)?, there.1));
        let (from, to) = self.in_order(ours, theirs);
        self.hold();
        // As in `push`.
        self.copier.add_stretch(pairs.at, count, Stretch::new(from, to, len))
    }

    /// What is of this side and what is of the other, as source and destination.
    fn in_order<T>(&self, here: T, there: T) -> (T, T) {
        match self.way {
            Way::Read => (there, here),
            Way::Write => (here, there),
        }
    }

    /// Has the batch keep the mapping.
    fn hold(&mut self) {
        if !self.is_held {
            self.copier.hold(&self.there);
            self.is_held = true;
        }
    }
}

impl Stretch {
    /// Blocks of `len` bytes, at addresses and so many times strides as their ids say.
    fn new((from, from_stride): (u64, u64), (to, to_stride): (u64, u64), len: u64) -> Stretch {
        let parts = u32::try_from(len.div_ceil(ITEM_BYTES)).unwrap_or(u32::MAX);
        Stretch { from, to, from_stride, to_stride, len, first: 0, parts, pairs: 0, unused: 0 }
    }
}

impl Batch {
    /// In the current context.
    fn new() -> Result<Batch> {
        let mut done = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: writes one handle.
        ok("cuEventCreate", unsafe { sys::cuEventCreate(&mut done, flags) })?;
        let mut batch = Batch {
            table: ptr::null_mut(),
            on_device: 0,
            stretches: Vec::with_capacity(BATCH_STRETCHES),
            pairs: 0,
            items: 0,
            by_driver: 0,
            bytes: 0,
            done,
            launched: false,
            holds: Vec::new(),
        };
        let mut table = ptr::null_mut();
        // SAFETY: writes one address.
        ok("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut table, TABLE_BYTES, sys::CU_MEMHOSTALLOC_PORTABLE) })?;
        batch.table = table.cast();
        // SAFETY: writes one address.
        ok("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut batch.on_device, TABLE_BYTES) })?;
        Ok(batch)
    }

    fn clear(&mut self) {
        (self.pairs, self.items, self.by_driver, self.bytes, self.launched) = (0, 0, 0, 0, false);
        self.stretches.clear();
        self.holds.clear();
    }
}

/// Waits for all that a stream has to do; where the driver cannot even do that, nothing is done any more.
fn wait_for(stream: sys::CUstream) {
    // SAFETY: a stream of this process.
    if let Err(error) = ok("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) }) {
        log::error!("waiting for copies of device memory: {error}");
    }
}

impl Drop for Batch {
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

impl Drop for Copier {
    /// Waits for what is under way.
    fn drop(&mut self) {
        self.finish();
        let context = Arc::clone(&self.context);
        let Ok(_entered) = context.enter() else { return };
        // SAFETY: handles of this context, each made at most once by `new` and destroyed once.
        unsafe {
            self.batches.clear();
            if !self.module.is_null() {
                let _ = sys::cuModuleUnload(self.module);
            }
            if !self.stream.is_null() {
                let _ = sys::cuStreamDestroy_v2(self.stream);
            }
        }
    }
}
