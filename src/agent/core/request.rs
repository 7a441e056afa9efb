//! What an owner asks for.

use super::event::Direction;
use super::ids::{PeerId, TransferId};
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
