//! `kvf_scheduler_*`: the scheduler side of a KV connector.

use std::ffi::c_char;

use super::boundary::{Out, slice, text};
use super::buffer::{self, fill, kvf_buffer};
use super::handle::{self, Object};
use super::lists::Offsets;
use super::{aggregator, decode, log, report};
use crate::connector::{Scheduler, SchedulerConfig};
use crate::error::{Error, Result};
use crate::proto::ids::RankId;
use crate::proto::scheduler::FinishOutcome;
use crate::proto::wire::{Blocks, TransferParams};
use crate::settings::{Component, parse_config};

/// One engine's scheduler side. Opaque.
pub struct kvf_scheduler {
    _opaque: (),
}

impl Object for Scheduler {
    type C = kvf_scheduler;
    const NOUN: &'static str = "scheduler";
}

/// How a request ended.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvf_outcome {
    /// By its length or a stop.
    KVF_COMPLETE = 0,
    /// In any other way.
    KVF_ABORTED = 1,
}

/// One rank's encoded metadata.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvf_rank_metadata {
    /// Pipeline-parallel rank.
    pub pp_rank: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// The bytes of kvf_worker_metadata.
    pub data: *const u8,
    /// How many.
    pub len: usize,
}

/// Starts a scheduler side. It touches no device memory and no UCX.
///
/// `config` is a msgpack map with engine_id, groups (list of maps with kind and block_size, as in
/// kvf_worker_set_geometry) and the keys for a scheduler that kvf_settings_describe tells and docs/configuration.md
/// lists.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_start(
    config: *const u8,
    config_len: usize,
    out: *mut *mut kvf_scheduler,
) -> i32 {
    boundary!(kvf_scheduler_start, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (out, config) = unsafe { (Out::new(out, "out")?, slice(config, config_len, "config")?) };
        let config: SchedulerConfig = parse_config(Component::Scheduler, config)?;
        log::start();
        out.write(handle::give(Scheduler::start(config)?));
        Ok(())
    })
}

/// Takes the metadata of the engine's ranks without serving it. An engine of several ranks that only receives needs
/// it before its first load.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_set_engine(
    scheduler: *mut kvf_scheduler,
    ranks: *const kvf_rank_metadata,
    ranks_len: usize,
) -> i32 {
    boundary!(kvf_scheduler_set_engine, {
        // SAFETY: the caller's promise for arrays.
        let ranks = unsafe { rank_list(ranks, ranks_len)? };
        handle::get::<Scheduler>(scheduler)?.set_engine(ranks)
    })
}

/// Takes the metadata of all ranks in place of what was given before. Their workers are new and hold the same parts of the
/// cache, as after a sleep in which its memory was freed. The next step tells the new workers of requests that wait to be
/// loaded; the old ones have reported what they had begun as over (kvf_worker_suspend). The engine has another incarnation
/// from then on.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_renew(
    scheduler: *mut kvf_scheduler,
    ranks: *const kvf_rank_metadata,
    ranks_len: usize,
) -> i32 {
    boundary!(kvf_scheduler_renew, {
        // SAFETY: the caller's promise for arrays.
        let ranks = unsafe { rank_list(ranks, ranks_len)? };
        handle::get::<Scheduler>(scheduler)?.renew(ranks)
    })
}

/// A list of ranks' metadata, copied.
///
/// # Safety
/// The array, and the data of each of its entries, must be valid for reads.
unsafe fn rank_list(ranks: *const kvf_rank_metadata, ranks_len: usize) -> Result<Vec<(RankId, Vec<u8>)>> {
    // SAFETY: this function's contract.
    let ranks = unsafe { slice(ranks, ranks_len, "ranks")? };
    ranks
        .iter()
        .map(|entry| {
            let rank = RankId { pp: entry.pp_rank, tp: entry.tp_rank };
            // SAFETY: this function's contract.
            let data = unsafe { slice(entry.data, entry.len, "a rank's data")? };
            Ok((rank, data.to_vec()))
        })
        .collect()
}

/// As kvf_scheduler_set_engine, and starts the handshake listener with the metadata. `*host` and `*port` are what other engines are
/// told. The port is bound when this returns.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_serve(
    scheduler: *mut kvf_scheduler,
    ranks: *const kvf_rank_metadata,
    ranks_len: usize,
    host: *mut kvf_buffer,
    port: *mut u16,
) -> i32 {
    boundary!(kvf_scheduler_serve, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (host, port, ranks) =
            unsafe { (Out::new(host, "host")?, Out::new(port, "port")?, rank_list(ranks, ranks_len)?) };
        let (name, number) = handle::get::<Scheduler>(scheduler)?.serve(ranks)?;
        buffer::give(host, name.into_bytes());
        port.write(number);
        Ok(())
    })
}

