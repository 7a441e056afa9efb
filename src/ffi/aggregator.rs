//! `kvf_aggregator_*`: reports of all ranks to the outcome per request.

use std::ffi::c_char;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::boundary::{Out, slice, text};
use super::buffer::{fill, kvf_buffer};
use super::handle::{self, Object};
use super::{decode, log, report};
use crate::error::{Error, Result};
use crate::proto::aggregate::{Aggregator, Outcome, RequestSide};
use crate::proto::ids::{RankId, RequestId};
use crate::proto::stats::Stats;
use crate::proto::wire::{Blocks, RecvRecord};
use crate::settings::{Component, parse_config};

/// An aggregator. Opaque.
pub struct kvf_aggregator {
    _opaque: (),
}

struct AggregatorObject(Mutex<Aggregator>);

impl Object for AggregatorObject {
    type C = kvf_aggregator;
    const NOUN: &'static str = "aggregator";
}

/// Which of a request's two sides reports are about.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvf_side {
    /// The producer's blocks being read.
    KVF_SENDING = 0,
    /// The consumer's blocks being filled.
    KVF_RECVING = 1,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AggregatorOptions {
    pub(super) ranks: Vec<RankId>,
    pub(super) limit: Option<usize>,
}

/// [`Outcome`] with every field named, for hosts that read maps.
#[derive(Serialize)]
struct NamedOutcome {
    granted: Vec<RequestId>,
    finished_sending: Vec<RequestId>,
    finished_recving: Vec<RequestId>,
    failed_recving: Vec<NamedFailure>,
    records: Vec<NamedRecord>,
    stats: Stats,
}

#[derive(Serialize)]
struct NamedFailure {
    request: RequestId,
    cause: &'static str,
    message: String,
    invalid_blocks: Blocks,
}

#[derive(Serialize)]
struct NamedRecord {
    rank: RankId,
    record: RecvRecord,
}

impl From<Outcome> for NamedOutcome {
    fn from(outcome: Outcome) -> Self {
        NamedOutcome {
            granted: outcome.granted,
            finished_sending: outcome.finished_sending,
            finished_recving: outcome.finished_recving,
            failed_recving: outcome
                .failed_recving
                .into_iter()
                .map(|failed| NamedFailure {
                    request: failed.request,
                    // The lowest rank's cause stands for all; the text has every rank's.
                    cause: failed.causes.first().map_or("", |(_, cause, _)| cause.name()),
                    message: failed
                        .causes
                        .iter()
                        .map(|(rank, cause, text)| format!("rank {rank}: {cause}: {text}"))
                        .collect::<Vec<_>>()
                        .join("; "),
                    invalid_blocks: failed.invalid_blocks,
                })
                .collect(),
            records: outcome.records.into_iter().map(|(rank, record)| NamedRecord { rank, record }).collect(),
            stats: outcome.stats,
        }
    }
}

/// An outcome as the map that hosts read.
pub(super) fn encode(outcome: Outcome) -> Result<Vec<u8>> {
    decode::encode("an outcome", &NamedOutcome::from(outcome))
}

/// The direction that a kvf_side names.
pub(super) fn direction(side: u32) -> Result<RequestSide> {
    match side {
        s if s == kvf_side::KVF_SENDING as u32 => Ok(RequestSide::Send),
        s if s == kvf_side::KVF_RECVING as u32 => Ok(RequestSide::Recv),
        other => Err(Error::invalid(format!("side {other} is unknown; expected KVF_SENDING or KVF_RECVING"))),
    }
}

fn with<R>(aggregator: *mut kvf_aggregator, act: impl FnOnce(&mut Aggregator) -> Result<R>) -> Result<R> {
    let host = handle::get::<AggregatorObject>(aggregator)?;
    let mut aggregator = host.0.lock().unwrap_or_else(PoisonError::into_inner);
    act(&mut aggregator)
}

/// Starts an aggregator, for hosts with a scheduler side of their own. A kvf_scheduler has one inside. `config` is a
/// msgpack map. Keys: ranks (list of maps with pp and tp: every rank of the engine), limit (requests remembered).
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_aggregator_start(
    config: *const u8,
    config_len: usize,
    out: *mut *mut kvf_aggregator,
) -> i32 {
    boundary!(kvf_aggregator_start, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        let (out, config) = unsafe { (Out::new(out, "out")?, slice(config, config_len, "config")?) };
        let config: AggregatorOptions = parse_config(Component::Aggregator, config)?;
        log::start();
        let aggregator = match config.limit {
            Some(limit) => Aggregator::with_limit(config.ranks, limit)?,
            None => Aggregator::new(config.ranks)?,
        };
        out.write(handle::give(AggregatorObject(Mutex::new(aggregator))));
        Ok(())
    })
}

/// Takes in an encoded report (of kvf_worker_poll) or a batch (of kvf_report_merge). Any order will do, and a report
/// that comes again changes nothing.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_aggregator_add(
    aggregator: *mut kvf_aggregator,
    report: *const u8,
    report_len: usize,
) -> i32 {
    boundary!(kvf_aggregator_add, {
        // SAFETY: the caller's promise for arrays.
        let bytes = unsafe { slice(report, report_len, "report")? };
        with(aggregator, |aggregator| aggregator.add_batch(&report::batch(bytes)?))
    })
}

/// Makes `count` ranks, whichever, end `request` on `side` (a kvf_side), in place of all.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_aggregator_expect(
    aggregator: *mut kvf_aggregator,
    request: *const c_char,
    request_len: usize,
    side: u32,
    count: u32,
) -> i32 {
    boundary!(kvf_aggregator_expect, {
        // SAFETY: the caller's promise for arrays.
        let request = RequestId::new(unsafe { text(request, request_len, "request")? })?;
        let direction = direction(side)?;
        with(aggregator, |aggregator| aggregator.expect(&request, direction, count))
    })
}

/// Forgets a request, so that its id can be used again.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_aggregator_forget(
    aggregator: *mut kvf_aggregator,
    request: *const c_char,
    request_len: usize,
) -> i32 {
    boundary!(kvf_aggregator_forget, {
        // SAFETY: the caller's promise for arrays.
        let request = RequestId::new(unsafe { text(request, request_len, "request")? })?;
        with(aggregator, |aggregator| {
            aggregator.forget(&request);
            Ok(())
        })
    })
}

/// Gives the requests that ended since the last call. `*out` is the msgpack map that kvf_scheduler_report gives.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_aggregator_take(aggregator: *mut kvf_aggregator, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_aggregator_take, {
        // SAFETY: the caller's promise for out-parameters.
        unsafe { fill(out, || with(aggregator, |aggregator| encode(aggregator.poll().unwrap_or_default()))) }
    })
}

/// Frees the aggregator.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_aggregator_free(aggregator: *mut kvf_aggregator) -> i32 {
    boundary!(kvf_aggregator_free, { handle::take::<AggregatorObject>(aggregator).map(drop) })
}
