//! The frame around every active message between agents.

use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::Incarnation;

/// The active-message id that all agents use.
pub(crate) const AM_ID: u16 = 0x4b;

/// Length of a [`Frame`] in bytes.
pub(crate) const FRAME_BYTES: usize = 32;

const MAGIC: [u8; 4] = *b"KVFM";
const VERSION: u8 = 2;

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// A [`Hello`].
    Hello,
    /// A message of the agents' owners.
    Data,
    /// The sender leaves; nothing follows on this connection.
    Goodbye,
    /// Asks for bytes of the receiver's regions.
    ReadRequest,
    /// Holds them.
    ReadReply,
    /// Holds bytes for the receiver's regions.
    WriteRequest,
    /// Says that they are in place.
    WriteReply,
    /// Asks for the digest of ranges of the receiver's regions.
    DigestRequest,
    /// Brings it.
    DigestReply,
    /// A hello for holders of the key: the first message of a Noise exchange.
    SealedHello,
    /// The second.
    SealedAnswer,
    /// Any other frame, sealed with its header.
    Sealed,
    /// Says why a request is not done.
    Refusal,
    /// Asks to release a region of the sender's, by its index, that the receiver may use by itself.
    RegionRevoked,
    /// Says that nothing of it is copied or mapped any more.
    RegionReleased,
    /// Says that memory of the receiver's is in use for longer than an answer takes: the sender answers, or leaves, when it has ended.
    InUse,
}

/// The active-message header: who sends, over which of its connections, and as which message of that connection. UCX
/// may complete a small message before a large one sent earlier; the sequence number restores the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: FrameKind,
    /// The sender's incarnation.
    pub(crate) incarnation: Incarnation,
    /// The sender's number for the connection, drawn when it made its endpoint.
    pub(crate) connection: u64,
    /// Counts the connection's messages of kind data and the goodbye after them from 0; in requests and replies, the
    /// chunk's number; in revocations, the region's index; in hellos, which of the sender's hellos it is, from 1 on, and in
    /// answers to sealed ones, which it answers; in sealed frames, their number.
    pub(crate) sequence: u64,
}

impl Frame {
    /// The number of a digest request for no bytes, which asks for a sign of life. No chunk has it.
    pub(crate) const SIGN_OF_LIFE: u64 = u64::MAX;

    pub(crate) fn encode(&self) -> [u8; FRAME_BYTES] {
        let kind = match self.kind {
            FrameKind::Hello => 1,
            FrameKind::Data => 2,
            FrameKind::Goodbye => 3,
            FrameKind::ReadRequest => 4,
            FrameKind::ReadReply => 5,
            FrameKind::WriteRequest => 6,
            FrameKind::WriteReply => 7,
            FrameKind::DigestRequest => 8,
            FrameKind::DigestReply => 9,
            FrameKind::SealedHello => 10,
            FrameKind::SealedAnswer => 11,
            FrameKind::Sealed => 12,
            FrameKind::Refusal => 13,
            FrameKind::RegionRevoked => 18,
            FrameKind::RegionReleased => 19,
            FrameKind::InUse => 20,
        };
        let [m0, m1, m2, m3] = MAGIC;
        let start = u64::from_le_bytes([m0, m1, m2, m3, VERSION, kind, 0, 0]);
        let mut bytes = [0; FRAME_BYTES];
        let words = [start, self.incarnation.0, self.connection, self.sequence];
        for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Frame> {
        let (Some(([m0, m1, m2, m3, version, kind, _, _], rest)), true) =
            (bytes.split_first_chunk::<8>(), bytes.len() == FRAME_BYTES)
        else {
            return Err(Error::corrupt(format!("a message header of {} bytes, expected {FRAME_BYTES}", bytes.len())));
        };
        if [*m0, *m1, *m2, *m3] != MAGIC {
            return Err(Error::corrupt("a message header that is not kvferry's"));
        }
        if *version != VERSION {
            return Err(Error::new(
                ErrorKind::VersionMismatch,
                format!("a message header of version {version}, this build speaks {VERSION}"),
            ));
        }
        let kind = match kind {
            1 => FrameKind::Hello,
            2 => FrameKind::Data,
            3 => FrameKind::Goodbye,
            4 => FrameKind::ReadRequest,
            5 => FrameKind::ReadReply,
            6 => FrameKind::WriteRequest,
            7 => FrameKind::WriteReply,
            8 => FrameKind::DigestRequest,
            9 => FrameKind::DigestReply,
            10 => FrameKind::SealedHello,
            11 => FrameKind::SealedAnswer,
            12 => FrameKind::Sealed,
            13 => FrameKind::Refusal,
            // 14 to 17 are an older kvferry's words about streams, which it says only to a side whose hello wants them.
            18 => FrameKind::RegionRevoked,
            19 => FrameKind::RegionReleased,
            20 => FrameKind::InUse,
            other => return Err(Error::corrupt(format!("a message of the unknown kind {other}"))),
        };
        let mut words = rest.chunks_exact(8).map(|word| word.try_into().map(u64::from_le_bytes).unwrap_or(0));
        let mut next = || words.next().unwrap_or(0);
        Ok(Frame { kind, incarnation: Incarnation(next()), connection: next(), sequence: next() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn frame_survives_the_wire() {
        let frame =
            Frame { kind: FrameKind::Data, incarnation: Incarnation(7), connection: u64::MAX, sequence: 1 << 40 };
        let bytes = frame.encode();
        assert_eq!(Frame::decode(&bytes).unwrap(), frame);
        for cut in 0..FRAME_BYTES {
            assert_eq!(Frame::decode(&bytes[..cut]).unwrap_err().kind(), ErrorKind::Corrupt);
        }
        for (index, value, kind) in
            [(0, b'X', ErrorKind::Corrupt), (4, 1, ErrorKind::VersionMismatch), (5, 99, ErrorKind::Corrupt)]
        {
            let mut bad = bytes;
            bad[index] = value;
            assert_eq!(Frame::decode(&bad).unwrap_err().kind(), kind);
        }
        for version in [1, 3] {
            let mut other = bytes;
            other[4] = version;
            let error = Frame::decode(&other).unwrap_err();
            assert!(error.message().contains(&format!("version {version}, this build speaks 2")), "{error}");
        }
    }
}
