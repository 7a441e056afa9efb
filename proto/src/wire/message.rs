//! Which type travels as which kind of message, and how long one may be.

use serde::{Serialize, de::DeserializeOwned};

use super::codec::{OLDEST, VERSION, Versions};
use super::limits::*;
use super::{
    AgentMetadata, AgentRegion, HandshakeReply, HandshakeRequest, PeerMessage, RankMetadata, ReportBatch, StepMetadata,
    WorkerReport, codec,
};
use crate::error::{Error, ErrorKind, Result};

/// The names of the message kinds.
pub mod kind {
    /// [`AgentMetadata`](super::AgentMetadata).
    pub const AGENT_METADATA: &str = "agent_metadata";
    /// [`AgentRegion`](super::AgentRegion).
    pub const AGENT_REGION: &str = "agent_region";
    /// [`RankMetadata`](super::RankMetadata).
    pub const RANK_METADATA: &str = "rank_metadata";
    /// [`HandshakeRequest`](super::HandshakeRequest).
    pub const HANDSHAKE_REQUEST: &str = "handshake_request";
    /// [`HandshakeReply`](super::HandshakeReply).
    pub const HANDSHAKE_REPLY: &str = "handshake_reply";
    /// [`PeerMessage`](super::PeerMessage).
    pub const PEER_MESSAGE: &str = "peer_message";
    /// [`StepMetadata`](super::StepMetadata).
    pub const STEP: &str = "step";
    /// [`WorkerReport`](super::WorkerReport).
    pub const WORKER_REPORT: &str = "worker_report";
    /// [`ReportBatch`](super::ReportBatch).
    pub const REPORT_BATCH: &str = "report_batch";
}

/// A type that is an outermost message.
pub trait Message: Serialize + DeserializeOwned {
    /// The kind's name.
    const KIND: &'static str;
    /// The longest encoding that is sent or accepted, in bytes.
    const MAX_BYTES: usize;

    /// The oldest protocol version that is read. Between engines that is [`OLDEST`](codec::OLDEST); a message that stays
    /// within one engine is read in [`VERSION`](codec::VERSION) only, since all processes of an engine are of one release.
    const OLDEST: u16;

    /// The message, encoded in the version [`Message::OLDEST`], which every reader understands. Errors:
    /// [`ErrorKind::Exhausted`] when it is over [`Message::MAX_BYTES`].
    fn to_bytes(&self) -> Result<Vec<u8>> {
        self.to_bytes_in(Self::OLDEST)
    }

    /// The message, encoded for a reader with which this build has `version` in common
    /// ([`Versions::common`](codec::Versions::common)). Errors: as [`Message::to_bytes`].
    fn to_bytes_in(&self, version: u16) -> Result<Vec<u8>> {
        let bytes = codec::encode(Self::KIND, version, self)?;
        if bytes.len() > Self::MAX_BYTES {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("this {} message takes {} bytes, at most {} can be", Self::KIND, bytes.len(), Self::MAX_BYTES),
            ));
        }
        Ok(bytes)
    }

    /// Decodes a message. Errors: those of [`codec::decode`].
    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Ok(Self::from_sender(bytes)?.0)
    }

    /// As [`Message::from_bytes`], with the versions that the sender speaks.
    fn from_sender(bytes: &[u8]) -> Result<(Self, Versions)> {
        codec::decode(Self::KIND, Self::OLDEST, bytes, Self::MAX_BYTES)
    }
}

/// True if `bytes` begin as [`codec::encode`] begins this kind, and are not too many. The body is not decoded.
pub fn begins_as<M: Message>(bytes: &[u8]) -> bool {
    bytes.len() <= M::MAX_BYTES && codec::body_of(M::KIND, M::OLDEST, bytes).is_some()
}

macro_rules! messages {
    ($($type:ty: $kind:expr, $max:expr, $oldest:expr;)*) => {
        $(impl Message for $type {
            const KIND: &'static str = $kind;
            const MAX_BYTES: usize = $max;
            const OLDEST: u16 = $oldest;
        })*
    };
}

messages! {
    AgentMetadata: kind::AGENT_METADATA, MAX_AGENT_METADATA_BYTES, OLDEST;
    AgentRegion: kind::AGENT_REGION, MAX_AGENT_REGION_BYTES, OLDEST;
    RankMetadata: kind::RANK_METADATA, MAX_RANK_METADATA_BYTES, OLDEST;
    HandshakeRequest: kind::HANDSHAKE_REQUEST, MAX_REQUEST_BYTES, OLDEST;
    HandshakeReply: kind::HANDSHAKE_REPLY, MAX_REPLY_BYTES, OLDEST;
    PeerMessage: kind::PEER_MESSAGE, MAX_PEER_MESSAGE_BYTES, OLDEST;
    StepMetadata: kind::STEP, MAX_STEP_BYTES, VERSION;
    WorkerReport: kind::WORKER_REPORT, MAX_REPORT_BYTES, VERSION;
    ReportBatch: kind::REPORT_BATCH, MAX_REPORT_BYTES, VERSION;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_tells_kind_and_version() {
        let step = StepMetadata::default().to_bytes().unwrap();
        assert!(begins_as::<StepMetadata>(&step));
        assert!(!begins_as::<WorkerReport>(&step));
        // The body is not looked at, what is before it is, whole.
        let body = step.windows(5).position(|bytes| bytes == b"\xa4body").unwrap() + 5;
        for len in 0..=step.len() {
            assert_eq!(begins_as::<StepMetadata>(step.get(..len).unwrap()), len >= body, "{len} of {}", step.len());
        }
        let other = codec::encode(StepMetadata::KIND, VERSION, &"anything").unwrap();
        assert!(begins_as::<StepMetadata>(&other));
        let version = other.windows(1).position(|byte| byte == [VERSION as u8]).unwrap();
        let mut newer = other.clone();
        *newer.get_mut(version).unwrap() += 1;
        assert!(!begins_as::<StepMetadata>(&newer));
    }
}
