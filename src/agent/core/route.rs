//! Which way bytes go between this agent and a peer.

/// How a peer is reached. The paths are those of long runs; short ones between host memories travel in messages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
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
