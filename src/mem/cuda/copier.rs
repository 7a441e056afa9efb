//! Copies from and to device memory, many pieces at a time: by a kernel that takes a table of them, on a stream of our own.
//!
//! The driver takes microseconds for each copy of its own, batched ones (`cuMemcpyBatchAsync`) too, in which a large device
//! copies several MiB. The kernel takes the first free processors (the stream has the highest priority), and no stream of the process
//! waits for it, nor it for them.
//!
//! The table has block ids and what they count, not a piece each: the device works out where a block is, for
//! which this thread would take longer than the device for the copy. A first kernel brings it to the device, because warps that each read it from the
//! host's memory wait for that longer than for their 4 KiB; a copy of the driver's would wait for its copy engine, which
//! others may have for milliseconds.

use std::ffi::{CStr, c_uint};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::batch::{AddressPair, CopyBatch, CopyRun};
use super::ipc::Imported;
use super::{PrimaryContext, is_refusal, ok};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{Direction, MemoryRange};
use crate::proto::wire::MemoryKind;

/// The kernels, for the driver to compile. With a terminating zero.
const KERNEL: &str = concat!(include_str!("copy_pieces.ptx"), "\0");
/// Batches under way at a time.
pub(super) const BATCHES: usize = 8;
/// Half of what a processor has room for, which gives all of them enough to wait for.
const BLOCKS_PER_PROCESSOR: u32 = 4;

/// Copies on one device.
pub struct Copier {
    context: Arc<PrimaryContext>,
    stream: sys::CUstream,
    module: sys::CUmodule,
    fetch: sys::CUfunction,
    kernel: sys::CUfunction,
    blocks: u32,
    /// From which length on the driver copies a piece.
    long: u64,
    batches: Vec<CopyBatch>,
    /// The batch that is being made, and the oldest one under way; they go round.
    making: usize,
    oldest: usize,
}

// SAFETY: the driver's handles and the tables' addresses may be used by any thread, one at a time, which `&mut self` sees to.
unsafe impl Send for Copier {}

impl Copier {
    /// A copier for the device of `context`. Pieces of at least `long` bytes are left to the driver.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] when the driver has no room for it or does not take the kernel.
    pub fn new(context: Arc<PrimaryContext>, long: u64) -> Result<Copier> {
        let mut copier = Copier {
            context: Arc::clone(&context),
            stream: ptr::null_mut(),
            module: ptr::null_mut(),
            fetch: ptr::null_mut(),
            kernel: ptr::null_mut(),
            blocks: 1,
            long: long.max(1),
            batches: Vec::new(),
            making: 0,
            oldest: 0,
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
            let batch = CopyBatch::new()?;
            copier.batches.push(batch);
        }
        Ok(copier)
    }

