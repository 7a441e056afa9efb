//! `kvf_worker_*`: the worker side of a KV connector.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::agent::memory_kind;
use super::boundary::{Out, slice, text};
use super::buffer::{fill, kvf_buffer};
use super::handle::{self, Object};
use super::{decode, log};
use crate::connector::{Worker, WorkerConfig};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::geometry::Geometry;
use crate::settings::{Component, parse_config};
use crate::sys::Outbox;

/// One rank's worker. Opaque.
pub struct kvf_worker {
    _opaque: (),
}

impl Object for Worker {
    type C = kvf_worker;
    const NOUN: &'static str = "worker";
}

/// Starts a worker: opens UCX and starts the thread that owns it.
///
/// `config` is a msgpack map with engine_id and the keys for a worker that kvf_settings_describe tells and
/// docs/configuration.md lists.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_start(config: *const u8, config_len: usize, out: *mut *mut kvf_worker) -> i32 {
    boundary!(kvf_worker_start, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (out, config) = unsafe { (Out::new(out, "out")?, slice(config, config_len, "config")?) };
        log::start();
        let config: WorkerConfig = parse_config(Component::Worker, config)?;
        out.write(handle::give(Worker::start(config)?));
        Ok(())
    })
}

/// Registers `len` bytes at `addr` as a KV-cache region. `*index` is its index in the geometry. `kind` is a
/// kvf_memory_kind, `device` the ordinal of the CUDA device (0 for host memory). Waits for the registration. All
/// regions come before kvf_worker_set_geometry.
///
/// The memory must stay allocated until kvf_worker_shutdown or kvf_worker_free has returned KVF_OK.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_register(
    worker: *mut kvf_worker,
    addr: *mut c_void,
    len: u64,
    kind: u32,
    device: u32,
    index: *mut u32,
) -> i32 {
    boundary!(kvf_worker_register, {
        // SAFETY: the caller's promise for out-parameters.
        let index = unsafe { Out::new(index, "index")? };
        let worker = handle::get::<Worker>(worker)?;
        // SAFETY: the caller promises that the memory stays allocated until the worker is shut down.
        let range = unsafe { MemoryRange::new(addr.addr() as u64, len, memory_kind(kind, device)?)? };
        index.write(worker.register(range)?);
        Ok(())
    })
}

/// States where the rank keeps which part of the cache, which completes its metadata. Once; again with the same
/// geometry does nothing.
///
/// `geometry` is a msgpack map; docs/protocol.md has what each key means. groups: list of maps with kind ("full", "latent",
/// "state", {"sliding_window": {"window": tokens}} or {"chunked": {"chunk": tokens}}) and block_size (tokens), and where
/// tokens are dealt over ranks (decode context parallelism) token_ranks (1), token_rank (0) and token_interleave (1). areas:
/// list of maps with layer, part (str), group (index), region (index), offset, num_blocks, block_stride, heads, first_head,
/// total_heads, head_stride, pages (1), page_stride (0), tokens, token_stride, units (1), unit_stride (0), content,
/// heads_by_rank (false: whether first_head and total_heads count the heads of each rank as different ones) and format (""
/// states none: what the bytes are, the same on both engines). offset, strides and content are in bytes.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_set_geometry(
    worker: *mut kvf_worker,
    geometry: *const u8,
    geometry_len: usize,
) -> i32 {
    boundary!(kvf_worker_set_geometry, {
        // SAFETY: the caller's promise for arrays.
        let bytes = unsafe { slice(geometry, geometry_len, "geometry")? };
        let worker = handle::get::<Worker>(worker)?;
        worker.set_geometry(decode::map::<Geometry>("the geometry", bytes)?)
    })
}

/// The rank's metadata, for the scheduler side. Its size grows with regions and layers, never with blocks.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_metadata(worker: *mut kvf_worker, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_worker_metadata, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || handle::get::<Worker>(worker)?.metadata()) }
    })
}

/// Hands the metadata to a listener that takes pushes. Waits up to `timeout_ms` milliseconds for it. `expected` is
/// the engine's number of ranks; `*missing` becomes how many the listener still lacks.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_push_metadata(
    worker: *mut kvf_worker,
    host: *const c_char,
    host_len: usize,
    port: u16,
    expected: u32,
    timeout_ms: u32,
    missing: *mut u32,
) -> i32 {
    boundary!(kvf_worker_push_metadata, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (missing, host) = unsafe { (Out::new(missing, "missing")?, text(host, host_len, "host")?) };
        let worker = handle::get::<Worker>(worker)?;
        missing.write(worker.push_metadata(host, port, expected, Duration::from_millis(timeout_ms.into()))?);
        Ok(())
    })
}

/// Hands over one step, as kvf_scheduler_step made it, and returns at once. A step that grants leases, the first one after
/// kvf_scheduler_finished returned params, must come when all that the finished requests write is in memory, on a GPU when
/// its kernels are over: consumers that await these requests read them then.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_submit(worker: *mut kvf_worker, step: *const u8, step_len: usize) -> i32 {
    boundary!(kvf_worker_submit, {
        // SAFETY: the caller's promise for arrays.
        let step = unsafe { slice(step, step_len, "step")? };
        handle::get::<Worker>(worker)?.submit(step.to_vec())
    })
}

