//! The connection to one agent: the numbers that both sides know it by, and how frames go out over it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::inbox::Inbox;
use crate::agent::core::frame::{AM_ID, FRAME_BYTES, Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::core::in_flight::{InFlight, Operations};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::proto::ids::Incarnation;
use crate::proto::wire::OLDEST;
use crate::secret::{Channel, Initiator};
use crate::ucx::{Endpoint, MessagePart, Posted, UcxError};

/// A connection and what waits to go over it.
pub(crate) struct Connection {
    peer: PeerId,
    /// This agent's incarnation.
    own: Incarnation,
    /// This side's number for it.
    pub(crate) number: u64,
    /// The peer's, once it said hello. From then on it is known to be alive and itself, and transfers are posted.
    pub(crate) remote: Option<u64>,
    /// The protocol version in which this side writes; the oldest that is spoken until the peer said hello.
    pub(crate) version: u16,
    /// When the peer must have said hello. [`PeerTable::set_deadline`](super::table::PeerTable::set_deadline) changes it.
    pub(super) deadline: Option<Instant>,
    pub(crate) endpoint: Endpoint,
    /// UCX's description of the endpoint when it was made: how it tries to reach the peer.
    pub(super) first_lanes: String,
    /// Where it was made to. The peer's hello must say the same.
    pub(super) address: Vec<u8>,
    /// Bytes of messages that UCX is not done with; the handle adds to it before it queues one.
    pub(super) unsent: Arc<AtomicU64>,
    pub(super) next_sequence: u64,
    pub(super) inbox: Inbox,
    /// Whether the peer has left, so that nothing need be said to it.
    pub(super) has_left: bool,
    /// Whether nothing may leave in clear.
    is_keyed: bool,
    /// This side's sealed hello, as long as it may be answered.
    pub(super) initiator: Option<Initiator>,
    pub(super) channel: Option<Channel>,
    /// Whether messages may go out: the hello has, and with a key there is a channel.
    is_open: bool,
    /// Messages for the time when they may: frame, data, what was reserved for it.
    waiting: Vec<(Frame, Vec<u8>, u64)>,
}

impl Connection {
    pub(super) fn new(
        peer: PeerId,
        (own, number): (Incarnation, u64),
        (endpoint, first_lanes): (Endpoint, String),
        address: &[u8],
        is_keyed: bool,
    ) -> Connection {
        Connection {
            peer,
            own,
            number,
            remote: None,
            version: OLDEST,
            deadline: None,
            endpoint,
            first_lanes,
            address: address.to_vec(),
            unsent: Arc::default(),
            next_sequence: 0,
            inbox: Inbox::default(),
            has_left: false,
            is_keyed,
            initiator: None,
            channel: None,
            is_open: false,
            waiting: Vec::new(),
        }
    }

    /// Takes the channel of an exchange. An agent that is its own peer has two, and seals by the one that it has begun.
    pub(super) fn take_channel(&mut self, channel: Channel) {
        match &mut self.channel {
            Some(answering) => answering.sealer = channel.sealer,
            None => self.channel = Some(channel),
        }
    }

    /// Whether a message over the peer's connection `number` belongs to this one.
    pub(super) fn is_current(&self, number: u64) -> bool {
        self.remote == Some(number)
    }

    /// Whether the peer hears what this side says at the end.
    pub(super) fn listens(&self) -> bool {
        self.remote.is_some() && !self.has_left && self.endpoint.failure().is_none()
    }

    /// How many messages the peer did not get: all, before it has answered; else those that UCX has yet to send.
    pub(super) fn undelivered(&self, operations: &Operations) -> u64 {
        if self.remote.is_some() { operations.messages(self.peer) } else { self.next_sequence }
    }

    pub(super) fn frame(&self, kind: FrameKind, sequence: u64) -> Frame {
        Frame { kind, incarnation: self.own, connection: self.number, sequence }
    }

    /// A frame and its data as they go out: as they are without a key, else sealed.
    fn wrap(&mut self, frame: Frame, data: Vec<u8>) -> Result<([u8; FRAME_BYTES], Vec<u8>)> {
        if !self.is_keyed || matches!(frame.kind, FrameKind::SealedHello | FrameKind::SealedAnswer) {
            return Ok((frame.encode(), data));
        }
        let channel = self
            .channel
            .as_mut()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "a frame before the channel is there was not sent"))?;
        let (number, sealed) = channel.sealer.seal(&frame.encode(), &data)?;
        Ok((Frame { kind: FrameKind::Sealed, sequence: number, ..frame }.encode(), sealed))
    }

    /// Hands a frame to UCX. Returns whether the operation is in flight.
    pub(super) fn send(
        &mut self,
        frame: Frame,
        data: Vec<u8>,
        operation: InFlight,
        operations: &mut Operations,
    ) -> Result<bool> {
        let (header, data) = self.wrap(frame, data)?;
        self.begin(operation, operations, |endpoint, token| endpoint.send_am(AM_ID, &header, data, token))
    }

    /// As [`Connection::send`], without a key, for data that UCX sends from where it is.
    pub(super) fn send_parts(
        &mut self,
        frame: Frame,
        parts: &[MessagePart],
        operation: InFlight,
        operations: &mut Operations,
    ) -> Result<bool> {
        let header = frame.encode();
        self.begin(operation, operations, |endpoint, token| endpoint.send_am_parts(AM_ID, &header, parts, token))
    }

    /// Flushes what was written over it. Returns whether that is in flight.
    pub(crate) fn flush(&self, operation: InFlight, operations: &mut Operations) -> Result<bool> {
        self.begin(operation, operations, Endpoint::flush)
    }

    fn begin(
        &self,
        operation: InFlight,
        operations: &mut Operations,
        post: impl FnOnce(&Endpoint, u64) -> std::result::Result<Posted, UcxError>,
    ) -> Result<bool> {
        let token = operations.insert(operation);
        let posted = post(&self.endpoint, token);
        let is_in_flight = matches!(posted, Ok(Posted::Pending));
        if !is_in_flight {
            operations.remove(token);
        }
        let posted = posted.map_err(|e| ucx_error(e).context(format!("sending to agent {}", self.endpoint.name())));
        posted.map(|_| is_in_flight)
    }

    /// Sends a hello or a message, which waits until messages may go out. `reserved` bytes of the send queue are given back when
    /// UCX is done with it.
    pub(super) fn post(
        &mut self,
        frame: Frame,
        data: Vec<u8>,
        reserved: u64,
        operations: &mut Operations,
    ) -> Result<()> {
        if !self.is_open && frame.kind == FrameKind::Data {
            self.waiting.push((frame, data, reserved));
            return Ok(());
        }
        let sent = self.send(frame, data, InFlight::Message { peer: self.peer, reserved }, operations);
        if !matches!(sent, Ok(true)) {
            self.unsent.fetch_sub(reserved, Ordering::Relaxed);
        }
        sent.map(drop)
    }

    /// Lets messages go out from now on: those that have waited for it first.
    pub(super) fn begin_messages(&mut self, operations: &mut Operations) -> Result<()> {
        self.is_open = true;
        for (frame, data, reserved) in std::mem::take(&mut self.waiting) {
            self.post(frame, data, reserved, operations)?;
        }
        Ok(())
    }

    /// Says something at the end, which may fail.
    pub(super) fn say(&mut self, kind: FrameKind, sequence: u64, operations: &mut Operations) {
        let _ = self.send(self.frame(kind, sequence), Vec::new(), InFlight::Goodbye, operations);
    }

    /// Says goodbye, unless there is nobody to hear it. Whatever UCX has not got away when the endpoint is closed is lost.
    pub(super) fn say_goodbye(&mut self, operations: &mut Operations) {
        if self.listens() {
            self.say(FrameKind::Goodbye, self.next_sequence, operations);
        }
    }
}
