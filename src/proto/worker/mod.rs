//! The worker side's state machine.

mod action;
mod config;

use std::sync::Arc;

pub use action::{Action, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken};
pub use config::WorkerConfig;

use crate::error::Result;
use crate::proto::handshake::{HandshakeFailure, HandshakeOutcome};
use crate::proto::time::Time;
use crate::proto::wire::{Cause, PeerMessage, RankMetadata, StepMetadata, WorkerReport};

/// One rank's state machine, producer and consumer at once.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
}

/// How much the machine remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gauges {
    /// Producer: leases that hold.
    pub leases: usize,
    /// Producer: messages about requests that are not granted yet.
    pub early: usize,
    /// Producer: ended requests that are remembered.
    pub tombstones: usize,
    /// Consumer: requests whose lease is kept alive without a load.
    pub holds: usize,
    /// Consumer: loads without a terminal report.
    pub loads: usize,
    /// Consumer: releases that wait for a connection.
    pub releases: usize,
    /// Consumer: handshakes under way or done.
    pub sessions: usize,
    /// Consumer: producer ranks connected or connecting.
    pub peers: usize,
}

impl Worker {
    /// A machine without work.
    pub fn new(config: WorkerConfig) -> Result<Worker> {
        config.check()?;
        Ok(Worker { config })
    }
    /// States this rank's own metadata; loads that come before it fail.
    pub fn set_local(&mut self, _local: Arc<RankMetadata>) {}
    /// The configuration.
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }
    /// How much the machine remembers.
    pub fn gauges(&self) -> Gauges {
        Gauges::default()
    }
    /// Whether no transfer is under way: after `handle_shutdown`, when memory may be given up.
    pub fn is_drained(&self) -> bool {
        true
    }
    /// A step's work.
    pub fn handle_step(&mut self, _now: Time, _step: StepMetadata) {}
    /// The answer to [`Action::Handshake`].
    pub fn handle_handshake(
        &mut self,
        _now: Time,
        _session: SessionId,
        _result: Result<HandshakeOutcome, HandshakeFailure>,
    ) {
    }
    /// [`Action::Connect`] succeeded.
    pub fn handle_connected(&mut self, _now: Time, _peer: &PeerKey) {}
    /// A connection could not be made, or is broken.
    pub fn handle_peer_lost(&mut self, _now: Time, _peer: &PeerRef, _message: &str) {}
    /// The answer to [`Action::Transfer`].
    pub fn handle_transfer_done(
        &mut self,
        _now: Time,
        _token: TransferToken,
        _result: Result<TransferFigures, (Cause, String)>,
    ) {
    }
    /// A message from another rank.
    pub fn handle_message(&mut self, _now: Time, _from: &PeerRef, _message: PeerMessage) {}
    /// The time of [`Worker::poll_timeout`] has come.
    pub fn handle_timeout(&mut self, _now: Time) {}
    /// Ends every load and lease; see [`Worker::is_drained`].
    pub fn handle_shutdown(&mut self, _now: Time) {}
    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        None
    }
    /// What happened since the last report.
    pub fn poll_report(&mut self) -> Option<WorkerReport> {
        None
    }
    /// When to call [`Worker::handle_timeout`] next.
    pub fn poll_timeout(&mut self) -> Option<Time> {
        None
    }
}
