//! One peer: what is known of its regions, and how requests go to it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::connection::Connection;
use super::locality::Locality;
use super::reach::{MemoryPair, Reach};
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::core::in_flight::{InFlight, Operations};
use crate::agent::core::stats::Traffic;
use crate::agent::revocation::revoked::Runs;
use crate::agent::rpc::flow_control::FlowControl;
use crate::agent::rpc::liveness::Liveness;
use crate::agent::rpc::server::{Payload, Server};
use crate::agent::rpc::wire::encode_pieces;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::ipc::Imported;
use crate::mem::ucx_error;
use crate::proto::ids::Incarnation;
#[cfg(test)]
use crate::proto::wire::DeviceHandle;
use crate::proto::wire::limits::MAX_REGIONS;
use crate::proto::wire::{AgentMetadata, AgentRegion, MemoryKind, RegionMetadata};
use crate::ucx::{self, Rkey};

/// A region of the peer's, and its rkey if UCX has it.
pub(super) type RemoteRegion = (RegionMetadata, Option<Rc<Rkey>>);

/// Runs of deregistered regions that are remembered of a peer. One that tells of all that it deregisters has fewer: it
/// has at most [`MAX_REGIONS`] others.
pub(super) const MAX_RUNS: usize = MAX_REGIONS + 1;

/// So many regions of a pair of memories UCX may refuse before none is tried any more: it writes an error to its log for each.
const REFUSALS: usize = 4;

/// A peer's device memory that this process has mapped, and the regions that the peer has revoked (`imports.rs`).
#[derive(Default)]
pub(crate) struct Imports {
    /// Whether nothing is to be mapped.
    pub(super) are_off: bool,
    /// By region and device of this side.
    pub(super) mapped: BTreeMap<(u32, u32), Arc<Imported>>,
    /// Regions that the driver did not map, and for which device of this side.
    pub(super) refused: BTreeSet<(u32, u32)>,
    /// True once the log has said so of any.
    pub(super) are_logged: bool,
    /// Those of them that the device does not reach.
    pub(super) unreached: BTreeSet<(u32, u32)>,
    /// Regions that the peer has deregistered, whatever its metadata says; bounded by [`MAX_RUNS`].
    pub(super) revoked: Runs,
}

impl Imports {
    /// Forgets what is mapped of regions that are gone, and what is not.
    pub(super) fn forget(&mut self, run: &RangeInclusive<u32>) {
        self.mapped.retain(|(region, _), _| !run.contains(region));
        self.refused.retain(|(region, _)| !run.contains(region));
        self.unreached.retain(|(region, _)| !run.contains(region));
    }
}

/// Another agent, what is known of its regions, and what is under way with it.
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) connection: Connection,
    pub(crate) locality: Locality,
    /// Its regions by index, but for those that it has deregistered.
    pub(super) regions: BTreeMap<u32, RemoteRegion>,
    /// Those of them that this side's owner has removed, and that are in use or mapped by UCX.
    pub(super) removed: BTreeSet<u32>,
    /// Which pairs of memory the connection moves one-sided; known when it is ready.
    pub(super) reach: Reach,
    /// Regions of the peer's that UCX has refused to move one-sided, though there are lanes for such memory.
    pub(super) refused: BTreeSet<(MemoryPair, u32)>,
    /// Its device memory that this process has mapped.
    pub(super) imports: Imports,
    /// Bytes and transfers over this connection.
    pub(crate) traffic: Traffic,
    pub(crate) server: Server,
    pub(crate) flow: FlowControl,
    pub(crate) liveness: Liveness,
    /// Whether the table lists it among those from which bytes have come lately.
    pub(super) is_reading: bool,
    /// Whether it came by itself and has said nothing but hello.
    pub(super) silent: bool,
    /// Whether its owner's metadata gave its address, and not only its own hello.
    pub(super) vouched: bool,
}

impl Peer {
    pub(crate) fn is_ready(&self) -> bool {
        self.connection.remote.is_some()
    }

    /// The peer's incarnation and its number for the connection, once it said hello: what its replies come with.
    pub(crate) fn identity(&self) -> Result<(Incarnation, u64)> {
        let unknown = || Error::new(ErrorKind::Internal, format!("agent {} has not said hello", self.name));
        Ok((self.incarnation, self.connection.remote.ok_or_else(unknown)?))
    }

