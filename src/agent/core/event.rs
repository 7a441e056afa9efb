//! The events of an agent for its owner.

use std::time::Instant;

use super::ids::{PeerId, TransferId};
use crate::error::{Error, Result};
pub use crate::mem::Direction;
use crate::proto::ids::Incarnation;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A transfer is over. Each transfer gets exactly one of these, after the last of its operations has ended: from
    /// then on nothing of it reads or writes memory.
    TransferDone {
        /// The transfer.
        id: TransferId,
        /// User data that its owner gave with it.
        user_data: u64,
        /// Its peer.
        peer: PeerId,
        /// Whether every byte was moved. After an error the destination's contents are undefined.
        result: Result<()>,
        /// Bytes whose operations succeeded.
        bytes: u64,
        /// UCX operations posted.
        operations: u64,
        /// When the first operation was posted; equal to `finished_at` when none was.
        posted_at: Instant,
        /// When the last operation was posted; equal to `posted_at` when none was.
        all_posted_at: Instant,
        /// When the last operation ended.
        finished_at: Instant,
    },
    /// A message arrived. Messages of one peer arrive in the order in which they were sent.
    Message {
        /// The sender.
        peer: PeerId,
        /// Its bytes.
        data: Vec<u8>,
    },
    /// The peer said hello: it is alive and is the incarnation that was expected. Comes once per [`PeerId`], on the
    /// side that connected and on the side that was connected to.
    PeerConnected {
        /// The peer; for a side that was connected to, a new id.
        peer: PeerId,
        /// Its name.
        name: String,
        /// Which way bytes go between it and this agent: UCX's lanes with their devices, and how host memory is moved.
        way: String,
        /// Its incarnation.
        incarnation: Incarnation,
        /// The newest protocol version that both speak.
        version: u16,
    },
    /// The peer is gone, its id is no longer valid, and its transfers end with errors (their own
    /// [`Event::TransferDone`]s may still follow). Connecting again gives a new id. Comes once per [`PeerId`],
    /// except for one that was disconnected by its own side.
    PeerLost {
        /// The peer.
        peer: PeerId,
        /// Why.
        error: Error,
    },
}

impl Event {
    /// The end of a transfer of which nothing is known to have been moved.
    pub(crate) fn not_done((id, user_data): (TransferId, u64), peer: PeerId, error: Error, now: Instant) -> Event {
        Event::TransferDone {
            id,
            user_data,
            peer,
            result: Err(error),
            bytes: 0,
            operations: 0,
            posted_at: now,
            all_posted_at: now,
            finished_at: now,
        }
    }
}
