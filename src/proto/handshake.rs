//! A peer's session: version, compatibility, metadata, ready or failed.

use crate::proto::ids::{EngineId, Incarnation};
use crate::proto::wire::{Cause, EngineShape, RankMetadata};

/// What a handshake found.
#[derive(Debug, Clone, PartialEq)]
pub struct HandshakeOutcome {
    /// The engine.
    pub engine: EngineId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// Its shape.
    pub shape: EngineShape,
    /// The ranks asked for.
    pub ranks: Vec<RankMetadata>,
}

/// Why there is none.
#[derive(Debug, Clone, PartialEq)]
pub struct HandshakeFailure {
    /// Why, for programs.
    pub cause: Cause,
    /// Whether asking again may help.
    pub retry: bool,
    /// Why, for people.
    pub message: String,
}
