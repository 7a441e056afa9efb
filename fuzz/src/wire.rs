//! Every message that crosses a process boundary: decoding any bytes ends with a value or an error, and a value encodes
//! to bytes that decode to it.

use std::fmt::Debug;
use std::sync::Arc;

use kvferry::proto::handshake::HandshakeCheck;
use kvferry::proto::ids::{EngineId, Incarnation};
use kvferry::proto::wire::{
    AgentMetadata, HandshakeReply, HandshakeRequest, Message, PeerMessage, RankMetadata, ReportBatch, StepMetadata,
    TransferParams, WorkerReport,
};

use super::machines::rank;

fn survives<M: Message + PartialEq + Debug>(bytes: &[u8]) -> Option<M> {
    let value = M::from_bytes(bytes).ok()?;
    let again = value.to_bytes().expect("what was decoded can be encoded");
    assert_eq!(M::from_bytes(&again).expect("what was encoded can be decoded"), value);
    Some(value)
}

/// The first byte chooses the kind of message, the others are the message.
pub fn run(data: &[u8]) {
    let Some((&which, bytes)) = data.split_first() else { return };
    match which % 9 {
        0 => _ = survives::<HandshakeRequest>(bytes),
        1 => {
            let Some(reply) = survives::<HandshakeReply>(bytes) else { return };
            let local = Arc::new(rank::metadata(rank::engine("d"), 77, 8));
            let session = HandshakeCheck::new(local, 7, EngineId::new("engine-p").unwrap(), Some(Incarnation(9)));
            let _ = session.judge(reply);
        }
        2 => {
            if let Some(metadata) = survives::<RankMetadata>(bytes) {
                let _ = metadata.validate();
            }
        }
        3 => {
            if let Some(metadata) = survives::<AgentMetadata>(bytes) {
                let _ = metadata.validate();
            }
            let _ = kvferry::agent::decode_metadata(bytes);
        }
        4 => _ = survives::<PeerMessage>(bytes),
        5 => {
            if let Some(step) = survives::<StepMetadata>(bytes) {
                for load in &step.loads {
                    let _ = load.wanted();
                }
            }
        }
        6 => _ = survives::<WorkerReport>(bytes),
        7 => {
            if let Some(batch) = survives::<ReportBatch>(bytes) {
                let mut twice = batch.clone();
                twice.merge(ReportBatch::new());
                assert_eq!(twice, batch, "the empty batch is the identity");
            }
        }
        _ => {
            if let Ok(params) = serde_json::from_slice::<TransferParams>(bytes) {
                let again = serde_json::to_vec(&params).unwrap();
                assert_eq!(serde_json::from_slice::<TransferParams>(&again).unwrap(), params);
                super::scheduler::try_params(&params);
            }
        }
    }
}
