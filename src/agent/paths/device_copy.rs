//! Device memory of a process on the same host, which this process maps: copied by the device, many pieces a launch.
//!
//! UCX's CUDA IPC makes a copy of the driver's for each piece.

use std::time::Instant;

use super::device_copies::StartedBatch;
use super::{Path, Profile, Turn};
use crate::agent::core::event::Direction;
use crate::agent::peers::Peer;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::batch::ITEM_BYTES;
use crate::mem::cuda::copier::PairTable;
use crate::proto::plan::Segment;
use crate::proto::wire::MemoryKind;

/// The most that one launch copies: a fraction of a millisecond, after which another transfer has its turn.
const QUANTUM_BYTES: u64 = 64 << 20;

pub(super) struct DeviceCopy;

impl Path for DeviceCopy {
    fn name(&self) -> &'static str {
        "copied by the device (CUDA IPC)"
    }

    fn carries(&self, _peer: &Peer, profile: Profile) -> bool {
        profile.is_importable && !profile.digest
    }

    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64> {
        let MemoryKind::Cuda { device } = profile.local else {
            return Err(Error::new(ErrorKind::Internal, "host memory is not copied by a device"));
        };
        if turn.device_copies.are_full(device) {
            return Ok(0);
        }
        // Its owner may have given this side up, which then cannot know of what it has deregistered since, and whose mappings keep
        // the memory from being missed.
        let owner = turn.peer.locality.neighbour.clone();
        if let Some(Err(error)) = owner.as_ref().map(|owner| owner.check_at_once()) {
            turn.effects.lose(turn.peer.id, error.clone());
            return Err(error);
        }
        let mut operations = 0;
        let filled = fill(turn, profile, device, &mut operations);
        // Or since then, while memory was opened. What the driver copies without the kernel has begun.
        if let Err(error) = &filled
            && error.kind() == ErrorKind::PeerDied
        {
            turn.effects.lose(turn.peer.id, error.clone());
            if turn.device_copies.discard(device) {
                return Err(error.clone());
            }
        }
        let read_from = owner.filter(|_| turn.transfer.direction() == Direction::Read);
        let batch = StartedBatch { transfer: turn.id, peer: turn.peer.id, read_from, bytes: 0 };
        let (bytes, launched) = turn.device_copies.launch(device, batch);
        if bytes > 0 {
            turn.transfer.begin(operations, Instant::now());
            turn.stats.operations += operations;
            // Batches are few, and take no room in the windows from what goes to other hosts.
            turn.transfer.enter_flight();
        }
        filled.and(launched)?;
        Ok(bytes)
    }
}

/// Adds operations to a device's batch until it is full.
fn fill(turn: &mut Turn<'_>, profile: Profile, device: u32, operations: &mut u64) -> Result<()> {
    let direction = turn.transfer.direction();
    // The pairs that were added last: of which list, from where on. Most segments share one list.
    let mut added: Option<(u32, usize, PairTable)> = None;
    while let Some(first) = turn.next_of(profile) {
        let (local, remote) = (first.local_region, first.remote_region);
        let imported = match turn.device_copies.importing(device) {
            Ok(means) => turn.peer.import(remote, means),
            Err(error) => Err(turn.peer.refuse_import((remote, device), error)),
        };
        if let Err(error) = &imported
            && error.kind() == ErrorKind::PeerDied
        {
            return Err(error.clone());
        }
        // The next path's turn is now.
        let (Ok(there), Some(here)) = (imported, turn.regions.range(local)) else { break };
        let mut between = turn.device_copies.copier(device)?.between(direction, *here, &there)?;
        let posted = *operations;
        while let Some(next) = turn.transfer.next()
            && (next.local_region, next.remote_region) == (local, remote)
        {
            // The device works out itself where blocks are, unless short ones merge to longer runs, or one is more than a launch.
            let are_taken = |segment: &Segment| {
                let merge = segment.is_dense() && segment.len < ITEM_BYTES && next.len > segment.len;
                between.takes_blocks(segment.len) && segment.len <= QUANTUM_BYTES && !merge
            };
            if let Some(blocks) = turn.transfer.blocks().filter(|blocks| are_taken(&blocks.segment)) {
                let segment = blocks.segment;
                let known = added.filter(|(list, start, _)| (*list, *start) == (segment.list, blocks.start));
                let room = between.fits_blocks(segment.len, QUANTUM_BYTES, known.as_ref().map(|(.., pairs)| pairs));
                let count = room.min(blocks.local.len());
                let (Some(here), Some(there)) = (blocks.local.get(..count), blocks.remote.get(..count)) else { break };
                if count == 0 {
                    break;
                }
                let pairs = match known {
                    Some((.., pairs)) => pairs,
                    None => between.pairs(here, there)?,
                };
                added = Some((segment.list, blocks.start, pairs));
                let here = (segment.local_offset, segment.local_stride);
                let there = (segment.remote_offset, segment.remote_stride);
                between.push_blocks((&pairs, count), here, there, segment.len)?;
                turn.transfer.take_blocks(count);
                *operations += count as u64;
                continue;
            }
            let room = between.fits(next.len, QUANTUM_BYTES);
            let Some(part) = turn.transfer.take(room).filter(|part| part.len > 0) else { break };
            between.push(part.local_offset, part.remote_offset, part.len)?;
            *operations += 1;
        }
        if *operations == posted {
            break;
        }
    }
    Ok(())
}
