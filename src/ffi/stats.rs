//! `kvf_stats_*`: counters of workers.

use super::boundary::slice;
use super::buffer::{fill, kvf_buffer};
use super::decode;
use crate::error::Result;
use crate::proto::stats::Stats;

/// Adds two maps of counters, such as the stats of a report. An empty map is the identity; the order does not matter.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_stats_merge(
    left: *const u8,
    left_len: usize,
    right: *const u8,
    right_len: usize,
    out: *mut kvf_buffer,
) -> i32 {
    boundary!(kvf_stats_merge, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let (left, right) = (slice(left, left_len, "left")?, slice(right, right_len, "right")?);
            fill(out, || merge(left, right))
        }
    })
}

fn merge(left: &[u8], right: &[u8]) -> Result<Vec<u8>> {
    let mut sum: Stats = decode::map("left", left)?;
    sum.merge(&decode::map("right", right)?);
    decode::encode("stats", &sum)
}
