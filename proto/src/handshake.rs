//! The handshake without its sockets: [`HandshakeCheck`] is the client's half, [`Directory`] the listener's.
//!
//! A client asks for all ranks in one query and judges the reply: protocol version, engine, incarnation,
//! compatibility field by field, shape, geometry. The first thing that does not fit is named with both values and a
//! remedy.
//!
//! A client that was asked for a request while its prefill is under way awaits that in the same place.

mod check;
mod directory;
mod prefills;

use std::fmt;

use crate::ids::{EngineId, Incarnation};
use crate::wire::{Cause, EngineShape, Prefill, RankMetadata};

pub use check::HandshakeCheck;
pub use directory::{Directory, Pushes};
pub use prefills::ClientId;

/// The result of a successful handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandshakeOutcome {
    /// The remote engine.
    pub engine: EngineId,
    /// This life of the remote engine.
    pub incarnation: Incarnation,
    /// Its shape.
    pub shape: EngineShape,
    /// All its ranks, ascending.
    pub ranks: Vec<RankMetadata>,
    /// Differences between the engines that are no obstacle, for the log.
    pub notes: Vec<String>,
}

/// How far an awaited prefill is, as its engine's listener reported it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillProgress {
    /// The life of the engine that told it.
    pub incarnation: Incarnation,
    /// The prefill, as far as it is.
    pub prefill: Prefill,
    /// True if it is over. Otherwise what its blocks hold can be read but not be relied on yet.
    pub over: bool,
}

/// Why a handshake failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandshakeFailure {
    /// Why, for programs.
    pub cause: Cause,
    /// Why, for people: what was wrong, what was expected, what to do.
    pub message: String,
}

impl fmt::Display for HandshakeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for HandshakeFailure {}