    /// Loads the kernels into the current context.
    fn load(&mut self) -> Result<()> {
        // SAFETY: writes one handle; the image is a text that ends in a zero.
        ok("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut self.module, KERNEL.as_ptr().cast()) })?;
        self.fetch = function(self.module, c"kvferry_fetch_table")?;
        self.kernel = function(self.module, c"kvferry_copy_pieces")?;
        Ok(())
    }

    /// The context that it copies in.
    pub fn context(&self) -> &Arc<PrimaryContext> {
        &self.context
    }

    /// Bytes in the batch that is being made.
    pub fn bytes(&self) -> u64 {
        self.batches.get(self.making).filter(|batch| !batch.launched).map_or(0, |batch| batch.bytes)
    }

    /// Batches that are not under way.
    pub(super) fn free_batches(&self) -> usize {
        self.batches.iter().filter(|batch| !batch.launched).count()
    }

    /// The batch that is being made; none while all are under way.
    fn batch(&mut self) -> Result<&mut CopyBatch> {
        let batch = self.batches.get_mut(self.making).filter(|batch| !batch.launched);
        batch.ok_or_else(|| Error::new(ErrorKind::Exhausted, "all batches are under way"))
    }

    /// How many runs and pairs it has room for.
    fn room(&self) -> (usize, usize) {
        self.batches.get(self.making).filter(|batch| !batch.launched).map_or((0, 0), CopyBatch::room)
    }

    /// How much of a piece of `len` bytes fits the batch. Nothing does while all batches are under way.
    pub fn fits(&self, len: u64) -> u64 {
        match self.room() {
            (1.., 1..) => len,
            _ => 0,
        }
    }

    /// Adds pieces of a registered range of this device and of another agent's region to the batch.
    ///
    /// The owners of both promised ([`MemoryRange::new`]) that they are there and may be read and written while they are
    /// registered; the caller keeps the range registered until the batch has ended, and the batch keeps the mapping.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for memory that is not this device's.
    pub fn between(
        &mut self,
        direction: Direction,
        here: MemoryRange,
        there: &Arc<Imported>,
    ) -> Result<RegionCopier<'_>> {
        if here.kind() != (MemoryKind::Cuda { device: self.context.ordinal() }) {
            return Err(Error::invalid(format!("{here} is not of CUDA device {}", self.context.ordinal())));
        }
        Ok(RegionCopier { copier: self, direction, here, there: Arc::clone(there), is_held: false })
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
            let batch = self.batch()?;
            let pairs = batch.add_pairs(1, [AddressPair { from: 0, to: 0 }])?;
            // SAFETY: this function's contract; a run without strides is one place.
            return unsafe { batch.add_run(pairs, 1, CopyRun::new((from, 0), (to, 0), len)) };
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

    /// Drops the batch that is being made, unless the driver has begun any of it.
    pub fn discard(&mut self) {
        if let Some(batch) = self.batches.get_mut(self.making).filter(|batch| !batch.launched && batch.by_driver == 0) {
            batch.clear();
        }
    }

    /// Hands the batch to the device. Batches end in this order. Returns whether any of it is under way, so that
    /// [`Copier::next_ended`] will tell its end, and what the driver says.
    pub fn launch(&mut self) -> (bool, Result<()>) {
        let making = self.making;
        let Some(batch) = self.batches.get_mut(making).filter(|batch| !batch.launched) else { return (false, Ok(())) };
        let launched = self.context.enter().and_then(|_entered| {
            batch.copy(self.stream, (self.fetch, self.kernel), self.blocks)?;
            // SAFETY: the event and the stream are of this context.
            ok("cuEventRecord", unsafe { sys::cuEventRecord(batch.done, self.stream) })
        });
        batch.launched = true;
        // Some of it may be under way where the driver says no: the driver's own copies, or the kernel.
        batch.is_marked = launched.is_ok();
        self.making = (making + 1) % BATCHES;
        (true, launched)
    }

    /// Waits for all that is under way. Returns whether nothing is any more, which it is not where the driver refuses to wait.
    pub fn finish(&mut self) -> bool {
        self.stream.is_null() || is_over(self.stream)
    }

    /// The result of the oldest launched batch. `None` while it has not ended, or there is none.
    pub fn next_ended(&mut self) -> Option<Result<()>> {
        let batch = self.batches.get_mut(self.oldest).filter(|batch| batch.launched)?;
        let seen = if batch.is_marked {
            // SAFETY: an event of this process.
            unsafe { sys::cuEventQuery(batch.done) }
        } else {
            // An event that was not recorded says that all is done. SAFETY: a stream of this process.
            unsafe { sys::cuStreamQuery(self.stream) }
        };
        if seen == sys::CUresult::CUDA_ERROR_NOT_READY || is_refusal(seen) {
            return None;
        }
        let result = ok("copying device memory", seen);
        if result.is_err() && !is_over(self.stream) {
            return None;
        }
        batch.clear();
        self.oldest = (self.oldest + 1) % BATCHES;
        Some(result)
    }
}

/// A kernel of a module that was loaded into the current context.
fn function(module: sys::CUmodule, name: &CStr) -> Result<sys::CUfunction> {
    let mut function = ptr::null_mut();
    // SAFETY: writes one handle; the name ends in a zero.
    ok("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) })?;
    Ok(function)
}

/// Two regions, see [`Copier::between`].
pub struct RegionCopier<'a> {
    copier: &'a mut Copier,
    direction: Direction,
    here: MemoryRange,
    there: Arc<Imported>,
    /// True if the batch has the mapping.
    is_held: bool,
}

/// Pairs of block ids in a batch, for runs of it.
#[derive(Debug, Clone, Copy)]
pub struct PairTable {
    /// The batch, by a number that no other has.
    batch: u64,
    at: u32,
    len: usize,
    /// The highest ids.
    here: u32,
    there: u32,
}

impl RegionCopier<'_> {
    /// The bytes of a piece of `len` bytes that fit the batch, which has at most `most`.
    pub fn fits(&self, len: u64, most: u64) -> u64 {
        self.copier.fits(len.min(most.saturating_sub(self.copier.bytes())))
    }

