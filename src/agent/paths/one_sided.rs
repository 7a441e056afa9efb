//! UCX's GET and PUT, where the connection has a lane that moves such memory without the peer's processor (RDMA, CUDA
//! IPC): merged operations, posted in a window.

use std::time::Instant;

use super::{Path, Profile, Turn};
use crate::agent::core::event::Direction;
use crate::agent::core::in_flight::InFlight;
use crate::agent::core::stats::PathBytes;
use crate::agent::peers::Peer;
use crate::error::{Error, Result};
use crate::mem::ucx_error;
use crate::proto::wire::MemoryKind;
use crate::ucx::{Posted, Status, UcxError};

/// The most that one transfer posts before the next one of the same peer gets its turn.
const QUANTUM_OPERATIONS: u32 = 8;
const QUANTUM_BYTES: u64 = 1 << 20;

/// Whether UCX has ended an operation because it has no lane that would not need the peer's processor, having moved nothing.
/// It says cancelled, as of those of a connection that was closed; its older protocols say unsupported.
pub(crate) fn is_refusal(error: &UcxError) -> bool {
    matches!(error.status, Status::CANCELED | Status::UNSUPPORTED)
}

pub(super) const NAME: &str = "one-sided (UCX)";

pub(super) struct OneSided;

impl Path for OneSided {
    fn name(&self) -> &'static str {
        NAME
    }

    fn carries(&self, peer: &Peer, profile: Profile) -> bool {
        // Device memory would have to be gathered by a copy per run as well.
        let gathered = profile.gathered && profile.are_hosts();
        !(profile.digest || gathered || profile.is_refused) && peer.is_direct(profile.pair())
    }

    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64> {
        let (mut bytes, mut operations) = (0, 0);
        while operations < QUANTUM_OPERATIONS && bytes < QUANTUM_BYTES {
            let Some(operation) = turn.next_of(profile) else { break };
            if !turn.has_room(operation.len) {
                break;
            }
            let (Some(memory), Some(base), Some(rkey), Ok(offset), Ok(len)) = (
                turn.regions.memory(operation.local_region),
                turn.peer.base(operation.remote_region),
                turn.peer.rkey(operation.remote_region)?,
                usize::try_from(operation.local_offset),
                usize::try_from(operation.len),
            ) else {
                return Err(Error::not_found("a region of the plan is gone"));
            };
            let remote = base.saturating_add(operation.remote_offset);
            let direction = turn.transfer.direction();
            // Posting can be all of the copying, as over soft RoCE.
            let now = Instant::now();
            turn.transfer.begin(0, now);
            let token = turn.operations.insert(InFlight::Copy { transfer: turn.id, peer: turn.peer.id, operation });
            let endpoint = &turn.peer.connection.endpoint;
            let posted = match direction {
                Direction::Read => endpoint.get(&rkey, remote, memory, offset, len, token),
                Direction::Write => endpoint.put(&rkey, remote, memory, offset, len, token),
            };
            if !matches!(posted, Ok(Posted::Pending)) {
                turn.operations.remove(token);
            }
            if posted.as_ref().is_err_and(|error| is_refusal(error) || turn.peer.is_unreached(operation.remote_region))
            {
                turn.peer.refuse(profile.pair(), operation.remote_region);
                break;
            }
            match posted.map_err(ucx_error)? {
                Posted::Pending => turn.enter_flight(operation.len, now),
                Posted::Done => {
                    turn.transfer.add_bytes(operation.len);
                    turn.count(PathBytes { one_sided: operation.len, ..PathBytes::default() });
                }
            }
            turn.transfer.begin(1, now);
            turn.transfer.take(operation.len);
            match direction {
                Direction::Write => turn.transfer.needs_flush(),
                Direction::Read if profile.local != MemoryKind::Host => turn.transfer.fills_device(),
                Direction::Read => {}
            }
            turn.stats.operations += 1;
            bytes += operation.len;
            operations += 1;
        }
        Ok(bytes)
    }
}