/// The request's id and params.
///
/// # Safety
/// Both arrays must be valid for reads for `'a`.
unsafe fn request<'a>(
    request: *const c_char,
    request_len: usize,
    params: *const u8,
    params_len: usize,
) -> Result<(&'a str, TransferParams)> {
    // SAFETY: this function's contract.
    let (id, params) = unsafe { (text(request, request_len, "request")?, slice(params, params_len, "params")?) };
    Ok((id, decode::map("kv_transfer_params", params).map_err(|e| e.context(format_args!("request {id:?}")))?))
}

/// Consumer: a request with a remote prefill has arrived. Connect early and keep its lease alive. `params` here and
/// below is the request's kv_transfer_params as a msgpack map; what is wrong with them affects this request only.
///
/// Several requests may load one prefill, each with the same params, as the samples of one prompt (n > 1) do. The lease is
/// released with the last of those that have arrived. Where others may arrive later, add the key shared (true) to the
/// params in every call: the lease is then kept for 5 s more.
///
/// With multi_turn, a producer's request whose params name a decode engine's blocks (do_remote_decode with remote_block_ids) is
/// loaded in the same way and handed over in its turn. The `prompt_tokens` of kvf_scheduler_matched and
/// kvf_scheduler_allocated are then those at its beginning that the blocks hold too, which the host has to know.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_arrived(
    scheduler: *mut kvf_scheduler,
    request_id: *const c_char,
    request_id_len: usize,
    params: *const u8,
    params_len: usize,
) -> i32 {
    boundary!(kvf_scheduler_arrived, {
        let scheduler = handle::get::<Scheduler>(scheduler)?;
        // SAFETY: the caller's promise for arrays.
        let (id, params) = unsafe { request(request_id, request_id_len, params, params_len)? };
        scheduler.arrived(id, &params)
    })
}

/// How many tokens beyond `computed_tokens` can be loaded, and whether between steps (`*asynchronous` 1). Has no side
/// effects.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_matched(
    scheduler: *mut kvf_scheduler,
    request_id: *const c_char,
    request_id_len: usize,
    params: *const u8,
    params_len: usize,
    prompt_tokens: u64,
    computed_tokens: u64,
    tokens: *mut u64,
    asynchronous: *mut u8,
) -> i32 {
    boundary!(kvf_scheduler_matched, {
        // SAFETY: the caller's promise for out-parameters.
        let (tokens, asynchronous) = unsafe { (Out::new(tokens, "tokens")?, Out::new(asynchronous, "asynchronous")?) };
        let scheduler = handle::get::<Scheduler>(scheduler)?;
        // SAFETY: the caller's promise for arrays.
        let (id, params) = unsafe { request(request_id, request_id_len, params, params_len)? };
        let matched = scheduler.matched(id, &params, prompt_tokens, computed_tokens)?;
        tokens.write(matched.tokens);
        asynchronous.write(matched.asynchronous.into());
        Ok(())
    })
}

/// The block lists of a call.
///
/// # Safety
/// `offsets` must be valid for reads of `lists + 1` entries, and `ids` of as many as the last offset says.
unsafe fn blocks(ids: *const u32, offsets: *const u64, lists: usize) -> Result<Vec<Blocks>> {
    // SAFETY: this function's contract.
    unsafe { Offsets::new(offsets, lists)?.cut(ids, "ids") }
}

/// Consumer: queues the load of the prompt's last `external_tokens` tokens into allocated blocks. 0 releases the
/// lease. `prompt_tokens` are all of the prompt's. A second call for the same request does nothing. The ids of all
/// `lists` lists, one per KV-cache group, lie one list after the other in `ids`; list `i` is the entries from
/// `list_offsets[i]` to before `list_offsets[i + 1]`.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_allocated(
    scheduler: *mut kvf_scheduler,
    request_id: *const c_char,
    request_id_len: usize,
    params: *const u8,
    params_len: usize,
    ids: *const u32,
    list_offsets: *const u64,
    lists: usize,
    prompt_tokens: u64,
    external_tokens: u64,
) -> i32 {
    boundary!(kvf_scheduler_allocated, {
        let scheduler = handle::get::<Scheduler>(scheduler)?;
        // SAFETY: the caller's promise for arrays.
        let ((id, params), blocks) =
            unsafe { (request(request_id, request_id_len, params, params_len)?, blocks(ids, list_offsets, lists)?) };
        scheduler.allocated(id, &params, blocks, prompt_tokens, external_tokens)
    })
}

