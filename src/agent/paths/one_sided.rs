//! UCX's GET and PUT, where the connection has a lane that moves such memory without the peer's processor (RDMA, CUDA
//! IPC): merged operations, posted in a window.

use super::{Path, Profile, Turn};
use crate::agent::core::event::Direction;
use crate::agent::core::in_flight::InFlight;
use crate::agent::core::stats::AgentStats;
use crate::agent::peers::Peer;
use crate::error::{Error, Result};
use crate::mem::ucx_error;
use crate::ucx::Posted;

/// What one transfer may post before the next one of the same peer gets its turn.
const QUANTUM_OPERATIONS: u32 = 8;
const QUANTUM_BYTES: u64 = 1 << 20;

pub(super) struct OneSided;

impl Path for OneSided {
    fn name(&self) -> &'static str {
        "one-sided (UCX)"
    }

    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64 {
        &mut stats.one_sided_bytes
    }

    fn carries(&self, peer: &Peer, profile: Profile) -> bool {
        // Device memory would have to be gathered by a copy per run as well.
        let gathered = profile.gathered && profile.are_hosts();
        !(profile.digest || gathered) && peer.is_direct(profile.remote, profile.local)
    }

    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64> {
        let (mut bytes, mut operations) = (0, 0);
        while operations < QUANTUM_OPERATIONS && bytes < QUANTUM_BYTES {
            let next = turn.next_of(profile).filter(|operation| turn.has_room(operation.len));
            let Some(operation) = next else { break };
            let (Some(memory), Some((base, rkey)), Ok(offset), Ok(len)) = (
                turn.regions.memory(operation.local_region),
                turn.peer.region(operation.remote_region),
                usize::try_from(operation.local_offset),
                usize::try_from(operation.len),
            ) else {
                return Err(Error::not_found("a region of the plan is gone"));
            };
            let remote = base.saturating_add(operation.remote_offset);
            let direction = turn.transfer.direction();
            let token = turn.operations.insert(InFlight::Copy { transfer: turn.id, len: operation.len });
            let endpoint = &turn.peer.endpoint;
            let posted = match direction {
                Direction::Read => endpoint.get(rkey, remote, memory, offset, len, token),
                Direction::Write => endpoint.put(rkey, remote, memory, offset, len, token),
            };
            if !matches!(posted, Ok(Posted::Pending)) {
                turn.operations.remove(token);
            }
            match posted.map_err(ucx_error)? {
                Posted::Pending => turn.enter_flight(operation.len),
                Posted::Done => turn.transfer.add_bytes(operation.len),
            }
            turn.transfer.take(operation.len);
            turn.begin(1);
            if direction == Direction::Write {
                turn.transfer.needs_flush();
            }
            turn.stats.operations += 1;
            bytes += operation.len;
            operations += 1;
        }
        Ok(bytes)
    }
}
