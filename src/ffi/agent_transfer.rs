//! The transfers of `kvf_agent_*`.

use std::time::Duration;

use super::agent::{AgentObject, kvf_agent};
use super::boundary::{Out, slice};
use super::handle;
use super::lists::Offsets;
use crate::agent::{Direction, PeerId, TransferId};
use crate::error::{Error, Result};
use crate::proto::plan::{BlockPair, CopyPlan, Segment};

/// Which way a transfer moves bytes.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvf_direction {
    /// From the peer's regions into ours.
    KVF_READ = 0,
    /// From our regions into the peer's.
    KVF_WRITE = 1,
}

/// A run of bytes that repeats at every block of one pair of lists. Block `i` of list `list` moves `length` bytes
/// between `local_offset + local_ids[i] * local_stride` in the local region and `remote_offset + remote_ids[i] *
/// remote_stride` in the remote one. Offsets, strides and length are in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvf_segment {
    /// Which pair of block lists.
    pub list: u32,
    /// Local region, by its index.
    pub local_region: u32,
    /// Remote region, by its index.
    pub remote_region: u32,
    /// From the local region's first byte to that of block 0.
    pub local_offset: u64,
    /// From the remote region's first byte to that of block 0.
    pub remote_offset: u64,
    /// From a local block to the next.
    pub local_stride: u64,
    /// From a remote block to the next.
    pub remote_stride: u64,
    /// Moved per block.
    pub length: u64,
}

/// Starts a transfer and returns at once. `direction` is a kvf_direction. The block ids of all `lists` pairs of lists
/// lie one list after the other in `local_ids` and in `remote_ids`; list `i` is the entries from `list_offsets[i]` to
/// before `list_offsets[i + 1]` of both, so that `list_offsets` has `lists + 1` entries. All arrays may be freed when
/// this returns. `user_data` means nothing to kvferry, and comes back in the transfer's event.
///
/// What is wrong with the blocks (an id out of range, an unknown region) is the status of the transfer's
/// KVF_EVENT_TRANSFER_DONE.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_transfer(
    agent: *mut kvf_agent,
    peer: u64,
    direction: u32,
    segments: *const kvf_segment,
    segments_len: usize,
    local_ids: *const u32,
    remote_ids: *const u32,
    list_offsets: *const u64,
    lists: usize,
    user_data: u64,
    transfer: *mut u64,
) -> i32 {
    boundary!(kvf_agent_transfer, {
        // SAFETY: the caller's promise for out-parameters.
        let transfer = unsafe { Out::new(transfer, "transfer")? };
        let object = handle::get::<AgentObject>(agent)?;
        let direction = direction_of(direction)?;
        // SAFETY: the caller's promise for arrays.
        let plan = unsafe { plan_of(segments, segments_len, local_ids, remote_ids, list_offsets, lists)? };
        transfer.write(object.agent.transfer(PeerId::from_raw(peer), direction, plan, user_data)?.raw());
        Ok(())
    })
}

/// As kvf_agent_transfer, and sends the peer a message once every byte was moved. It has at most 16 MiB; the library
/// sends it, whether or not this side polls. It arrives as KVF_EVENT_MESSAGE, in order with those of kvf_agent_send.
/// A transfer that fails sends none. KVF_EXHAUSTED while too many bytes to this peer are not sent yet.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_transfer_and_send(
    agent: *mut kvf_agent,
    peer: u64,
    direction: u32,
    segments: *const kvf_segment,
    segments_len: usize,
    local_ids: *const u32,
    remote_ids: *const u32,
    list_offsets: *const u64,
    lists: usize,
    message: *const u8,
    message_len: usize,
    user_data: u64,
    transfer: *mut u64,
) -> i32 {
    boundary!(kvf_agent_transfer_and_send, {
        // SAFETY: the caller's promise for out-parameters.
        let transfer = unsafe { Out::new(transfer, "transfer")? };
        let object = handle::get::<AgentObject>(agent)?;
        let direction = direction_of(direction)?;
        // SAFETY: the caller's promise for arrays.
        let (plan, message) = unsafe {
            let plan = plan_of(segments, segments_len, local_ids, remote_ids, list_offsets, lists)?;
            (plan, slice(message, message_len, "message")?.to_vec())
        };
        let peer = PeerId::from_raw(peer);
        transfer.write(object.agent.transfer_with(peer, direction, plan, message, user_data)?.raw());
        Ok(())
    })
}

fn direction_of(direction: u32) -> Result<Direction> {
    match direction {
        d if d == kvf_direction::KVF_READ as u32 => Ok(Direction::Read),
        d if d == kvf_direction::KVF_WRITE as u32 => Ok(Direction::Write),
        other => Err(Error::invalid(format!("direction {other} is unknown; expected KVF_READ or KVF_WRITE"))),
    }
}

/// # Safety
/// The arrays are as kvf_agent_transfer describes them.
unsafe fn plan_of(
    segments: *const kvf_segment,
    segments_len: usize,
    local_ids: *const u32,
    remote_ids: *const u32,
    list_offsets: *const u64,
    lists: usize,
) -> Result<CopyPlan> {
    // SAFETY: this function's contract.
    let (segments, local, remote) = unsafe {
        let offsets = Offsets::new(list_offsets, lists)?;
        let segments = slice(segments, segments_len, "segments")?;
        (segments, offsets.cut(local_ids, "local_ids")?, offsets.cut(remote_ids, "remote_ids")?)
    };
    Ok(CopyPlan {
        segments: segments.iter().map(segment).collect(),
        lists: local.into_iter().zip(remote).map(|(local, remote)| BlockPair { local, remote }).collect(),
    })
}

fn segment(from: &kvf_segment) -> Segment {
    Segment {
        list: from.list,
        local_region: from.local_region,
        remote_region: from.remote_region,
        local_offset: from.local_offset,
        remote_offset: from.remote_offset,
        local_stride: from.local_stride,
        remote_stride: from.remote_stride,
        len: from.length,
    }
}

/// Stops a transfer. Its KVF_EVENT_TRANSFER_DONE still follows, with KVF_CANCELLED unless it was complete.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_cancel(agent: *mut kvf_agent, transfer: u64) -> i32 {
    boundary!(kvf_agent_cancel, { handle::get::<AgentObject>(agent)?.agent.cancel(TransferId::from_raw(transfer)) })
}

/// Waits up to `timeout_ms` milliseconds until a transfer is over and touches no memory. Its KVF_EVENT_TRANSFER_DONE
/// is polled as always. Returns at once for a transfer that is over. KVF_TIMEOUT when it is not over in time: then
/// its memory must stay allocated. KVF_SHUT_DOWN when the agent has ended before it was over: then its memory must
/// stay allocated for ever. After kvf_agent_cancel this waits until the memory is safe.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_wait_transfer(agent: *mut kvf_agent, transfer: u64, timeout_ms: u32) -> i32 {
    boundary!(kvf_agent_wait_transfer, {
        let timeout = Duration::from_millis(timeout_ms.into());
        handle::get::<AgentObject>(agent)?.agent.wait_transfer(TransferId::from_raw(transfer), timeout)
    })
}