/// Producer: tells if a consumer follows the prefill's progress, so that kvf_scheduler_progressed is worth calling.
/// `*followed` becomes 1 then; the consumer awaits the prefill as `name` (its transfer_id).
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_is_followed(
    scheduler: *mut kvf_scheduler,
    name: *const c_char,
    name_len: usize,
    followed: *mut u8,
) -> i32 {
    boundary!(kvf_scheduler_is_followed, {
        let scheduler = handle::get::<Scheduler>(scheduler)?;
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (followed, name) = unsafe { (Out::new(followed, "followed")?, text(name, name_len, "name")?) };
        followed.write(scheduler.is_followed(name).into());
        Ok(())
    })
}

/// Producer: announces that the first `tokens` tokens of a prefill under way are written. Consumers await it as
/// `name` (its transfer_id). All ranks have written the tokens into these blocks, which are passed as in
/// kvf_scheduler_allocated; those of groups with windows, chunks or states are ignored. Consumers read them from now
/// on, and rely on them if the lease is granted at the end (kvf_scheduler_finished). `tokens` 0: the blocks given
/// before are given away, as when the request is preempted; to be said before others are given.
///
/// To be called until kvf_scheduler_finished, and after it, while the blocks are kept, if what was written last is known only
/// then. Optional: without it, consumers read when the prefill is over. Of several requests with one name the first counts.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_progressed(
    scheduler: *mut kvf_scheduler,
    request_id: *const c_char,
    request_id_len: usize,
    name: *const c_char,
    name_len: usize,
    ids: *const u32,
    list_offsets: *const u64,
    lists: usize,
    tokens: u64,
) -> i32 {
    boundary!(kvf_scheduler_progressed, {
        let scheduler = handle::get::<Scheduler>(scheduler)?;
        // SAFETY: the caller's promise for arrays.
        let (id, name, blocks) = unsafe {
            (
                text(request_id, request_id_len, "request_id")?,
                text(name, name_len, "name")?,
                blocks(ids, list_offsets, lists)?,
            )
        };
        scheduler.progressed(id, name, &blocks, tokens)
    })
}

/// A request ended as `outcome` (a kvf_outcome) says. `*keep` is 1 when its blocks must stay until a report says that
/// its sending is over. `*answer` is the kv_transfer_params for the client as a msgpack map, empty when there are none.
/// Blocks are passed as in kvf_scheduler_allocated.
///
/// With multi_turn, a consumer's complete request may be kept too, and `*answer` is for the producer of the conversation's next
/// turn. Without num_blocks nothing is. A producer's request that ends before the reports of its own load were taken is handed
/// over to nobody: `*keep` is 1 for that load.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_finished(
    scheduler: *mut kvf_scheduler,
    request_id: *const c_char,
    request_id_len: usize,
    params: *const u8,
    params_len: usize,
    outcome: u32,
    ids: *const u32,
    list_offsets: *const u64,
    lists: usize,
    computed_tokens: u64,
    keep: *mut u8,
    answer: *mut kvf_buffer,
) -> i32 {
    boundary!(kvf_scheduler_finished, {
        // SAFETY: the caller's promise for out-parameters.
        let (keep, answer) = unsafe { (Out::new(keep, "keep")?, Out::new(answer, "answer")?) };
        let scheduler = handle::get::<Scheduler>(scheduler)?;
        let outcome = match outcome {
            o if o == kvf_outcome::KVF_COMPLETE as u32 => FinishOutcome::Complete,
            o if o == kvf_outcome::KVF_ABORTED as u32 => FinishOutcome::Aborted,
            other => {
                return Err(Error::invalid(format!(
                    "outcome {other} is unknown; expected KVF_COMPLETE or KVF_ABORTED"
                )));
            }
        };
        // SAFETY: the caller's promise for arrays.
        let ((id, params), blocks) =
            unsafe { (request(request_id, request_id_len, params, params_len)?, blocks(ids, list_offsets, lists)?) };
        let finish = scheduler.finished(id, &params, outcome, blocks, computed_tokens)?;
        let encoded = match finish.params {
            Some(params) => decode::encode("kv_transfer_params", &params)?,
            None => Vec::new(),
        };
        keep.write(finish.keep.into());
        buffer::give(answer, encoded);
        Ok(())
    })
}

