//! `kvf_report_*`: worker reports as plain msgpack, and merged.

use super::boundary::slice;
use super::buffer::{fill, kvf_buffer};
use super::decode;
use crate::error::{ErrorKind, Result};
use crate::proto::wire::{Message, ReportBatch, WorkerReport};

/// A report or a batch of reports as a batch.
pub(super) fn batch(bytes: &[u8]) -> Result<ReportBatch> {
    match WorkerReport::from_bytes(bytes) {
        Ok(report) => Ok(report.into()),
        Err(error) if error.kind() == ErrorKind::Corrupt => ReportBatch::from_bytes(bytes).map_err(|_| error),
        Err(error) => Err(error),
    }
}

/// Decodes a report to a msgpack map. It has rank, granted, finished_sending, finished_recving, failed_recving,
/// records and stats. Block ids are binary, little-endian words of 32 bits.
///
/// granted: prefills with a transfer_id, by this engine's request ids, whose lease this rank has: their blocks are written, so
/// that consumers which await them may read. finished_sending: prefills whose blocks may be freed. finished_recving: loads
/// that are over; those that failed are in failed_recving too.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_report_decode(report: *const u8, report_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_report_decode, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let report = slice(report, report_len, "report")?;
            fill(out, || decode::encode("a report", &WorkerReport::from_bytes(report)?))
        }
    })
}

/// The inverse of kvf_report_decode: tests of hosts make reports up with it.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_report_encode(body: *const u8, body_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_report_encode, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let body = slice(body, body_len, "body")?;
            fill(out, || decode::map::<WorkerReport>("the report", body)?.to_bytes())
        }
    })
}

/// Combines two encoded reports or batches into one batch. It is for kvf_scheduler_report or kvf_aggregator_add.
/// Associative and commutative.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_report_merge(
    left: *const u8,
    left_len: usize,
    right: *const u8,
    right_len: usize,
    out: *mut kvf_buffer,
) -> i32 {
    boundary!(kvf_report_merge, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let (left, right) = (slice(left, left_len, "left")?, slice(right, right_len, "right")?);
            fill(out, || {
                let mut merged = batch(left)?;
                merged.merge(batch(right)?);
                merged.to_bytes()
            })
        }
    })
}
