//! Which way bytes go between this agent and a peer.

use super::paths;
use super::peers::Peer;
use crate::proto::wire::MemoryKind;

/// How a peer is reached. The paths are those of long runs; short ones between host memories travel in messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Transports and devices of the connection, such as `tcp/eth0, cma/memory`.
    pub lanes: String,
    /// Between host memories.
    pub host: &'static str,
    /// Between memories of CUDA devices.
    pub device: &'static str,
    /// From the peer's host memory to a CUDA device of this side, and the other way round.
    pub mixed: &'static str,
}

impl Route {
    /// Of a peer that has said hello; what its connection can do is not known before.
    pub(super) fn to(peer: &Peer) -> Option<Route> {
        let cuda = MemoryKind::Cuda { device: 0 };
        let between = |local, remote| paths::between(peer, local, remote);
        peer.is_ready().then(|| Route {
            lanes: peer.endpoint.describe(),
            host: between(MemoryKind::Host, MemoryKind::Host),
            device: between(cuda, cuda),
            mixed: between(cuda, MemoryKind::Host),
        })
    }
}
