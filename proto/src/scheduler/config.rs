//! The configuration of the scheduler side's state machine.

use super::allowed::AllowedHosts;
use crate::error::{Error, Result};
use crate::geometry::{Group, GroupKind};
use crate::ids::{EngineId, Incarnation};
use crate::wire::EngineShape;

/// Settings of one engine's scheduler side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerMachineConfig {
    /// The engine.
    pub engine_id: EngineId,
    /// This life of the engine.
    pub incarnation: Incarnation,
    /// Tensor-parallel size, at least 1.
    pub tp_size: u32,
    /// Pipeline-parallel size, at least 1.
    pub pp_size: u32,
    /// Decode-context-parallel size, at least 1.
    pub dcp_size: u32,
    /// The KV-cache groups in the engine's order, as in any rank's geometry. With decode context parallelism
    /// `token_ranks` says how many tokens an entry of a block list stands for.
    pub groups: Vec<Group>,
    /// The id that stands for "no block" in a block list (vLLM: 0). It is never read or written.
    pub null_block: Option<u32>,
    /// True if the engine reuses blocks for other requests with the same prefix (vLLM: prefix caching). Then a block
    /// of a sliding-window group must be filled whole, also in front of the window.
    pub reuses_blocks: bool,
    /// How long a hand-over's blocks are kept without a heartbeat, in milliseconds, at least 1000.
    pub lease_ms: u64,
    /// True if a finished prefill's answer may leave before its blocks are written. A GPU may still compute a draft's
    /// cache or copy a state. A consumer that loads them then asks the listener, as of a prefill that is under way.
    pub written_late: bool,
    /// The settings of conversations that go on, if they do. A decode engine keeps what it has of one, and a prefill
    /// engine loads that for the next turn.
    pub multi_turn: Option<MultiTurn>,
    /// Hosts that this engine may be told to read from. None: any.
    pub allowed_hosts: Option<AllowedHosts>,
}

/// How histories of conversations travel back from decode engines to prefill engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MultiTurn {
    /// How long a decode engine keeps a history without a heartbeat, in milliseconds. At least 1000. None comes
    /// between two turns.
    pub lease_ms: u64,
    /// The fewest missing tokens for which a prefill engine loads the history.
    pub least_tokens: u64,
    /// The most blocks that histories keep from the decode engine's other requests, all together. The oldest give way.
    pub most_blocks: u64,
}

impl SchedulerMachineConfig {
    /// A configuration of one rank with every default.
    pub fn new(engine_id: EngineId, incarnation: Incarnation, groups: Vec<Group>) -> Self {
        SchedulerMachineConfig {
            engine_id,
            incarnation,
            tp_size: 1,
            pp_size: 1,
            dcp_size: 1,
            groups,
            null_block: Some(0),
            reuses_blocks: true,
            lease_ms: 30_000,
            written_late: false,
            multi_turn: None,
            allowed_hosts: None,
        }
    }

    /// Checks every value.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) naming the key, its value and what is
    /// allowed; those of [`EngineShape::validate`].
    pub fn check(&self) -> Result<()> {
        for (key, value) in [("tp_size", self.tp_size), ("pp_size", self.pp_size), ("dcp_size", self.dcp_size)] {
            if value == 0 {
                return Err(Error::invalid(format!("{key}: expected at least 1, got 0")));
            }
        }
        self.shape().validate()?;
        if self.incarnation == Incarnation(0) {
            return Err(Error::invalid("incarnation: expected a number other than 0, drawn at random at each start"));
        }
        let leases = [
            ("lease_ms", Some(self.lease_ms), 30_000),
            ("multi_turn.lease_ms", self.multi_turn.as_ref().map(|t| t.lease_ms), 480_000),
        ];
        for (key, lease_ms, usual) in leases {
            if let Some(ms) = lease_ms
                && !(1_000..=864_000_000).contains(&ms)
            {
                return Err(Error::invalid(format!(
                    "{key}: expected 1000 to 864000000 milliseconds, got {ms}; {usual} is usual"
                )));
            }
        }
        if self.groups.is_empty() {
            return Err(Error::invalid("groups: expected at least one KV-cache group, got none"));
        }
        for (index, group) in self.groups.iter().enumerate() {
            if group.block_size == 0 {
                return Err(Error::invalid(format!("groups[{index}].block_size: expected at least 1, got 0")));
            }
            match group.kind {
                GroupKind::Full | GroupKind::Latent => {}
                GroupKind::Chunked { chunk: 0 } => {
                    return Err(Error::invalid(format!("groups[{index}].kind: a chunk has at least 1 token")));
                }
                GroupKind::SlidingWindow { window: 0 } => {
                    return Err(Error::invalid(format!("groups[{index}].kind: a sliding window has at least 1 token")));
                }
                GroupKind::SlidingWindow { .. } | GroupKind::Chunked { .. } | GroupKind::State => {}
            }
        }
        Ok(())
    }

    /// How the engine is split over ranks.
    pub fn shape(&self) -> EngineShape {
        EngineShape { tp: self.tp_size, pp: self.pp_size, dcp: self.dcp_size }
    }

    /// How many of a prompt's tokens are handed over. A decoder computes the last prompt token again, for its logits. That
    /// does no harm to a cache by tokens, but a state must then be the one before that token: the prefill engine of a
    /// model with states computes the prompt without its last token.
    pub fn handed_over(&self, prompt_tokens: u64) -> u64 {
        let state = self.groups.iter().any(|group| group.kind == GroupKind::State);
        prompt_tokens.saturating_sub(state.into())
    }
}