    /// Hands a request or an answer to UCX; `held` is what an answer counts as until UCX is done with it, else 0.
    pub(crate) fn post_rpc(
        &mut self,
        kind: FrameKind,
        sequence: u64,
        payload: Payload,
        held: u64,
        operations: &mut Operations,
    ) -> Result<()> {
        let frame = self.connection.frame(kind, sequence);
        let is_in_flight = match payload {
            Payload::Bytes(data) => {
                let operation = InFlight::Rpc { peer: self.id, held, holds: Vec::new() };
                self.connection.send(frame, data, operation, operations)
            }
            Payload::Parts { parts, holds } => {
                let operation = InFlight::Rpc { peer: self.id, held, holds };
                self.connection.send_parts(frame, &parts, operation, operations)
            }
        };
        if is_in_flight? {
            self.server.hold(held);
        }
        Ok(())
    }

    /// Asks for a sign of life, in the way that every release answers: for the digest of nothing.
    pub(crate) fn ask_for_sign_of_life(&mut self, operations: &mut Operations, now: Instant) -> Result<()> {
        let frame = self.connection.frame(FrameKind::DigestRequest, Frame::SIGN_OF_LIFE);
        let question = InFlight::Question { peer: self.id };
        let sent = self.connection.send(frame, encode_pieces(&[], 0), question, operations);
        self.liveness.asked(!matches!(sent, Ok(true)), now);
        sent.map(drop)
    }

    /// The length of its region `index`, where new transfers may use it.
    pub(crate) fn len_of(&self, index: u32) -> Option<u64> {
        self.regions.get(&index).filter(|_| !self.removed.contains(&index)).map(|(region, _)| region.len)
    }

    /// Whether the connection has lanes that move such memory one-sided.
    pub(crate) fn is_direct(&self, pair: MemoryPair) -> bool {
        self.reach.has(pair)
    }

    /// Whether UCX might take the first of several allocations for all of its region `index`, as its CUDA IPC does
    /// (github.com/openucx/ucx/pull/11283).
    pub(crate) fn is_mapped_in_part(&self, index: u32) -> bool {
        // A peer of an older build says it by the pieces only.
        let has_pieces = |region: &RegionMetadata| region.handle.as_ref().is_some_and(|handle| handle.pieces.len() > 1);
        self.reach.by_cuda_ipc
            && self.regions.get(&index).is_some_and(|(region, _)| region.is_scattered || has_pieces(region))
    }

    /// Whether UCX has refused to move the memory of its region `index` one-sided.
    pub(crate) fn has_refused(&self, pair: MemoryPair, index: u32) -> bool {
        // Nearly every peer has refused none.
        !self.refused.is_empty() && (self.refused.contains(&(pair, index)) || self.has_refused_all(pair))
    }

    fn has_refused_all(&self, pair: MemoryPair) -> bool {
        self.refused.iter().filter(|(known, _)| *known == pair).count() >= REFUSALS
    }

    /// UCX does not move the memory of its region `index` one-sided: what the two devices can register, for one, is known
    /// to nobody else.
    pub(crate) fn refuse(&mut self, pair: MemoryPair, index: u32) {
        if !self.refused.iter().any(|(known, _)| *known == pair) {
            let memory = match pair {
                MemoryPair::Host => "host memory",
                MemoryPair::Device => "device memory",
                MemoryPair::Mixed => "host and device memory",
            };
            log::warn!(
                "agent {} has {memory} that no transport of the connection ({}) moves without its processor, first region \
                 {index}: it goes by messages, which are slower; `kvferry doctor` and docs/rdma.md say what is missing",
                self.name,
                self.connection.endpoint.describe()
            );
        }
        self.refused.insert((pair, index));
    }

    /// How many of its regions UCX has refused to move one-sided, of how many that have memory of this kind.
    pub(crate) fn refused(&self, pair: MemoryPair, remote: MemoryKind) -> (usize, usize) {
        let kind = std::mem::discriminant(&remote);
        let of_kind = || self.kinds().filter(|(_, other)| std::mem::discriminant(other) == kind);
        let all = of_kind().count();
        if self.has_refused_all(pair) {
            return (all, all);
        }
        let is_refused = |index: u32| {
            self.refused.contains(&(pair, index)) || pair == MemoryPair::Device && self.is_mapped_in_part(index)
        };
        (of_kind().filter(|(index, _)| is_refused(*index)).count(), all)
    }

