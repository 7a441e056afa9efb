//! The asking side of a stream: chunks that arrive, put where they belong.

use std::io::{ErrorKind as IoErrorKind, Read};
use std::net::TcpStream;
use std::time::Instant;

use super::TURN_BYTES;
use super::send::stretches;
use super::wire::{HEADING_BYTES, Heading};
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::engine::Engine;
use crate::agent::rpc::server::Load;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::socket::{self, Stretches};

/// A stream from a peer.
pub(crate) enum Inbound {
    /// It was asked for, and is being made.
    Asked,
    /// There is none to be had.
    Failed,
    /// It is there.
    Up(Receiving),
}

/// A stream from which chunks come.
pub(crate) struct Receiving {
    socket: TcpStream,
    heading: [u8; HEADING_BYTES],
    /// Bytes of the heading that have come.
    heading_len: usize,
    /// Where what is left of the chunk behind it goes.
    left: Option<Stretches>,
    /// Client that were asked for and have not come.
    expected: u32,
    /// Client that have come.
    chunks: u64,
    /// How many of them the peer knows of.
    told: u64,
}

impl Receiving {
    pub(crate) fn new(socket: TcpStream) -> Self {
        Receiving { socket, heading: [0; HEADING_BYTES], heading_len: 0, left: None, expected: 0, chunks: 0, told: 0 }
    }
}

impl Engine {
    /// A chunk was asked for by a stream.
    pub(crate) fn expect_streamed(&mut self, id: PeerId) {
        if let Some(Inbound::Up(receiving)) = self.streams.inbound.get_mut(&id) {
            receiving.expected = receiving.expected.saturating_add(1);
            self.streams.reading.insert(id);
        }
    }

    /// A chunk that was asked for by a stream has come, or will not.
    pub(crate) fn streamed_ended(&mut self, id: PeerId) {
        if let Some(Inbound::Up(receiving)) = self.streams.inbound.get_mut(&id) {
            receiving.expected = receiving.expected.saturating_sub(1);
        }
    }

    /// Takes what has come. Returns whether there was anything.
    pub(crate) fn receive_stream(&mut self, id: PeerId, now: Instant) -> bool {
        let mut receiving = match self.streams.inbound.remove(&id) {
            Some(Inbound::Up(receiving)) => receiving,
            other => {
                self.streams.reading.remove(&id);
                self.streams.inbound.extend(other.map(|inbound| (id, inbound)));
                return false;
            }
        };
        let mut moved = 0;
        let mut over = Vec::new();
        let ended = loop {
            match self.receive_some(id, &mut receiving, &mut over) {
                Ok(0) => break None,
                Ok(bytes) => moved += bytes,
                Err(error) => break Some(error),
            }
            // A chunk that is there is reported before the next, for more to be asked for.
            if moved >= TURN_BYTES || !over.is_empty() {
                break None;
            }
        };
        let expected = receiving.expected;
        if expected == 0 && moved == 0 {
            self.streams.reading.remove(&id);
        }
        match ended {
            None => drop(self.streams.inbound.insert(id, Inbound::Up(receiving))),
            Some(error) => {
                self.streams.reading.remove(&id);
                if let Ok(peer) = self.peers.get_mut(id) {
                    peer.streamed = false;
                }
                if expected > 0 || error.kind() == ErrorKind::Corrupt {
                    self.lose(id, error.context("the stream from the peer broke"), now);
                } else {
                    // The next transfer asks for another.
                    log::debug!("agent {}: the stream from {id} has ended: {error}", self.config.name);
                }
            }
        }
        for chunk in over {
            self.streamed_arrived(id, chunk, now);
        }
        if let Err(error) = self.send_receipt(id) {
            self.lose(id, error, now);
        }
        moved > 0
    }

    /// Says what has come, when all has that was asked for: who reads on says it with the next request.
    fn send_receipt(&mut self, id: PeerId) -> Result<()> {
        let Some(Inbound::Up(receiving)) = self.streams.inbound.get(&id) else { return Ok(()) };
        if receiving.expected > 0 || receiving.told == receiving.chunks {
            return Ok(());
        }
        let received = self.streams.received(id);
        self.post_service(id, FrameKind::StreamReceipt, received, Load::Bytes(Vec::new()), 0)
    }

    /// Takes some of what has come, and notes the chunk that is complete with it. Returns how many bytes there were.
    fn receive_some(&mut self, id: PeerId, receiving: &mut Receiving, over: &mut Vec<u64>) -> Result<u64> {
        let room = receiving.heading.get_mut(receiving.heading_len..).unwrap_or_default();
        if !room.is_empty() {
            let Some(len) = taken((&receiving.socket).read(room))? else { return Ok(0) };
            receiving.heading_len = receiving.heading_len.saturating_add(len);
            receiving.left = None;
            return Ok(len as u64);
        }
        let heading = Heading::decode(&receiving.heading)?;
        let chunks = self.rpc.borrow();
        // Looked up each time: the memory of a chunk that has ended is not touched again.
        let Some(chunk) = chunks.streamed(heading.chunk, id).filter(|chunk| chunk.bytes == u64::from(heading.len))
        else {
            return Err(Error::corrupt(format!(
                "{} bytes came for chunk {}, which was not asked for",
                heading.len, heading.chunk
            )));
        };
        let left = match &mut receiving.left {
            Some(left) => left,
            None => receiving.left.insert(stretches(&chunk.local)?),
        };
        let Some(len) = taken(socket::receive(&receiving.socket, left.left()))? else { return Ok(0) };
        left.advance(len);
        if left.left().is_empty() {
            socket::check_kept(&receiving.socket).map_err(|e| Error::new(ErrorKind::PeerDied, e.to_string()))?;
            receiving.heading_len = 0;
            receiving.chunks = receiving.chunks.saturating_add(1);
            over.push(heading.chunk);
        }
        Ok(len as u64)
    }
}

impl super::Streams {
    /// How many chunks have come from a peer, which the peer is going to be told.
    pub(crate) fn received(&mut self, id: PeerId) -> u64 {
        let Some(Inbound::Up(receiving)) = self.inbound.get_mut(&id) else { return 0 };
        receiving.told = receiving.chunks;
        receiving.chunks
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