/// Gives the new work for the workers, for kvf_worker_submit of every rank. Each piece of work is handed out once.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_step(scheduler: *mut kvf_scheduler, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_scheduler_step, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || handle::get::<Scheduler>(scheduler)?.step()) }
    })
}

/// Tells if the next step has work (`*pending` 1). An idle engine should make one then.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_has_pending(scheduler: *mut kvf_scheduler, pending: *mut u8) -> i32 {
    boundary!(kvf_scheduler_has_pending, {
        // SAFETY: the caller's promise for out-parameters.
        let pending = unsafe { Out::new(pending, "pending")? };
        pending.write(handle::get::<Scheduler>(scheduler)?.has_pending().into());
        Ok(())
    })
}

/// Takes in the encoded report of a rank (of kvf_worker_poll), or of several (of kvf_report_merge). Every rank's reports are
/// needed, each as it comes; their order does not matter. One that comes again ends nothing twice; one of a rank that the
/// engine has not (tp_size, pp_size) is KVF_INVALID_ARGUMENT.
///
/// `*outcome` becomes what is known with it, as a msgpack map; NULL where the host knows by itself. finished_sending (free
/// its blocks) and finished_recving (decode it): requests that every rank has ended, each once. failed_recving: those of
/// finished_recving that any rank failed (request, cause, message, invalid_blocks as little-endian words of 32 bits): the
/// cause is the lowest failed rank's, the message has every one's, the blocks are the union. granted: prefills with a
/// transfer_id whose lease every rank has; this call tells those that await them. records (rank, record) and stats: the
/// report's figures.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_report(
    scheduler: *mut kvf_scheduler,
    report: *const u8,
    report_len: usize,
    outcome: *mut kvf_buffer,
) -> i32 {
    boundary!(kvf_scheduler_report, {
        // SAFETY: the caller's promise for out-parameters.
        let out = if outcome.is_null() { None } else { Some(unsafe { Out::new(outcome, "outcome")? }) };
        // SAFETY: the caller's promise for arrays.
        let bytes = unsafe { slice(report, report_len, "report")? };
        let known = handle::get::<Scheduler>(scheduler)?.on_report(&report::batch(bytes)?)?;
        if let Some(out) = out {
            buffer::give(out, aggregator::encode(known)?);
        }
        Ok(())
    })
}

/// Ends a request on `side` (a kvf_side) for hosts that count over all ranks. Every rank is done with it. It is over
/// from now on, also where ranks' reports come later or never. One that is over already, or not known, is no error.
/// Its id must not be used again before the reports have come, which would count for the new request. A host that
/// goes by the outcomes of kvf_scheduler_report does not need this.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_over(
    scheduler: *mut kvf_scheduler,
    request_id: *const c_char,
    request_id_len: usize,
    side: u32,
) -> i32 {
    boundary!(kvf_scheduler_over, {
        let scheduler = handle::get::<Scheduler>(scheduler)?;
        // SAFETY: the caller's promise for arrays.
        let request = unsafe { text(request_id, request_id_len, "request")? };
        scheduler.over(request, aggregator::direction(side)?);
        Ok(())
    })
}

/// Evicts the `most` oldest conversations that are kept for their next turns (multi_turn). The host needs their
/// blocks, or their contents are no longer valid, as after an update of the weights. Their blocks may be used again
/// when reports say that their sending is over. `*count` becomes how many evicted ones, now or earlier, have blocks
/// that are not free yet.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_forget_histories(
    scheduler: *mut kvf_scheduler,
    most: u64,
    count: *mut u64,
) -> i32 {
    boundary!(kvf_scheduler_forget_histories, {
        let scheduler = handle::get::<Scheduler>(scheduler)?;
        // SAFETY: the caller's promise for out-parameters.
        let count = unsafe { Out::new(count, "count")? };
        count.write(scheduler.forget_histories(usize::try_from(most).unwrap_or(usize::MAX)) as u64);
        Ok(())
    })
}

/// Counters since the start and gauges as a msgpack map; kvf_stats_metrics tells what each is.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_stats(scheduler: *mut kvf_scheduler, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_scheduler_stats, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || decode::encode("the scheduler's stats", &handle::get::<Scheduler>(scheduler)?.stats())) }
    })
}

/// Stops the listener, frees its port and the handle.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_scheduler_free(scheduler: *mut kvf_scheduler) -> i32 {
    boundary!(kvf_scheduler_free, {
        handle::take::<Scheduler>(scheduler)?.shutdown();
        Ok(())
    })
}
