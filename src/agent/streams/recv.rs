//! The asking side of a stream: chunks that arrive, put where they belong.

use std::cell::RefCell;
use std::io::{ErrorKind as IoErrorKind, Read};
use std::net::TcpStream;

use super::wire::{HEADING_BYTES, Heading};
use super::{Io, Streams, TURN_BYTES, stretches};
use crate::agent::core::effect::{Effect, Effects};
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::rpc::client::{Answered, Client};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::socket::{self, Stretches};

/// A stream from a peer.
pub(crate) enum Inbound {
    /// It was asked for, and is being made.
    Asked,
    /// There is none to be had.
    Failed,
    /// It is there.
    Up(Receiver),
}

/// A stream from which chunks come.
pub(crate) struct Receiver {
    socket: TcpStream,
    heading: [u8; HEADING_BYTES],
    /// Bytes of the heading that have come.
    heading_len: usize,
    /// Where what is left of the chunk behind it goes.
    left: Option<Stretches>,
    /// Chunks that were asked for and have not come.
    expected: u32,
    /// Chunks that have come.
    chunks: u64,
    /// How many of them the peer knows of.
    told: u64,
    /// How many bytes have to be there for the socket to be one that has changed.
    wakes_at: u64,
}

impl Receiver {
    pub(crate) fn new(socket: TcpStream) -> Self {
        Receiver {
            socket,
            heading: [0; HEADING_BYTES],
            heading_len: 0,
            left: None,
            expected: 0,
            chunks: 0,
            told: 0,
            wakes_at: 1,
        }
    }

    /// Nothing has come that was not taken: says how much has to come for the thread to be woken, which is never more than
    /// what is left of the chunk.
    fn wake_later(&mut self, worth: u64) {
        let bytes = match worth {
            1 => 1,
            _ => worth.min(self.left.as_ref().map_or(1, Stretches::len)).max(1),
        };
        // Of a chunk that is nearly there the rest is worth a call, of a rate that has hardly changed nothing is.
        if bytes < self.wakes_at || bytes / 2 > self.wakes_at {
            // Without it the thread is woken for each packet.
            if socket::set_least_readable(&self.socket, bytes).is_ok() {
                self.wakes_at = bytes;
            }
        }
    }
}

impl Streams {
    /// Bytes that have arrived and were not read yet.
    #[cfg(test)]
    pub(crate) fn unread(&self) -> u64 {
        let unread = |inbound: &Inbound| match inbound {
            Inbound::Up(receiver) => rustix::io::ioctl_fionread(&receiver.socket).unwrap_or(0),
            _ => 0,
        };
        self.inbound.values().map(unread).sum()
    }

    /// A chunk was asked for by a stream.
    pub(crate) fn expect(&mut self, id: PeerId) {
        if let Some(Inbound::Up(receiver)) = self.inbound.get_mut(&id) {
            receiver.expected = receiver.expected.saturating_add(1);
            self.reading.insert(id);
        }
    }

    /// A chunk that was asked for by a stream has come, or will not.
    pub(crate) fn ended(&mut self, id: PeerId) {
        if let Some(Inbound::Up(receiver)) = self.inbound.get_mut(&id) {
            receiver.expected = receiver.expected.saturating_sub(1);
        }
    }

    /// How many chunks have come from a peer, which the peer is going to be told.
    pub(crate) fn received(&mut self, id: PeerId) -> u64 {
        let Some(Inbound::Up(receiver)) = self.inbound.get_mut(&id) else { return 0 };
        receiver.told = receiver.chunks;
        receiver.chunks
    }

