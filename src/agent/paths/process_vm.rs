//! Host memory of a process on the same host: copied by the kernel, many pieces a system call.
//!
//! UCX's CMA makes the same system call with one piece each, as NIXL's figures in docs/benchmarks.md show beside these.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::copy_pool::Job;
use super::{Path, Profile};
use crate::agent::core::event::Direction;
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::stats::AgentStats;
use crate::agent::engine::Engine;
use crate::agent::peers::Peer;
use crate::agent::thread::affinity;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::process::Way;
use crate::proto::wire::MemoryKind;

/// What one call copies: some 50 us of work, so that others and new commands wait for little, and enough that the call
/// itself does not count.
const QUANTUM_BYTES: u64 = 512 << 10;
const QUANTUM_PIECES: usize = 128;

/// How long a transfer goes on before copy threads help: so that short ones wake nobody, and the engine's thread, which has just
/// started the transfer, is not driven from its processor meanwhile.
const HELP_AFTER: Duration = Duration::from_micros(200);

pub(crate) struct ProcessVm;

impl Path for ProcessVm {
    fn name(&self) -> &'static str {
        "copied (process_vm_readv)"
    }

    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64 {
        &mut stats.copied_bytes
    }

    fn carries(&self, peer: &Peer, profile: Profile) -> bool {
        let hosts = (profile.local, profile.remote) == (MemoryKind::Host, MemoryKind::Host);
        hosts && peer.neighbour.is_some() && !profile.gathered && !profile.digest
    }

    /// Hands a batch to a copy thread if a copy of it may have to wait for anybody, or the transfer takes long and there is more of it;
    /// else copies it.
    fn post(&self, engine: &mut Engine, peer_id: PeerId, id: TransferId, profile: Profile) -> Result<u64> {
        let Some(transfer) = engine.transfers.get_mut(id) else { return Ok(0) };
        let peer = engine.peers.get(peer_id)?;
        let Some(neighbour) = peer.neighbour.as_ref().map(Arc::clone) else {
            return Err(Error::new(ErrorKind::Internal, "memory of another host cannot be copied"));
        };
        let alone = profile.is_filled_by_kernel;
        if engine.copy_pool.is_stuck(&neighbour) || !(alone || engine.copy_pool.can_copy()?) {
            return Ok(0);
        }
        let mut batch = engine.copy_pool.batch();
        while let Some(operation) = transfer.next() {
            let range = engine.regions.range(operation.local_region);
            let (Some(range), Some((base, _))) = (range, peer.region(operation.remote_region)) else {
                return Err(Error::not_found("a region of the plan is gone"));
            };
            let goes_on = Profile::of(&engine.regions, peer, transfer) == Some(profile);
            let room = QUANTUM_BYTES.saturating_sub(batch.bytes() as u64);
            if !goes_on || room == 0 || batch.len() >= QUANTUM_PIECES {
                break;
            }
            let Some(part) = transfer.take(room) else { break };
            batch.push(range, part.local_offset, base.saturating_add(part.remote_offset), part.len)?;
        }
        let now = Instant::now();
        transfer.begin(batch.len() as u64, now);
        engine.stats.operations += batch.len() as u64;
        let bytes = batch.bytes() as u64;
        let way = match transfer.direction() {
            Direction::Read => Way::Read,
            Direction::Write => Way::Write,
        };
        let helped = transfer.next().is_some() && transfer.age(now) >= HELP_AFTER;
        transfer.in_flight += 1;
        // What may be stuck for ever takes no room in the windows of others; copy threads take little of it at a time.
        if alone {
            engine.entered_flight(peer_id, bytes);
        }
        let progress_processor = affinity::processor();
        let job =
            Job { transfer: id, peer: peer_id, neighbour, way, batch, is_filled_by_kernel: alone, progress_processor };
        if !alone || helped && engine.copy_pool.can_help() {
            engine.copy_pool.submit(job);
        } else {
            engine.copied_batch(job.run(), Instant::now());
        }
        Ok(bytes)
    }
}
