//! Messages to and from peers: framed, in order, bounded.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::event::Event;
use super::ferry::Engine;
use super::hello::{AM_ID, Frame, FrameKind};
use super::ids::PeerId;
use super::operations::InFlight;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::ucx;

/// Messages held back, and their bytes, until an earlier one arrives. UCX reorders only what is under way at a time,
/// so a sender that exceeds this is broken.
const MAX_HELD: usize = 4096;
const MAX_HELD_BYTES: usize = 256 << 20;

/// A message, or the goodbye that ends the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item {
    Data(Vec<u8>),
    Goodbye,
}

impl Item {
    fn len(&self) -> usize {
        match self {
            Item::Data(data) => data.len(),
            Item::Goodbye => 0,
        }
    }
}

/// Puts a connection's messages back into the order in which they were sent.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    next: u64,
    held: BTreeMap<u64, Item>,
    held_bytes: usize,
}

impl Inbox {
    /// Bytes of the messages that are held back.
    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Takes message number `sequence` and returns those whose turn has come. `Err`: too many are held back.
    pub(super) fn take(&mut self, sequence: u64, item: Item) -> Result<Vec<Item>> {
        // Beside numbers of the past: a second one of a number that is held.
        if sequence < self.next || self.held.contains_key(&sequence) {
            return Err(Error::corrupt(format!("message {sequence} came twice")));
        }
        self.held_bytes += item.len();
        self.held.insert(sequence, item);
        let mut due = Vec::new();
        while let Some(item) = self.held.remove(&self.next) {
            self.held_bytes -= item.len();
            self.next += 1;
            due.push(item);
        }
        if self.held.len() > MAX_HELD || self.held_bytes > MAX_HELD_BYTES {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("message {} is missing, and {} after it have arrived", self.next, self.held.len()),
            ));
        }
        Ok(due)
    }
}

impl Engine {
    /// Reserves room for a message in the peer's send queue, as the handle does before it queues one.
    pub(super) fn reserve_message(&self, id: PeerId, len: usize) -> Result<()> {
        reserve(&self.peers.get(id)?.unsent, len, self.config.send_queue_bytes)
    }

    /// Sends a message for which room was reserved.
    pub(super) fn send(&mut self, id: PeerId, data: Vec<u8>, now: Instant) -> Result<()> {
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
    pub(super) fn post_message(
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
    pub(super) fn message_ended(&mut self, id: PeerId, reserved: u64, result: Result<()>, now: Instant) {
        let Ok(peer) = self.peers.get(id) else { return };
        peer.unsent.fetch_sub(reserved, Ordering::Relaxed);
        if let Err(error) = result {
            // As above: the peer would wait for it for ever.
            self.lose(id, error.context("a message could not be sent"), now);
        }
    }

    /// Takes the messages that have arrived.
    pub(super) fn receive_messages(&mut self, now: Instant) {
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

/// Adds `len` to the bytes of a send queue unless that passes `limit`. A message over the limit may go alone.
pub(super) fn reserve(unsent: &std::sync::atomic::AtomicU64, len: usize, limit: u64) -> Result<()> {
    let reserved = unsent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bytes| {
        let after = bytes.saturating_add(len as u64);
        (bytes == 0 || after <= limit).then_some(after)
    });
    match reserved {
        Ok(_) => Ok(()),
        Err(bytes) => Err(Error::new(
            ErrorKind::Exhausted,
            format!("{bytes} bytes of messages to this peer are not sent yet, {limit} are allowed; try again later"),
        )),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_in_order_whatever_the_order_of_arrival() {
        let mut inbox = Inbox::default();
        let item = |byte| Item::Data(vec![byte]);
        assert!(inbox.take(1, item(1)).unwrap().is_empty());
        assert!(inbox.take(3, Item::Goodbye).unwrap().is_empty());
        assert!(inbox.take(2, item(2)).unwrap().is_empty());
        assert_eq!(inbox.take(0, item(0)).unwrap(), [item(0), item(1), item(2), Item::Goodbye]);
        assert_eq!(inbox.take(4, item(4)).unwrap(), [item(4)]);
        assert_eq!(inbox.held_bytes, 0);
    }

    #[test]
    fn a_number_that_came_before_is_refused() {
        let mut inbox = Inbox::default();
        let empty = || Item::Data(Vec::new());
        inbox.take(0, empty()).unwrap();
        inbox.take(5, empty()).unwrap();
        assert_eq!(inbox.take(0, empty()).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(inbox.take(5, empty()).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn holding_back_has_a_bound() {
        let mut inbox = Inbox::default();
        let refused = (1..).find_map(|number| inbox.take(number, Item::Data(Vec::new())).err()).unwrap();
        assert_eq!(refused.kind(), ErrorKind::Exhausted);
        assert!(refused.message().contains("message 0 is missing"), "{refused}");
    }

    #[test]
    fn the_send_queue_has_a_bound_but_takes_one_large_message() {
        let unsent = std::sync::atomic::AtomicU64::new(0);
        reserve(&unsent, 500, 100).unwrap();
        assert_eq!(reserve(&unsent, 1, 100).unwrap_err().kind(), ErrorKind::Exhausted);
        unsent.store(40, Ordering::Relaxed);
        reserve(&unsent, 60, 100).unwrap();
        assert!(reserve(&unsent, 1, 100).is_err());
    }
}
