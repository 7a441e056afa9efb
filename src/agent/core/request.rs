//! Transfers that an agent's owner requests.

use super::event::Direction;
use super::ids::{PeerId, TransferId};
use super::limits::{LIGHT_BYTES, LIGHT_PIECES};
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
    /// Returns true if the transfer takes a few microseconds at most.
    pub(crate) fn is_light(&self) -> bool {
        let is_short = |message: &Vec<u8>| message.len() as u64 <= LIGHT_BYTES;
        is_light(&self.plan) && self.message.as_ref().is_none_or(is_short)
    }
}

/// Returns true if a plan's copies take a few microseconds at most.
pub(crate) fn is_light(plan: &CopyPlan) -> bool {
    let pieces = plan.blocks().saturating_mul(plan.segments.len() as u64);
    pieces <= LIGHT_PIECES && plan.bytes() <= LIGHT_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::plan::{BlockPair, Segment};

    fn plan(segments: u32, blocks: u32, len: u64) -> CopyPlan {
        let segment = |at: u32| Segment {
            list: 0,
            local_region: 0,
            remote_region: 0,
            local_offset: u64::from(at) * len * 2,
            remote_offset: 0,
            local_stride: 1 << 20,
            remote_stride: 1 << 20,
            len,
        };
        let ids: Vec<u32> = (0..blocks).collect();
        let lists = vec![BlockPair { local: ids.clone().into(), remote: ids.into() }];
        CopyPlan { segments: (0..segments).map(segment).collect(), lists }
    }

    #[test]
    fn neither_many_bytes_nor_many_pieces_are_light() {
        assert!(is_light(&plan(1, 1, 4096)) && is_light(&plan(1, 1, LIGHT_BYTES)) && is_light(&plan(8, 8, 512)));
        assert!(!is_light(&plan(1, 1, LIGHT_BYTES + 1)), "bytes");
        assert!(!is_light(&plan(1, 65, 8)), "blocks");
        assert!(!is_light(&plan(64, 64, 8)), "segments of blocks");
    }
}