    /// Takes the connection for one whose transports move host memory one-sided, and the peer for a stranger to this host,
    /// for tests of what follows from that.
    #[cfg(test)]
    pub(crate) fn describe_as_one_sided(&mut self) {
        self.reach.host = true;
        (self.locality.claimed, self.locality.neighbour) = (None, None);
    }

    /// The kind of memory of its region `index`.
    pub(crate) fn kind(&self, index: u32) -> Option<MemoryKind> {
        self.regions.get(&index).map(|(region, _)| region.kind)
    }

    /// Base address of a region.
    pub(crate) fn base(&self, index: u32) -> Option<u64> {
        self.regions.get(&index).map(|(region, _)| region.base)
    }

    /// The rkey of a region; `None` where the region is gone.
    ///
    /// # Errors
    /// UCX's, where it is to be unpacked.
    pub(crate) fn rkey(&mut self, index: u32) -> Result<Option<Rc<Rkey>>> {
        let Some((region, rkey)) = self.regions.get_mut(&index) else { return Ok(None) };
        if rkey.is_none() {
            *rkey = Some(self.connection.endpoint.unpack_rkey(&region.rkey).map_err(ucx_error)?);
        }
        Ok(rkey.clone())
    }

    /// Refuses an index that names no region of the peer's, or one that was removed.
    pub(crate) fn check_region(&self, index: u32) -> Result<()> {
        let is_removed = self.removed.contains(&index);
        if self.regions.contains_key(&index) && !is_removed {
            return Ok(());
        }
        let why = if is_removed {
            "was removed"
        } else if self.imports.revoked.contains(index) {
            "was deregistered there"
        } else {
            "is not in its metadata"
        };
        Err(Error::not_found(format!("region {index} of peer {} {why}", self.name)))
    }

    /// Tells whether the kernel alone fills missing pages of its region `index`, so that a copy waits for no other program.
    /// Its owner says so. One that is wrong hangs a copy, as one does that maps other memory there later.
    pub(crate) fn is_filled_by_kernel(&self, index: u32) -> bool {
        self.regions.get(&index).is_some_and(|(region, _)| region.is_filled_by_kernel)
    }

    /// Takes the regions of (newer) metadata; rkeys of unchanged ones are kept.
    pub(super) fn update_regions(&mut self, metadata: &AgentMetadata) -> Result<()> {
        let mut regions = BTreeMap::new();
        for (index, region) in metadata.indexed() {
            let taken = match self.regions.get(&index).filter(|(known, _)| known == region) {
                Some(known) => Some(known.clone()),
                None => self
                    .unpack(index, region)
                    .map_err(|e| e.context(format!("region {index} of the metadata of agent {}", metadata.name)))?,
            };
            regions.extend(taken.map(|region| (index, region)));
        }
        self.removed.clear();
        for (index, before) in std::mem::replace(&mut self.regions, regions) {
            let now = self.regions.get(&index);
            if now.is_none_or(|(region, _)| *region != before.0) {
                let is_kept = now.is_none() && self.may_be_revoked(&before);
                self.forget_uses(index);
                if is_kept {
                    self.regions.insert(index, before);
                    self.removed.insert(index);
                }
            }
        }
        Ok(())
    }

    /// Whether a region must be known although it is not used any more. One that UCX has mapped must be until its owner revokes
    /// it, since the connection has to end then. Only owners on this host do.
    fn may_be_revoked(&self, region: &RemoteRegion) -> bool {
        (self.locality.on_this_host || self.reach.by_cuda_ipc) && self.is_mapped_by_ucx(region)
    }

    /// Forgets what was found out about the memory of its region `index`.
    fn forget_uses(&mut self, index: u32) {
        self.imports.forget(&(index..=index));
        self.refused.retain(|(_, known)| *known != index);
    }

