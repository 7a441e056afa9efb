//! The scheduler side's state machine.

mod config;

pub use config::SchedulerConfig;

use crate::error::Result;
use crate::proto::ids::RequestId;
use crate::proto::wire::{Blocks, StepMetadata, TransferParams, WorkerReport};

/// What can be loaded for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Match {
    /// Tokens beyond those computed here.
    pub tokens: u64,
    /// Whether they are loaded between steps.
    pub asynchronous: bool,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishOutcome {
    /// By its length or a stop.
    Complete,
    /// In any other way.
    Aborted,
}

/// What becomes of a finished request's blocks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Finish {
    /// Whether they stay until a report says that the request's sending (or receiving) is over.
    pub keep: bool,
    /// What to hand to the decoder.
    pub params: Option<TransferParams>,
}

/// One engine's state machine, producer and consumer at once.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
}

impl Scheduler {
    /// A machine without requests.
    pub fn new(config: SchedulerConfig) -> Result<Scheduler> {
        config.check()?;
        Ok(Scheduler { config })
    }
    /// The configuration.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }
    /// Where the handshake listener is reached; needed before a hand-over can be offered.
    pub fn set_address(&mut self, _host: impl Into<String>, _port: u16) {}
    /// A request came in.
    pub fn arrived(&mut self, _request: &RequestId, _params: &TransferParams) -> Result<()> {
        Ok(())
    }
    /// What can be loaded for it.
    pub fn matched(
        &self,
        _request: &RequestId,
        _params: &TransferParams,
        _prompt_tokens: u64,
        _computed_tokens: u64,
    ) -> Result<Match> {
        Ok(Match::default())
    }
    /// Blocks are allocated for it.
    pub fn allocated(
        &mut self,
        _request: &RequestId,
        _params: &TransferParams,
        _local_blocks: Vec<Blocks>,
        _external_tokens: u64,
    ) -> Result<()> {
        Ok(())
    }
    /// It ended.
    pub fn finished(
        &mut self,
        _request: &RequestId,
        _params: &TransferParams,
        _outcome: FinishOutcome,
        _blocks: Vec<Blocks>,
        _computed_tokens: u64,
    ) -> Result<Finish> {
        Ok(Finish::default())
    }
    /// The work for the next step; what it returns is not returned again.
    pub fn build_step(&mut self) -> StepMetadata {
        StepMetadata::default()
    }
    /// Whether the next step has work.
    pub fn has_pending(&self) -> bool {
        false
    }
    /// What all ranks together (`proto::aggregate`) have reported.
    pub fn on_report(&mut self, _report: &WorkerReport) {}
}
