//! Host memory of a process on the same host: copied by the kernel, many pieces a system call.
//!
//! UCX's CMA makes the same system call with one piece each, as NIXL's figures in docs/benchmarks.md show beside these.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::copiers::Job;
use super::super::event::Direction;
use super::super::ferry::Engine;
use super::super::ids::{PeerId, TransferId};
use super::super::peers::Peer;
use super::super::sidestep;
use super::super::stats::AgentStats;
use super::{Path, Stretch};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::process::Way;
use crate::proto::wire::MemoryKind;

/// What one call copies: some 50 us of work, so that others and new commands wait for little, and enough that the call
/// itself does not count.
const QUANTUM_BYTES: u64 = 512 << 10;
const QUANTUM_PIECES: usize = 128;

/// How long a transfer goes on before copiers help: so that short ones wake nobody, and the engine's thread, which has just
/// started the transfer, is not driven from its processor meanwhile.
const HELP_AFTER: Duration = Duration::from_micros(200);

pub(super) struct Copied;

impl Path for Copied {
    fn name(&self) -> &'static str {
        "copied (process_vm_readv)"
    }

    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64 {
        &mut stats.copied_bytes
    }

    fn carries(&self, peer: &Peer, stretch: Stretch) -> bool {
        let hosts = (stretch.local, stretch.remote) == (MemoryKind::Host, MemoryKind::Host);
        hosts && peer.neighbour.is_some() && !stretch.gathered && !stretch.digest
    }

    /// Hands a batch to a copier if a copy of it may have to wait for anybody, or the transfer takes long and there is more of it;
    /// else copies it.
    fn post(&self, engine: &mut Engine, peer_id: PeerId, id: TransferId, stretch: Stretch) -> Result<u64> {
        let Some(transfer) = engine.transfers.get_mut(id) else { return Ok(0) };
        let peer = engine.peers.get(peer_id)?;
        let Some(neighbour) = peer.neighbour.as_ref().map(Arc::clone) else {
            return Err(Error::new(ErrorKind::Internal, "memory of another host cannot be copied"));
        };
        let alone = stretch.is_filled_by_kernel;
        if engine.copiers.is_stuck(&neighbour) || !(alone || engine.copiers.can_copy()?) {
            return Ok(0);
        }
        let mut batch = engine.copiers.batch();
        while let Some(operation) = transfer.next() {
            let range = engine.registry.range(operation.local_region);
            let (Some(range), Some((base, _))) = (range, peer.region(operation.remote_region)) else {
                return Err(Error::not_found("a region of the plan is gone"));
            };
            let goes_on = Stretch::of(&engine.registry, peer, transfer) == Some(stretch);
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
        // What may be stuck for ever takes no room in the windows of others; copiers take little of it at a time.
        if alone {
            engine.entered_flight(peer_id, bytes);
        }
        let ferry_processor = sidestep::processor();
        let job =
            Job { transfer: id, peer: peer_id, neighbour, way, batch, is_filled_by_kernel: alone, ferry_processor };
        if !alone || helped && engine.copiers.can_help() {
            engine.copiers.submit(job);
        } else {
            engine.copied_batch(job.run(), Instant::now());
        }
        Ok(bytes)
    }
}