    /// Takes one region, which was registered after the metadata that the peer was connected by.
    pub(crate) fn add_region(&mut self, added: &AgentRegion) -> Result<()> {
        if added.incarnation != self.incarnation {
            return Err(Error::new(
                ErrorKind::PeerDied,
                format!(
                    "region {} is of incarnation {} of agent {}, and the connection is to {}: connect by metadata of \
                     that life",
                    added.index, added.incarnation, self.name, self.incarnation
                ),
            ));
        }
        let index = added.index;
        if let Some((known, _)) = self.regions.get(&index) {
            if *known == added.region {
                self.removed.remove(&index);
                return Ok(());
            }
            // Its rkey and its mapping are in use, and an index is never used again.
            return Err(Error::corrupt(format!(
                "region {index} of agent {} is known as {} bytes at {:#x}, and is now described as {} bytes at {:#x}, or with \
                 another key: one of the two is not that region",
                self.name, known.len, known.base, added.region.len, added.region.base
            )));
        }
        if self.regions.len() >= MAX_REGIONS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "{MAX_REGIONS} regions of agent {} are known, as many as it can have at a time: remove those that \
                     it has deregistered, or connect by its newest metadata, which leaves them out",
                    self.name
                ),
            ));
        }
        let region = self
            .unpack(index, &added.region)
            .map_err(|e| e.context(format!("region {index} of agent {}", self.name)))?;
        let Some(region) = region else { return Ok(()) };
        self.regions.insert(index, region);
        Ok(())
    }

    /// Refuses new transfers with its region `index`. What is known of it goes at once, or when no transfer uses it any
    /// more.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub(crate) fn remove_region(&mut self, index: u32, is_in_use: bool) -> Result<()> {
        self.check_region(index)?;
        self.removed.insert(index);
        if !is_in_use {
            self.forget_removed(index);
        }
        Ok(())
    }

    /// Takes its region `index` for device memory of which UCX has the rkey, for tests of what follows from that.
    #[cfg(test)]
    pub(crate) fn describe_as_mapped_by_ucx(&mut self, index: u32, kind: MemoryKind) {
        if let Some((region, rkey)) = self.regions.get_mut(&index) {
            let handle = DeviceHandle { handle: Vec::new(), offset: 0, pieces: Vec::new() };
            (region.kind, region.handle) = (kind, Some(handle));
            assert!(rkey.is_some());
        }
    }

    /// Those of these regions that were removed, and are not forgotten.
    pub(crate) fn removed_of(&self, regions: &[u32]) -> Vec<u32> {
        regions.iter().copied().filter(|region| self.removed.contains(region)).collect()
    }

    /// No transfer uses its region `index` any more: forgets it if it was removed.
    pub(crate) fn forget_removed(&mut self, index: u32) {
        if !self.removed.contains(&index) {
            return;
        }
        self.forget_uses(index);
        if !self.regions.get(&index).is_some_and(|region| self.may_be_revoked(region)) {
            self.regions.remove(&index);
            self.removed.remove(&index);
        }
    }

    /// A region as metadata describes it; `None` for one that is gone.
    fn unpack(&self, index: u32, region: &RegionMetadata) -> Result<Option<RemoteRegion>> {
        // Metadata may be older than a revocation, and an index is never used again.
        if region.is_gone() || self.imports.revoked.contains(index) {
            return Ok(None);
        }
        let (base, len, other) = ucx::rkey_range(&region.rkey).map_err(ucx_error)?;
        let kind = match region.kind {
            MemoryKind::Host => ucx::MemoryKind::Host,
            MemoryKind::Cuda { .. } => ucx::MemoryKind::Cuda,
        };
        if (base, len) != (region.base, region.len) || !kind.may_be_seen_as(other) {
            return Err(Error::corrupt(format!(
                "the metadata says {} bytes of {kind} memory at {:#x}, the rkey inside says {len} bytes of {other} memory at \
                 {base:#x}",
                region.len, region.base,
            )));
        }
        // UCX maps device memory of another process as soon as it sees an rkey of it, and lets it go with the connection only. So
        // it sees none until it is asked to move it.
        let rkey = match region.kind {
            MemoryKind::Cuda { .. } => None,
            MemoryKind::Host => Some(self.connection.endpoint.unpack_rkey(&region.rkey).map_err(ucx_error)?),
        };
        Ok(Some((region.clone(), rkey)))
    }
}
