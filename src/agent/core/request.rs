//! What an owner asks for.

use super::event::Direction;
use super::ids::{PeerId, TransferId};
use super::limits::{LIGHT_BLOCKS, LIGHT_BYTES};
use crate::proto::plan::CopyPlan;

/// A transfer that is to begin.
#[derive(Debug)]
pub(crate) struct TransferRequest {
    pub(crate) id: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) direction: Direction,
    pub(crate) plan: CopyPlan,
    /// What is sent to the peer when every byte was moved; room for it is reserved in the peer's send queue.
    pub(crate) message: Option<Vec<u8>>,
    /// The owner's, for the transfer's event.
    pub(crate) user_data: u64,
}

impl TransferRequest {
    /// Whether it takes some microseconds at most.
    pub(crate) fn is_light(&self) -> bool {
        let is_short = |message: &Vec<u8>| message.len() as u64 <= LIGHT_BYTES;
        is_light(&self.plan) && self.message.as_ref().is_none_or(is_short)
    }
}

/// Whether what a plan moves takes some microseconds at most.
pub(crate) fn is_light(plan: &CopyPlan) -> bool {
    plan.blocks() <= LIGHT_BLOCKS && plan.bytes() <= LIGHT_BYTES
}
