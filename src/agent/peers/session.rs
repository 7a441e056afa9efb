//! How a frame goes out over a connection, and with a key the connection's part in it.

use crate::agent::core::frame::{FRAME_BYTES, Frame, FrameKind};
use crate::error::{Error, ErrorKind, Result};
use crate::secret::{Channel, Initiator};

/// A connection's share.
#[derive(Default)]
pub(super) struct Session {
    /// Whether nothing may leave in clear.
    pub(super) keyed: bool,
    /// Our hello, as long as it may be answered.
    pub(super) initiator: Option<Initiator>,
    pub(super) channel: Option<Channel>,
    /// Whether messages may go out: the hello has, and with a key there is a channel.
    pub(super) is_open: bool,
    /// Messages for the time when they may: frame, data, what was reserved for it.
    pub(super) waiting: Vec<(Frame, Vec<u8>, Option<u64>)>,
}

impl Session {
    /// A frame and its data as they go out: as they are without a key, else sealed.
    pub(super) fn wrap(&mut self, frame: Frame, data: Vec<u8>) -> Result<([u8; FRAME_BYTES], Vec<u8>)> {
        let plain = !self.keyed || matches!(frame.kind, FrameKind::SealedHello | FrameKind::SealedAnswer);
        if plain {
            return Ok((frame.encode(), data));
        }
        let channel = self
            .channel
            .as_mut()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "a frame before the channel is there was not sent"))?;
        let (number, sealed) = channel.sealer.seal(&frame.encode(), &data)?;
        Ok((Frame { kind: FrameKind::Sealed, sequence: number, ..frame }.encode(), sealed))
    }
}
