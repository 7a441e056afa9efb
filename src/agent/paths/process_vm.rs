//! Host memory of a process on the same host: copied by the kernel, many pieces a system call.
//!
//! UCX's CMA makes the same system call with one piece each.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::copy_pool::{CopyPool, Job};
use super::{Path, Profile, Turn};
use crate::agent::core::event::Direction;
use crate::agent::core::regions::Regions;
use crate::agent::peers::Peer;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::plan::CopyPlan;
use crate::proto::wire::MemoryKind;
use crate::sys::process::Batch;

/// The most that one call copies: some 50 us of work, so that others and new commands wait for little, and enough that the call
/// itself does not count.
const QUANTUM_BYTES: u64 = 512 << 10;
const QUANTUM_PIECES: usize = 128;

/// How long a transfer goes on before copy threads help: so that short ones wake nobody, and the engine's thread, which
/// has just started the transfer, is not driven from its processor meanwhile.
const HELP_AFTER: Duration = Duration::from_micros(200);

/// The path's name while the peer has yet to prove which process it is.
pub(super) const UNPROVED: &str = "copied (process_vm_readv) as soon as the peer has proved which process it is";

pub(super) struct ProcessVm;

impl Path for ProcessVm {
    fn name(&self) -> &'static str {
        "copied (process_vm_readv)"
    }

    fn carries(&self, peer: &Peer, profile: Profile) -> bool {
        profile.are_hosts() && peer.locality.neighbour.is_some() && !profile.gathered && !profile.digest
    }

    /// Hands a batch to a copy thread if a copy of it may have to wait for anybody, or the transfer takes long and
    /// there is more of it; else copies it.
    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64> {
        let Some(neighbour) = turn.peer.locality.neighbour.as_ref().map(Arc::clone) else {
            return Err(Error::new(ErrorKind::Internal, "memory of another host cannot be copied"));
        };
        let is_apart = !profile.is_filled_by_kernel || turn.copy_pool.is_held(&neighbour);
        if is_apart && !turn.copy_pool.can_copy(&neighbour)? {
            return Ok(0);
        }
        let mut batch = turn.copy_pool.batch();
        while let Some(operation) = turn.next_of(profile) {
            let range = turn.regions.range(operation.local_region);
            let (Some(range), Some(base)) = (range, turn.peer.base(operation.remote_region)) else {
                return Err(Error::not_found("a region of the plan is gone"));
            };
            let room = QUANTUM_BYTES.saturating_sub(batch.bytes() as u64);
            if room == 0 || batch.len() >= QUANTUM_PIECES {
                break;
            }
            let Some(part) = turn.transfer.take(room) else { break };
            batch.push(range, part.local_offset, base.saturating_add(part.remote_offset), part.len)?;
        }
        let now = Instant::now();
        turn.transfer.begin(batch.len() as u64, now);
        turn.stats.operations += batch.len() as u64;
        let bytes = batch.bytes() as u64;
        let helped = turn.transfer.next().is_some() && turn.transfer.age(now) >= HELP_AFTER;
        // A copy that may hang for ever takes no room in the windows of others; copy threads take little of it at a time.
        if is_apart {
            turn.transfer.enter_flight();
        } else {
            turn.enter_flight(bytes, now);
        }
        let job = Job {
            transfer: turn.id,
            peer: turn.peer.id,
            neighbour,
            direction: turn.transfer.direction(),
            batch,
            is_apart,
        };
        if is_apart || helped && turn.copy_pool.can_help() {
            turn.copy_pool.submit(job);
        } else {
            turn.copy_pool.finish(job.run(), Some(&turn.peer.name), turn.effects);
        }
        Ok(bytes)
    }
}

/// Copies all that a light transfer moves, by one call. `None` if that cannot be done here and now, or failed: then the
/// transfer has to begin as any other, and says why if it is its own fault.
///
/// It is for callers that wait for one small copy, of which noting a transfer, its turn and its operations would be the
/// greater part.
pub(crate) fn copy_at_once(
    (direction, plan): (Direction, &CopyPlan),
    peer: &Peer,
    regions: &Regions,
    copy_pool: &mut CopyPool,
) -> Option<()> {
    let neighbour = peer.locality.neighbour.as_ref().filter(|neighbour| !copy_pool.is_held(neighbour))?;
    plan.check(|region| regions.live_len(region), |region| peer.len_of(region)).ok()?;
    let mut batch = copy_pool.batch();
    let pushed = push_all(plan, peer, regions, &mut batch);
    let copied = pushed.and_then(|()| neighbour.copy(direction, &mut batch).ok());
    copy_pool.give_back(batch);
    copied
}

fn push_all(plan: &CopyPlan, peer: &Peer, regions: &Regions, batch: &mut Batch) -> Option<()> {
    for segment in plan.segments.iter() {
        let range = regions.live_range(segment.local_region).ok()?;
        let base = peer.base(segment.remote_region)?;
        let are_hosts = range.kind() == MemoryKind::Host && peer.kind(segment.remote_region) == Some(MemoryKind::Host);
        if !(are_hosts && peer.is_filled_by_kernel(segment.remote_region)) {
            return None;
        }
        let pair = plan.lists.get(segment.list as usize)?;
        for (local, remote) in pair.local.ids().iter().zip(pair.remote.ids()) {
            // None of it overflows in a plan that was checked.
            let at = |id: u32, stride: u64, offset: u64| stride.checked_mul(id.into())?.checked_add(offset);
            let here = at(*local, segment.local_stride, segment.local_offset)?;
            let there = at(*remote, segment.remote_stride, segment.remote_offset)?.checked_add(base)?;
            batch.push(range, here, there, segment.len).ok()?;
        }
    }
    Some(())
}
