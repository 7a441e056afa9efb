//! Copies from and to device memory, many pieces at a time: by a kernel that takes a table of them, on a stream of our own.
//!
//! The driver takes microseconds for each copy of its own, batched ones (`cuMemcpyBatchAsync`) too, in which a large device
//! copies several MiB. The kernel takes the first free processors (the stream has the highest priority), and no stream of the process
//! waits for it, nor it for them.

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
/// Pieces in one launch: few enough that the first launch of a transfer is under way while the next is being made.
pub const BATCH_PIECES: usize = 1024;
/// Batches under way at a time.
pub(super) const BATCHES: usize = 8;
/// A block of threads copies this much in four loads and stores a thread. Longer pieces are split, for all to have work.
const PIECE_BYTES: u64 = 16 << 10;
const THREADS: c_uint = 256;
/// As many as a processor has room for: 2,048 threads.
const BLOCKS_PER_PROCESSOR: u32 = 8;

/// An entry of the kernel's table.
#[repr(C)]
#[derive(Clone, Copy)]
struct Piece {
    from: u64,
    to: u64,
    len: u64,
}

/// What one launch copies.
struct Batch {
    /// [`BATCH_PIECES`] entries in pinned host memory, which the kernel reads.
    table: *mut Piece,
    /// Entries.
    len: usize,
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

    /// Bytes in the batch that is being made.
    pub fn bytes(&self) -> u64 {
        self.batches.get(self.making).filter(|batch| !batch.launched).map_or(0, |batch| batch.bytes)
    }

    /// Batches that are not under way.
    pub(super) fn free_batches(&self) -> usize {
        self.batches.iter().filter(|batch| !batch.launched).count()
    }

    /// How much of a piece of `len` bytes fits the batch. Nothing does while all batches are under way.
    pub fn fits(&self, len: u64) -> u64 {
        let taken = |batch: &Batch| batch.len + batch.by_driver;
        let room = self
            .batches
            .get(self.making)
            .filter(|batch| !batch.launched)
            .map_or(0, |b| BATCH_PIECES.saturating_sub(taken(b)));
        match room as u64 {
            0 => 0,
            _ if len >= self.long => len,
            room => len.min(room.saturating_mul(PIECE_BYTES)),
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
        let by_driver = len >= self.long;
        let Some(batch) = self.batches.get_mut(self.making) else { return Ok(()) };
        if by_driver {
            let _entered = self.context.enter()?;
            let size = usize::try_from(len).unwrap_or(usize::MAX);
            // SAFETY: both places are there until the batch has ended, and this copy is before its end on the stream.
            ok("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, size, self.stream) })?;
            batch.by_driver += 1;
        } else {
            let mut at = 0;
            while at < len {
                let part = (len - at).min(PIECE_BYTES);
                // SAFETY: the table has room for `BATCH_PIECES` entries, as many as `fits` has seen to, and the kernel that read it
                // last has ended.
                unsafe { batch.table.add(batch.len).write(Piece { from: from + at, to: to + at, len: part }) };
                batch.len += 1;
                at += part;
            }
        }
        batch.bytes = batch.bytes.saturating_add(len);
        Ok(())
    }

    /// Gives up the batch that is being made, which nothing was added to.
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
        let entered = match self.context.enter() {
            Ok(entered) => entered,
            Err(error) => {
                wait_for(self.stream);
                batch.clear();
                return (false, Err(error));
            }
        };
        let launched = if batch.len == 0 {
            Ok(())
        } else {
            let blocks = self.blocks.min(u32::try_from(batch.len).unwrap_or(u32::MAX));
            let (mut table, mut count) = (batch.table, u32::try_from(batch.len).unwrap_or(0));
            let mut parameters: [*mut c_void; 2] = [(&raw mut table).cast(), (&raw mut count).cast()];
            // SAFETY: the kernel takes an address and a 32-bit number, which are copied before the call returns. It reads
            // `count` entries of the table, which lives until the batch has ended, and copies what they say, of which `add`
            // was promised that it may.
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

impl Between<'_> {
    /// How much of a piece of `len` bytes fits the batch if that is not to have more than `most` bytes.
    pub fn fits(&self, len: u64, most: u64) -> u64 {
        self.copier.fits(len.min(most.saturating_sub(self.copier.bytes())))
    }

    /// Adds `len` bytes at offset `here` of the range and `there` of the region, no more than fits. The pieces of a batch are
    /// copied in any order.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] for bytes that leave either; what the driver says. What was added before is still to be
    /// launched, which says when nothing of it is under way any more.
    #[inline]
    pub fn push(&mut self, here: u64, there: u64, len: u64) -> Result<()> {
        let (here, there) = (self.here.slice(here, len)?, self.there.slice(there, len)?);
        let (from, to) = match self.way {
            Way::Read => (there, here),
            Way::Write => (here, there),
        };
        if !self.is_held {
            self.copier.hold(&self.there);
            self.is_held = true;
        }
        // SAFETY: both places are there until the batch has ended: their owners promised that, the caller keeps the range
        // registered, and the batch holds the mapping.
        unsafe { self.copier.add(from, to, len) }
    }
}

impl Batch {
    /// In the current context.
    fn new() -> Result<Batch> {
        let mut done = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: writes one handle.
        ok("cuEventCreate", unsafe { sys::cuEventCreate(&mut done, flags) })?;
        let mut batch =
            Batch { table: ptr::null_mut(), len: 0, by_driver: 0, bytes: 0, done, launched: false, holds: Vec::new() };
        let mut table = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address.
        ok("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut table, BATCH_PIECES * size_of::<Piece>(), flags) })?;
        batch.table = table.cast();
        Ok(batch)
    }

    fn clear(&mut self) {
        (self.len, self.by_driver, self.bytes, self.launched) = (0, 0, 0, false);
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