    /// Takes what has come. Returns whether there was anything.
    pub(crate) fn receive(&mut self, id: PeerId, io: &mut Io<'_>) -> bool {
        let Some(Inbound::Up(receiver)) = self.inbound.get_mut(&id) else {
            self.reading.remove(&id);
            return false;
        };
        let (mut moved, mut complete) = (0, None);
        let ended = loop {
            match receiver.receive_some(id, io.rpc, &mut complete) {
                Ok(0) => break None,
                Ok(bytes) => moved += bytes,
                Err(error) => break Some(error),
            }
            // A chunk that is there is reported before the next, for more to be asked for.
            if moved >= TURN_BYTES || complete.is_some() {
                break None;
            }
        };
        let expected = receiver.expected;
        if let Ok(peer) = io.peers.get_mut(id) {
            peer.flow.moved(moved, io.now);
            if moved > 0 {
                peer.liveness.heard(io.now);
            }
            if moved == 0 && ended.is_none() {
                receiver.wake_later(peer.flow.pace().worth_waking());
            }
        }
        if moved > 0 {
            io.peers.note_reading(id);
        }
        if ended.is_some() || expected == 0 && moved == 0 {
            self.reading.remove(&id);
        }
        if let Some(error) = ended {
            self.inbound.remove(&id);
            if let Ok(peer) = io.peers.get_mut(id) {
                peer.streamed = false;
            }
            if expected > 0 || error.kind() == ErrorKind::Corrupt {
                io.effects.lose(id, error.context("the stream from the peer broke"));
            } else {
                // The next transfer asks for another.
                log::debug!("agent {}: the stream from {id} has ended: {error}", self.name);
            }
        }
        if let Some(Answered { chunk, departure, result, .. }) =
            complete.and_then(|number| io.rpc.borrow_mut().take_streamed(number))
        {
            if let Ok(peer) = io.peers.get_mut(id) {
                peer.flow.arrive(departure, chunk.bytes, io.now);
            }
            io.effects.push(Effect::OperationEnded(chunk.end(result)));
            self.ended(id);
        }
        self.send_receipt(id, io.effects);
        moved > 0
    }

    /// Says what has come, when all has that was asked for: who reads on says it with the next request.
    fn send_receipt(&mut self, id: PeerId, effects: &mut Effects) {
        let Some(Inbound::Up(receiver)) = self.inbound.get(&id) else { return };
        if receiver.expected == 0 && receiver.told != receiver.chunks {
            let received = self.received(id);
            effects.send(id, FrameKind::StreamReceipt, received, Vec::new());
        }
    }
}

impl Receiver {
    /// Takes some of what has come, and notes the chunk that is complete with it. Returns how many bytes there were.
    fn receive_some(&mut self, id: PeerId, rpc: &RefCell<Client>, complete: &mut Option<u64>) -> Result<u64> {
        let room = self.heading.get_mut(self.heading_len..).unwrap_or_default();
        if !room.is_empty() {
            let Some(len) = taken((&self.socket).read(room))? else { return Ok(0) };
            self.heading_len = self.heading_len.saturating_add(len);
            self.left = None;
            return Ok(len as u64);
        }
        let heading = Heading::decode(&self.heading)?;
        let rpc = rpc.borrow();
        // Looked up each time: the memory of a chunk that has ended is not touched again.
        let Some(chunk) = rpc.streamed(heading.chunk, id).filter(|chunk| chunk.bytes == u64::from(heading.len)) else {
            return Err(Error::corrupt(format!(
                "{} bytes came for chunk {}, which was not asked for",
                heading.len, heading.chunk
            )));
        };
        let left = match &mut self.left {
            Some(left) => left,
            None => self.left.insert(stretches(&chunk.local)?),
        };
        let Some(len) = taken(socket::receive(&self.socket, left.left()))? else { return Ok(0) };
        left.advance(len);
        if left.left().is_empty() {
            socket::check_kept(&self.socket).map_err(|e| Error::new(ErrorKind::PeerDied, e.to_string()))?;
            self.heading_len = 0;
            self.chunks = self.chunks.saturating_add(1);
            *complete = Some(heading.chunk);
        }
        Ok(len as u64)
    }
}

/// The bytes that a call has read; `None` if there are none yet.
fn taken(read: std::io::Result<usize>) -> Result<Option<usize>> {
    match read {
        Ok(0) => Err(Error::new(ErrorKind::PeerDied, "the peer closed it")),
        Ok(len) => Ok(Some(len)),
        Err(error) if matches!(error.kind(), IoErrorKind::WouldBlock | IoErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(Error::new(ErrorKind::PeerDied, error.to_string())),
    }
}