/// The beginning of memory in which a worker leaves reports; the report is behind it. Read and write the flags atomically, the
/// one with acquire, the other with release ordering.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvf_outbox {
    /// 1 while a report waits here. Set it to 0 when you have read the report, and the next one will be left here.
    pub full: u8,
    /// Not 0 when there is a report elsewhere. It was too long for this memory, or came while it was full. Then
    /// kvf_worker_poll gives everything, with what waits here.
    pub more: u8,
    /// Not used.
    pub reserved: [u8; 6],
    /// The report's length in bytes.
    pub len: u64,
}

const _: () = assert!(size_of::<kvf_outbox>() == Outbox::HEAD && align_of::<kvf_outbox>() == Outbox::ALIGN);

/// Sets an outbox: reports go to `outbox`, `capacity` bytes with the struct itself. Polling then reads the caller's own
/// memory and needs no call, which costs least. While a thread reads there no other may, nor call kvf_worker_poll or
/// kvf_worker_wait, which take the report there. With a capacity of no more than the struct, `more` only tells of reports.
///
/// The memory is emptied, and must stay allocated until another call of this function has succeeded or kvf_worker_free has
/// returned. NULL, with a capacity of 0, ends it. What was not read in an earlier outbox waits for the next poll.
///
/// # Safety
/// As the header's top says; until then nothing else may write there, but for `full`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_set_outbox(
    worker: *mut kvf_worker,
    outbox: *mut kvf_outbox,
    capacity: usize,
) -> i32 {
    boundary!(kvf_worker_set_outbox, {
        let worker = handle::get::<Worker>(worker)?;
        if outbox.is_null() && capacity == 0 {
            worker.set_outbox(None);
            return Ok(());
        }
        // SAFETY: the caller's promise for this memory.
        worker.set_outbox(Some(unsafe { Outbox::new(outbox.cast(), capacity)? }));
        Ok(())
    })
}

/// Gives the events since the last poll, as an encoded report. An empty buffer without any. Never waits.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_poll(worker: *mut kvf_worker, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_worker_poll, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || encoded(handle::get::<Worker>(worker)?.poll_encoded())) }
    })
}

/// Like kvf_worker_poll, but waits up to `timeout_ms` milliseconds for something to happen. KVF_SHUT_DOWN when the worker has
/// ended and every report was taken.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_wait(worker: *mut kvf_worker, timeout_ms: u32, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_worker_wait, {
        let timeout = Duration::from_millis(timeout_ms.into());
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || wait(&*handle::get::<Worker>(worker)?, timeout)) }
    })
}

fn wait(worker: &Worker, timeout: Duration) -> Result<Vec<u8>> {
    match worker.wait_encoded(timeout) {
        None if worker.is_drained() => {
            Err(Error::new(ErrorKind::ShutDown, "the worker is shut down and every report was taken; stop waiting"))
        }
        report => encoded(report),
    }
}

fn encoded(report: Option<Result<Vec<u8>>>) -> Result<Vec<u8>> {
    report.unwrap_or_else(|| Ok(Vec::new()))
}

/// Figures since the start as a msgpack map: totals (as stats in reports), gauges, agent (as of kvf_agent_stats),
/// malformed_steps, malformed_messages. kvf_stats_metrics tells what each of totals and agent is.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_stats(worker: *mut kvf_worker, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_worker_stats, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || decode::encode("the worker's stats", &handle::get::<Worker>(worker)?.stats()?)) }
    })
}

/// Ends every request with a report, releases leases and frees UCX. Waits at most `timeout_ms` milliseconds. After
/// KVF_OK no memory is touched any more; the last reports can still be polled. A later call does nothing and returns
/// what the first one did. After KVF_TIMEOUT registered memory must stay allocated for ever.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_shutdown(worker: *mut kvf_worker, timeout_ms: u32) -> i32 {
    boundary!(kvf_worker_shutdown, {
        handle::get::<Worker>(worker)?.shutdown(Duration::from_millis(timeout_ms.into()))
    })
}

/// As kvf_worker_shutdown, for an engine that starts a new worker later. It tells the new one by kvf_scheduler_renew;
/// prefills that wait to be loaded stay with their producers, as long as the leases last. After KVF_TIMEOUT the
/// memory must stay as it is for ever.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_suspend(worker: *mut kvf_worker, timeout_ms: u32) -> i32 {
    boundary!(kvf_worker_suspend, { handle::get::<Worker>(worker)?.suspend(Duration::from_millis(timeout_ms.into())) })
}

/// Frees the worker, after a shutdown of at most 10 seconds if there was none. It returns the shutdown's status, whichever call
/// made it: unless that is KVF_OK, registered memory must stay allocated for ever. The handle is dead in any case.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_worker_free(worker: *mut kvf_worker) -> i32 {
    boundary!(kvf_worker_free, {
        let worker = handle::take::<Worker>(worker)?;
        let ended = worker.shutdown(super::FREE_TIMEOUT);
        worker.set_outbox(None);
        ended
    })
}
