//! The configuration of the worker's state machine.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ids::{EngineId, Incarnation, RankId};
use crate::wire::EngineShape;

/// Settings of one rank's state machine that an operator may change. All times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerSettings {
    /// Heartbeats per lease: one of L ms is renewed every L / `heartbeat_divisor` ms. At most every 100 ms. With 6,
    /// five heartbeats may be late before a lease runs out.
    pub heartbeat_divisor: u32,
    /// From a handshake's start until every rank needed is connected.
    pub handshake_timeout_ms: u64,
    /// Time limit of a load's transfers. It runs from their posting; then they are cancelled.
    pub transfer_timeout_ms: u64,
    /// From saying done until the last verdict.
    pub verdict_timeout_ms: u64,
    /// How long a producer keeps a `Done` or `Release` about a request without a grant. With asynchronous scheduling
    /// its own step may come after the consumer's message.
    pub early_message_ms: u64,
    /// How long a producer remembers an ended request, to answer what comes late.
    pub tombstone_ms: u64,
    /// How long a lease is kept alive for a request that is neither loaded nor released. Also how long a load awaits
    /// the end of a prefill that is under way.
    pub hold_timeout_ms: u64,
    /// How long a load awaits a prefill of which its engine has said nothing.
    pub await_timeout_ms: u64,
    /// Written tokens from which a chunk of a prefill under way is read; 0: none is.
    pub chunk_tokens: u64,
    /// A peer that no request has used for this long is disconnected.
    pub peer_ttl_ms: u64,
}

/// Configuration of one rank's state machine. All times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WorkerMachineConfig {
    /// This rank's engine.
    pub engine: EngineId,
    /// This rank's place in it.
    pub rank: RankId,
    /// The engine's shape.
    pub shape: EngineShape,
    /// This life of the rank's agent: what producers know this reader by.
    pub incarnation: Incarnation,
    /// The settings that an operator may change.
    pub settings: WorkerSettings,
    /// For this long after a failed handshake holds start no new one; loads do. Default 1000.
    pub handshake_backoff_ms: u64,
    /// The most messages kept about requests without a grant. One more is answered at once. Default 4096.
    pub early_messages: usize,
    /// How many ended requests are remembered at most; the oldest go first. Default 16384.
    pub tombstones: usize,
    /// How long a lease is kept for further requests that may share it. Counted from the end of the last known one.
    /// Default 5000: longer than an engine's step, during which it takes in no request.
    pub shared_grace_ms: u64,
    /// True if anything is counted. Default true.
    pub telemetry: bool,
    /// True if the lives of requests are told by `WorkerMachine::poll_trace`. Default false.
    pub trace: bool,
}

/// The longest time that any setting accepts: ten days. Longer ones are taken for a mistake of unit.
const MAX_MS: u64 = 864_000_000;

impl WorkerMachineConfig {
    /// A configuration with every default.
    pub fn new(
        engine: EngineId,
        rank: RankId,
        shape: EngineShape,
        incarnation: Incarnation,
        settings: WorkerSettings,
    ) -> Self {
        WorkerMachineConfig {
            engine,
            rank,
            shape,
            incarnation,
            settings,
            handshake_backoff_ms: 1_000,
            early_messages: 4_096,
            tombstones: 16_384,
            shared_grace_ms: 5_000,
            telemetry: true,
            trace: false,
        }
    }

    /// Checks every value but the settings, whose ranges are in the driver's table of settings. Errors:
    /// [`crate::ErrorKind::InvalidArgument`] naming the key, its value and what is allowed.
    pub fn check(&self) -> Result<()> {
        if self.shape.tp == 0 || self.shape.pp == 0 || self.shape.dcp == 0 {
            return Err(Error::invalid(format!(
                "shape: sizes are at least 1, got tp {}, pp {}, dcp {}",
                self.shape.tp, self.shape.pp, self.shape.dcp
            )));
        }
        if self.rank.tp >= self.shape.tp || self.rank.pp >= self.shape.pp {
            return Err(Error::invalid(format!(
                "rank: {} is outside the engine's shape of tp {} and pp {}",
                self.rank, self.shape.tp, self.shape.pp
            )));
        }
        for (key, value) in
            [("handshake_backoff_ms", self.handshake_backoff_ms), ("shared_grace_ms", self.shared_grace_ms)]
        {
            if !(1..=MAX_MS).contains(&value) {
                return Err(Error::invalid(format!("{key}: expected 1 to {MAX_MS} milliseconds, got {value}")));
            }
        }
        Ok(())
    }

    /// The time between two heartbeats for a lease of `lease_ms`.
    pub(super) fn heartbeat_period(&self, lease_ms: u64) -> Duration {
        ms((lease_ms / u64::from(self.settings.heartbeat_divisor.max(1))).max(100))
    }
}

/// Milliseconds as a duration.
pub(super) fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}
