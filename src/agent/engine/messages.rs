//! Messages to and from peers: framed, in order, bounded.

use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::agent::core::event::Event;
use crate::agent::core::frame::{AM_ID, Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::core::in_flight::InFlight;
use crate::agent::engine::Engine;
use crate::agent::peers::inbox::{Item, reserve};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::ucx;

impl Engine {
    /// Reserves room for a message in the peer's send queue, as the handle does before it queues one.
    pub(crate) fn reserve_message(&self, id: PeerId, len: usize) -> Result<()> {
        reserve(&self.peers.get(id)?.unsent, len, self.config.send_queue_bytes)
    }

    /// Sends a message for which room was reserved.
    pub(crate) fn send(&mut self, id: PeerId, data: Vec<u8>, now: Instant) -> Result<()> {
        let peer = self.peers.get_mut(id)?;
        let frame = Frame {
            kind: FrameKind::Data,
            incarnation: self.incarnation,
            connection: peer.connection,
            sequence: peer.next_sequence,
        };
        let reserved = data.len() as u64;
        peer.next_sequence += 1;
        self.stats.messages_sent += 1;
        let posted = self.post_message(id, frame, data, Some(reserved));
        if let Err(error) = &posted {
            // A gap in the numbers would hold up all later messages for ever.
            self.lose(id, error.clone(), now);
        }
        posted
    }

    /// Hands a frame to UCX. `reserved` bytes of the peer's send queue are given back when UCX is done with it.
    pub(crate) fn post_message(
        &mut self,
        id: PeerId,
        frame: Frame,
        data: Vec<u8>,
        reserved: Option<u64>,
    ) -> Result<()> {
        let peer = self.peers.get_mut(id)?;
        if peer.must_wait(frame.kind) {
            peer.wait(frame, data, reserved);
            return Ok(());
        }
        let (header, data) = peer.wrap(frame, data)?;
        let token = self.operations.insert(InFlight::Message { peer: id, reserved: reserved.unwrap_or(0) });
        let posted = peer.endpoint.send_am(AM_ID, &header, data, token);
        if !matches!(posted, Ok(ucx::Posted::Pending)) {
            self.operations.remove(token);
            if let Some(reserved) = reserved {
                peer.unsent.fetch_sub(reserved, Ordering::Relaxed);
            }
        }
        posted.map(drop).map_err(|e| ucx_error(e).context(format!("sending to agent {}", peer.name)))
    }

    /// UCX is done with a message.
    pub(crate) fn message_ended(&mut self, id: PeerId, reserved: u64, result: Result<()>, now: Instant) {
        let Ok(peer) = self.peers.get(id) else { return };
        peer.unsent.fetch_sub(reserved, Ordering::Relaxed);
        if let Err(error) = result {
            // As above: the peer would wait for it for ever.
            self.lose(id, error.context("a message could not be sent"), now);
        }
    }

    /// Takes the messages that have arrived.
    pub(crate) fn receive_messages(&mut self, now: Instant) {
        let refused = self.worker.refused_announcements();
        if std::mem::replace(&mut self.refused, refused) != refused
            && let Some(left_out) = self.drop_log.pass(now)
        {
            log::warn!(
                "agent {}: a message was refused: it was announced by rendezvous, which no agent does unless UCX_RNDV_THRESH \
                 is set for an older kvferry ({left_out} such lines left out)",
                self.config.name
            );
        }
        while let Some(message) = self.worker.poll_message() {
            if let Err(error) = self.receive(&message.header, message.data, now) {
                self.stats.messages_dropped += 1;
                if let Some(left_out) = self.drop_log.pass(now) {
                    log::warn!(
                        "agent {}: a message was dropped: {error} ({left_out} such lines left out)",
                        self.config.name
                    );
                }
            }
        }
    }

    fn receive(&mut self, header: &[u8], data: Vec<u8>, now: Instant) -> Result<()> {
        let frame = Frame::decode(header)?;
        let Some((frame, data)) = self.unwrap(frame, header, data, now)? else { return Ok(()) };
        if frame.kind == FrameKind::Hello {
            return self.on_hello(frame, &data, now);
        }
        let Some(id) = self.peers.find(frame.incarnation) else {
            return Err(Error::not_found(format!("agent {} did not say hello", frame.incarnation)));
        };
        let peer = self.peers.get_mut(id)?;
        if !peer.is_current(frame.connection) {
            return Err(Error::not_found(format!("it belongs to an earlier connection of agent {}", peer.name)));
        }
        peer.silent = false;
        if !matches!(frame.kind, FrameKind::Data | FrameKind::Goodbye) {
            return self.on_service(id, frame, &data, now);
        }
        let item = if frame.kind == FrameKind::Goodbye { Item::Goodbye } else { Item::Data(data) };
        match peer.inbox.take(frame.sequence, item) {
            Ok(due) => {
                if let Err(error) = self.check_waiting(id) {
                    self.lose(id, error.clone(), now);
                    return Err(error);
                }
                for item in due {
                    match item {
                        Item::Data(data) => {
                            self.stats.messages_received += 1;
                            self.events.push_back(Event::Message { peer: id, data });
                        }
                        Item::Goodbye => {
                            let error = Error::new(ErrorKind::PeerDied, "the peer closed the connection");
                            self.lose(id, error, now);
                        }
                    }
                }
                Ok(())
            }
            Err(error) => {
                if error.kind() == ErrorKind::Exhausted {
                    self.lose(id, error.clone(), now);
                }
                Err(error)
            }
        }
    }
}