    /// True if blocks of `len` bytes can be added as they are. Some are left to the driver.
    pub fn takes_blocks(&self, len: u64) -> bool {
        len < self.copier.long
    }

    /// The number of blocks of `len` bytes that fit the batch. `pairs` of them are in it already.
    pub fn fits_blocks(&self, len: u64, most: u64, pairs: Option<&PairTable>) -> usize {
        let by_bytes = most.saturating_sub(self.copier.bytes()).checked_div(len).unwrap_or(u64::MAX);
        let by_bytes = usize::try_from(by_bytes).unwrap_or(usize::MAX);
        match self.copier.room() {
            (0, _) => 0,
            (_, room) => by_bytes.min(pairs.map_or(room, |pairs| pairs.len)),
        }
    }

    /// Adds `len` bytes at offset `here` of the range and `there` of the region. No more than fits. The pieces of a
    /// batch are copied in any order.
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
    pub fn pairs(&mut self, here: &[u32], there: &[u32]) -> Result<PairTable> {
        let len = here.len().min(there.len());
        let highest = |ids: &[u32]| ids.iter().max().copied().unwrap_or(0);
        let (from, to) = self.in_order(here, there);
        let both = from.iter().zip(to).map(|(&from, &to)| AddressPair { from, to });
        let batch = self.copier.batch()?;
        let at = batch.add_pairs(len, both)?;
        Ok(PairTable { batch: batch.number, at, len, here: highest(here), there: highest(there) })
    }

    /// Adds blocks of `len` bytes: the first `count` of `pairs`. A block is at an offset and so many times a stride as its id
    /// says, in the range as in the region.
    ///
    /// # Errors
    /// As [`RegionCopier::push`]; [`ErrorKind::InvalidArgument`] for pairs of another batch.
    pub fn push_blocks(
        &mut self,
        (pairs, count): (&PairTable, usize),
        here: (u64, u64),
        there: (u64, u64),
        len: u64,
    ) -> Result<()> {
        if pairs.batch != self.copier.batch()?.number || count > pairs.len || !self.takes_blocks(len) {
            return Err(Error::invalid("blocks that are not in this batch, or that it does not take"));
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
        // SAFETY: as in `push`, for each of them.
        unsafe { self.copier.batch()?.add_run(pairs.at, count, CopyRun::new(from, to, len)) }
    }

    /// Orders a local and a remote thing as source and destination.
    fn in_order<T>(&self, here: T, there: T) -> (T, T) {
        match self.direction {
            Direction::Read => (there, here),
            Direction::Write => (here, there),
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

/// Waits for all that a stream has to do. `false` where the driver does not let it; any other error is of what the device did,
/// and of a context in which nothing is under way any more.
fn is_over(stream: sys::CUstream) -> bool {
    // SAFETY: a stream of this process.
    let waited = unsafe { sys::cuStreamSynchronize(stream) };
    if let Err(error) = ok("cuStreamSynchronize", waited) {
        log::error!("waiting for copies of device memory: {error}");
    }
    !is_refusal(waited)
}

impl Drop for Copier {
    /// Waits for what is under way. Where the driver does not let it, the tables and mappings stay for ever.
    fn drop(&mut self) {
        if !self.finish() {
            std::mem::forget(Arc::clone(&self.context));
            return self.batches.drain(..).for_each(std::mem::forget);
        }
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
