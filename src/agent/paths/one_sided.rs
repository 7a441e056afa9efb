//! UCX's GET and PUT, where the connection has a lane that moves such memory without the peer's processor (RDMA, CUDA
//! IPC): merged operations, posted in a window.

use std::time::Instant;

use super::{Path, Profile};
use crate::agent::core::event::Direction;
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::in_flight::InFlight;
use crate::agent::core::stats::AgentStats;
use crate::agent::engine::Engine;
use crate::agent::peers::Peer;
use crate::error::{Error, Result};
use crate::mem::ucx_error;
use crate::proto::wire::MemoryKind;
use crate::ucx::Posted;

/// What one transfer may post before the next one of the same peer gets its turn.
const QUANTUM_OPERATIONS: u32 = 8;
const QUANTUM_BYTES: u64 = 1 << 20;

pub(crate) struct OneSided;

impl Path for OneSided {
    fn name(&self) -> &'static str {
        "one-sided (UCX)"
    }

    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64 {
        &mut stats.one_sided_bytes
    }

    fn carries(&self, peer: &Peer, profile: Profile) -> bool {
        // Device memory would have to be gathered by a copy per run as well.
        let hosts = (profile.local, profile.remote) == (MemoryKind::Host, MemoryKind::Host);
        !(profile.digest || profile.gathered && hosts) && peer.is_direct(profile.remote, profile.local)
    }

    fn post(&self, engine: &mut Engine, peer_id: PeerId, id: TransferId, profile: Profile) -> Result<u64> {
        let (mut bytes, mut operations) = (0, 0);
        while operations < QUANTUM_OPERATIONS && bytes < QUANTUM_BYTES {
            let Some(transfer) = engine.transfers.get(id) else { break };
            let Some(operation) = transfer.next() else { break };
            let peer = engine.peers.get(peer_id)?;
            let goes_on = Profile::of(&engine.regions, peer, transfer) == Some(profile);
            if !goes_on || !engine.has_room(peer_id, operation.len) {
                break;
            }
            let (Some(memory), Some((base, rkey)), Ok(offset), Ok(len)) = (
                engine.regions.memory(operation.local_region),
                peer.region(operation.remote_region),
                usize::try_from(operation.local_offset),
                usize::try_from(operation.len),
            ) else {
                return Err(Error::not_found("a region of the plan is gone"));
            };
            let remote = base.saturating_add(operation.remote_offset);
            let direction = transfer.direction();
            let token = engine.operations.insert(InFlight::Copy { transfer: id, len: operation.len });
            let posted = match direction {
                Direction::Read => peer.endpoint.get(rkey, remote, memory, offset, len, token),
                Direction::Write => peer.endpoint.put(rkey, remote, memory, offset, len, token),
            };
            let posted = posted.map_err(|error| {
                engine.operations.remove(token);
                ucx_error(error)
            })?;
            if posted == Posted::Pending {
                engine.entered_flight(peer_id, operation.len);
            } else {
                engine.operations.remove(token);
            }
            let Some(transfer) = engine.transfers.get_mut(id) else { break };
            transfer.take(operation.len);
            transfer.begin(1, Instant::now());
            transfer.unflushed = direction == Direction::Write;
            match posted {
                Posted::Pending => transfer.in_flight += 1,
                Posted::Done => transfer.bytes += operation.len,
            }
            engine.stats.operations += 1;
            bytes += operation.len;
            operations += 1;
        }
        Ok(bytes)
    }
}
