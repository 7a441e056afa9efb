//! The ways in which a transfer's bytes can go. For each stretch of a transfer the first path is taken that carries it.
//!
//! A further path is a file here and a line in [`PATHS`].

mod copied;
mod one_sided;
mod served;
mod streamed;

use super::ferry::Engine;
use super::ids::{PeerId, TransferId};
use super::peers::Peer;
use super::stats::AgentStats;
use crate::error::Result;
use crate::proto::wire::MemoryKind;

/// What a path must know to say whether it carries an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    /// The memory of this side.
    pub(super) local: MemoryKind,
    /// The peer's memory.
    pub(super) remote: MemoryKind,
    /// Whether the transfer's runs are so short that messages carry them better than an operation each.
    pub(super) gathered: bool,
    /// Whether it is of a read so long that a stream is worth having.
    pub(super) streamable: bool,
    /// Whether the peer's digest is wanted and not the bytes.
    pub(super) digest: bool,
}

/// A way in which bytes go.
pub(super) trait Path: Sync {
    /// Its name in logs and statistics.
    fn name(&self) -> &'static str;

    /// Where the bytes are counted that went this way.
    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64;

    /// Whether it carries this over the connection to `peer`.
    fn carries(&self, peer: &Peer, stretch: Stretch) -> bool;

    /// Posts operations of a transfer that has some left, at most about a quantum of them, so that others get their turn. Returns the bytes
    /// posted; 0 when the windows have no room.
    ///
    /// # Errors
    /// The transfer cannot go on.
    fn post(&self, engine: &mut Engine, peer: PeerId, id: TransferId) -> Result<u64>;
}

/// All paths, the best first.
pub(super) static PATHS: [&dyn Path; 4] = [&copied::Copied, &one_sided::OneSided, &streamed::Streamed, &served::Served];

/// The path for a stretch. The last one carries everything.
pub(super) fn choose(peer: &Peer, stretch: Stretch) -> &'static dyn Path {
    PATHS.into_iter().find(|path| path.carries(peer, stretch)).unwrap_or(&served::Served)
}

/// The name of the path for long runs between memory of these kinds.
pub(super) fn between(peer: &Peer, local: MemoryKind, remote: MemoryKind) -> &'static str {
    choose(peer, Stretch { local, remote, gathered: false, streamable: true, digest: false }).name()
}
