//! Device memory of a process on the same host, which this process maps: copied by the device, many pieces a launch.
//!
//! UCX's CUDA IPC makes a copy of the driver's for each piece.

use std::time::Instant;

use super::{Path, Profile, Turn};
use crate::agent::core::stats::AgentStats;
use crate::agent::peers::Peer;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::wire::MemoryKind;

/// What one launch copies at most: a fraction of a millisecond, after which another transfer has its turn.
const QUANTUM_BYTES: u64 = 64 << 20;

pub(super) struct DeviceCopy;

impl Path for DeviceCopy {
    fn name(&self) -> &'static str {
        "copied by the device (CUDA IPC)"
    }

    fn count(&self, bytes: u64, stats: &mut AgentStats) {
        stats.device_copied_bytes += bytes;
    }

    fn carries(&self, _peer: &Peer, profile: Profile) -> bool {
        profile.is_importable && !profile.digest
    }

    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64> {
        let MemoryKind::Cuda { device } = profile.local else {
            return Err(Error::new(ErrorKind::Internal, "host memory is not copied by a device"));
        };
        let mut operations = 0;
        let filled = fill(turn, profile, device, &mut operations);
        let (bytes, launched) = turn.device_copies.launch(device, turn.id);
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
    let way = turn.way();
    while let Some(first) = turn.next_of(profile) {
        let (local, remote) = (first.local_region, first.remote_region);
        let imported = match turn.device_copies.copier(device) {
            Ok(copier) => turn.peer.import(remote, copier.context()),
            Err(error) => Err(turn.peer.refuse_import(remote, error)),
        };
        // The next path's turn is now.
        let (Ok(there), Some(here)) = (imported, turn.regions.range(local)) else { break };
        let mut between = turn.device_copies.copier(device)?.between(way, *here, &there)?;
        let posted = *operations;
        while let Some(next) = turn.transfer.next()
            && (next.local_region, next.remote_region) == (local, remote)
        {
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
