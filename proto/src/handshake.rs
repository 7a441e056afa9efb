//! The handshake without its sockets: [`Session`] is the client's half, [`Directory`] the listener's.
//!
//! A client asks for all ranks in one query and judges the reply: protocol version, engine, incarnation,
//! compatibility field by field, shape, geometry. The first thing that does not fit is named with both values and a
//! remedy.
//!
//! A client that was asked for a request while its prefill is under way awaits that in the same place.

mod directory;
mod prefills;
mod session;

use std::fmt;

use crate::ids::{EngineId, Incarnation};
use crate::wire::{Cause, EngineShape, Prefill, RankMetadata};

pub use directory::{Directory, Pushes};
pub use prefills::Asker;
pub use session::Session;

/// What a handshake gave.
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
    /// What differs between the engines and need not be the same, for the log.
    pub notes: Vec<String>,
}

/// What an engine's listener told of a prefill that is awaited there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillNews {
    /// The life of the engine that told it.
    pub incarnation: Incarnation,
    /// The prefill, as far as it is.
    pub prefill: Prefill,
    /// Whether it is over. Otherwise what its blocks hold can be read but not be relied on yet.
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
