//! The ways in which a transfer's bytes can go. For each part of a transfer the first path is taken that carries it.
//!
//! A further path is a file here and a line in [`PATHS`].

pub(crate) mod copy_pool;
pub(crate) mod device_copies;
mod device_copy;
pub(crate) mod message;
pub(crate) mod one_sided;
pub(crate) mod process_vm;
pub(crate) mod rdma_flush;

use std::cell::RefCell;
use std::time::Instant;

use self::copy_pool::CopyPool;
use self::device_copies::DeviceCopies;
use super::core::effect::Effects;
use super::core::ids::TransferId;
use super::core::in_flight::Operations;
use super::core::regions::Regions;
use super::core::route::Route;
use super::core::stats::{AgentStats, PathBytes};
use super::peers::Peer;
use super::peers::reach::MemoryPair;
use super::rpc::client::Client;
use super::rpc::staged::Staged;
use super::transfers::{Lack, Transfer, Windows};
use crate::error::Result;
use crate::mem::MemoryRange;
use crate::proto::plan::Operation;
use crate::proto::wire::MemoryKind;

/// The facts by which a path says whether it carries an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Profile {
    /// The memory of this side.
    local: MemoryKind,
    /// The peer's memory.
    remote: MemoryKind,
    /// Whether the transfer's runs are so short that messages carry them better than an operation each.
    gathered: bool,
    /// Whether the kernel fills missing pages of the peer's memory by itself; known of processes whose memory can be copied.
    is_filled_by_kernel: bool,
    /// Whether it is device memory on both sides, and this process can map the peer's.
    is_importable: bool,
    /// Whether UCX has refused to move the peer's memory one-sided.
    is_refused: bool,
    /// Whether the peer's digest is wanted and not the bytes.
    digest: bool,
}

impl Profile {
    fn pair(&self) -> MemoryPair {
        MemoryPair::of(self.local, self.remote)
    }

    fn are_hosts(&self) -> bool {
        self.pair() == MemoryPair::Host
    }
}

/// The means of a path to post: the transfer whose turn it is, its peer, and what operations take.
pub(crate) struct Turn<'a> {
    pub(crate) id: TransferId,
    pub(crate) transfer: &'a mut Transfer,
    pub(crate) windows: &'a mut Windows,
    pub(crate) peer: &'a mut Peer,
    pub(crate) regions: &'a Regions,
    pub(crate) operations: &'a mut Operations,
    pub(crate) rpc: &'a RefCell<Client>,
    pub(crate) copy_pool: &'a mut CopyPool,
    pub(crate) device_copies: &'a mut DeviceCopies,
    pub(crate) staged: &'a mut Staged,
    pub(crate) stats: &'a mut AgentStats,
    pub(crate) effects: &'a mut Effects,
    /// Why nothing more could be posted, where that is for lack of room.
    pub(crate) lack: Option<Lack>,
}

impl Turn<'_> {
    /// The profile of the transfer's next operation; `None` when all are posted.
    fn profile(&self) -> Option<Profile> {
        let operation = self.transfer.next()?;
        let local = self.regions.range(operation.local_region).map_or(MemoryKind::Host, MemoryRange::kind);
        let remote = self.peer.kind(operation.remote_region).unwrap_or(MemoryKind::Host);
        Some(Profile {
            local,
            remote,
            gathered: self.transfer.is_gathered(),
            is_refused: self.peer.has_refused(MemoryPair::of(local, remote), operation.remote_region)
                || MemoryPair::of(local, remote) == MemoryPair::Device
                    && self.peer.is_mapped_in_part(operation.remote_region),
            is_filled_by_kernel: self.peer.is_filled_by_kernel(operation.remote_region),
            is_importable: match local {
                MemoryKind::Cuda { device } => self.peer.is_importable(operation.remote_region, device),
                MemoryKind::Host => false,
            },
            digest: self.transfer.is_asking(),
        })
    }

    /// The next operation if it is of this profile.
    fn next_of(&self, profile: Profile) -> Option<Operation> {
        self.transfer.next().filter(|_| self.profile() == Some(profile))
    }

    /// Whether the windows have room for an operation of `len` bytes; notes it if not.
    fn has_room(&mut self, len: u64) -> bool {
        self.lack = self.windows.find_room(self.peer.id, len).err();
        self.lack.is_none()
    }

    /// An operation of `len` bytes was posted that counts in the windows until it ends.
    fn enter_flight(&mut self, len: u64, now: Instant) {
        self.transfer.enter_flight();
        self.windows.enter(self.peer.id, len, now);
    }

    /// Counts bytes that were moved at once, of the agent and of the peer. Others count when their operation ends.
    fn count(&mut self, moved: PathBytes) {
        self.stats.add(moved);
        self.peer.traffic.add(moved);
    }
}

