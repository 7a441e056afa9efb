//! `kvf_plan_*`: what two engines will do, before they run.

use super::boundary::slice;
use super::buffer::{fill, kvf_buffer};
use super::decode;
use crate::error::Result;
use crate::planner::Deployment;

/// Works out which rank reads what from which rank for one request. Needs neither engines nor memory.
///
/// `deployment` is a msgpack map. Keys: model (map with groups: a list of maps with kind, as in
/// kvf_worker_set_geometry, layers (list of layer numbers) and parts (list of maps with name, heads, positions (1) and
/// bytes per head and token)), producer and consumer (maps with tp, pp, stages, dcp, dcp_interleave, block_size (list: one
/// number, or one per group), pages, layout ("token_major", "head_major", "whole" or a map turned: {element}), parts
/// ("packed", "in_block" or "regions"), layers_in_block, shared_groups, num_blocks, lead, gap; all have defaults), tokens,
/// cached_tokens (0), reuses_blocks (true), consecutive_blocks (false), max_operation_bytes (4 MiB).
///
/// `*out` is a msgpack map. producers and consumers: lists of maps with rank, layers and heads (lists of first and last),
/// tokens (per group, number and count among the ranks that share them), bytes, operations, peers (producer: how many
/// ranks it hears from). links: list of maps with consumer, producer, layers, heads, parts, bytes, segments, operations,
/// run_min, run_median, run_max (bytes per operation), gathered (bool: host memory is moved by messages of many runs) and
/// plan_bytes.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_plan_describe(deployment: *const u8, deployment_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_plan_describe, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let deployment = slice(deployment, deployment_len, "deployment")?;
            fill(out, || describe(deployment))
        }
    })
}

fn describe(deployment: &[u8]) -> Result<Vec<u8>> {
    let deployment: Deployment = decode::map("deployment", deployment)?;
    decode::encode("a description", &deployment.describe()?)
}