/// A way in which bytes go.
trait Path: Sync {
    /// Its name in logs and statistics.
    fn name(&self) -> &'static str;

    /// Whether it carries this over the connection to `peer`.
    fn carries(&self, peer: &Peer, profile: Profile) -> bool;

    /// Posts operations of a transfer that has some left, as long as they are of `profile`: what comes behind them may be
    /// another path's. At most about a quantum of them, so that others get their turn. Returns the bytes posted; 0 when the
    /// windows have no room.
    ///
    /// # Errors
    /// The transfer cannot go on.
    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64>;
}

/// All paths, the best first.
static PATHS: [&dyn Path; 4] =
    [&process_vm::ProcessVm, &device_copy::DeviceCopy, &one_sided::OneSided, &message::Message];

/// The path for what has this profile. The last one carries everything.
fn choose(peer: &Peer, profile: Profile) -> &'static dyn Path {
    PATHS.into_iter().find(|path| path.carries(peer, profile)).unwrap_or(&message::Message)
}

/// Posts some of a transfer. Returns the bytes posted; 0 when the windows have no room.
///
/// # Errors
/// The transfer cannot go on.
pub(crate) fn post(turn: &mut Turn<'_>) -> Result<u64> {
    let mut total = 0;
    while let Some(profile) = turn.profile() {
        let path = choose(turn.peer, profile);
        turn.lack = None;
        let bytes = path.post(turn, profile)?;
        total += bytes;
        // Where UCX has refused the first operation, the next path's turn is now.
        if bytes > 0 || turn.profile() == Some(profile) {
            break;
        }
    }
    Ok(total)
}

/// The name of the path for long runs between memory of these kinds.
pub(crate) fn between(peer: &Peer, local: MemoryKind, remote: MemoryKind) -> &'static str {
    // A peer that has connected to this side proves it only when it has this side's hello.
    if MemoryPair::of(local, remote) == MemoryPair::Host && peer.locality.is_unproved() {
        return process_vm::UNPROVED;
    }
    let through = |is_refused| {
        let (is_filled_by_kernel, gathered, digest) = (true, false, false);
        let is_importable = MemoryPair::of(local, remote) == MemoryPair::Device && peer.is_all_importable();
        let profile = Profile { local, remote, gathered, is_filled_by_kernel, is_importable, is_refused, digest };
        choose(peer, profile).name()
    };
    match peer.refused(MemoryPair::of(local, remote), remote) {
        (refused, all) if refused == all => through(all > 0),
        (1.., _) if through(false) == one_sided::NAME => "one-sided (UCX), some regions served by messages",
        _ => through(false),
    }
}

/// How a peer that has said hello is reached; what its connection can do is not known before.
pub(crate) fn route(peer: &Peer) -> Option<Route> {
    let cuda = MemoryKind::Cuda { device: 0 };
    peer.is_ready().then(|| Route {
        lanes: peer.connection.endpoint.describe(),
        host: between(peer, MemoryKind::Host, MemoryKind::Host),
        device: between(peer, cuda, cuda),
        mixed: between(peer, cuda, MemoryKind::Host),
    })
}
