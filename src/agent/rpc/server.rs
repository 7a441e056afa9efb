//! The serving side: requests of peers to read, write or digest memory of this side.
//!
//! A read request lists pieces of regions, the reply holds their bytes one after the other. A write request holds the bytes
//! too, the reply says that they are in place. The reply to a digest request is the digest of the bytes
//! ([`AgentConfig::verify`](crate::agent::AgentConfig::verify)), whichever way they were moved. A request that is not done is
//! answered by a refusal, which holds a text.
//!
//! UCX could emulate reads and writes over TCP, but an answer to a peer that has just died makes it abort the answering
//! process (`ucp_request.inl`: "Fatal: unexpected error", UCX 1.22): a consumer that is killed would take its producer along.
//! UCX reports the failure of these messages. A message carries many blocks, every piece is checked against the
//! registrations, and memory of any kind works.

use std::collections::VecDeque;
use std::sync::Arc;

use super::wire::{Piece, read_request, total, write_request};
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::core::iov::{self, Iov};
use crate::agent::core::limits::{MAX_WAITING, PART_BYTES};
use crate::agent::core::regions::{Hold, Regions};
use crate::error::{Error, ErrorKind, Result};
use crate::proto::wire::MemoryKind;
use crate::ucx::{MAX_PARTS, MessagePart, Worker};

/// Bytes of replies to one peer that UCX may hold; more requests wait, as numbers only. With less the socket runs dry while
/// the next reply is made.
const REPLY_BYTES: u64 = 4 << 20;
/// Requests of one peer that devices may have before its next read is taken up. Of reads of whole chunks there are fewer by
/// [`REPLY_BYTES`].
const MAX_STAGED_READS: usize = 64;
/// Bytes of answers of any kind to one peer that UCX may hold. A peer that keeps to its window, and whoever deregisters all
/// regions at once, stays far below; one that asks on and takes no answers is cut off.
const MAX_UNSENT: u64 = 64 << 20;
/// The cost of a message besides its payload, in bytes: UCX's request, the header, the operation's entry.
const MESSAGE_COST: u64 = 512;

/// A read that a peer asked for.
pub(crate) struct ReadRequest {
    pub(crate) chunk: u64,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: u64,
}

/// The requests of one peer that are to be served.
#[derive(Default)]
pub(crate) struct Server {
    waiting: VecDeque<ReadRequest>,
    /// Requests that a device has yet to do something for with its memory.
    staged: usize,
    /// The cost of the answers that UCX is not done with, in bytes.
    unsent: u64,
}

/// The contents of a request or reply.
pub(crate) enum Payload {
    /// Bytes of its own.
    Bytes(Vec<u8>),
    /// Parts of registered regions, which UCX sends from where they are.
    Parts { parts: Vec<MessagePart>, holds: Vec<Hold> },
}

impl Payload {
    fn len(&self) -> u64 {
        match self {
            Payload::Bytes(bytes) => bytes.len() as u64,
            Payload::Parts { parts, .. } => parts.iter().map(|part| part.len as u64).sum(),
        }
    }
}

impl Server {
    /// Queues a read.
    ///
    /// # Errors [`ErrorKind::Corrupt`] for a request that is none, [`ErrorKind::Exhausted`] for a peer that does not
    /// keep to its window.
    pub(crate) fn push(&mut self, chunk: u64, data: &[u8]) -> Result<()> {
        let pieces = read_request(data)?;
        has_room(self.waiting.len())?;
        self.waiting.push_back(ReadRequest { chunk, bytes: total(&pieces), pieces });
        Ok(())
    }

    /// A device has something more to do for the peer.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] for a peer that does not keep to its window.
    pub(crate) fn stage(&mut self) -> Result<()> {
        has_room(self.staged)?;
        self.staged += 1;
        Ok(())
    }

    /// A device has done something of it.
    pub(crate) fn has_staged(&mut self) {
        self.staged = self.staged.saturating_sub(1);
    }

    /// The next read to reply to, unless UCX holds too many of this peer's replies, or devices have too much to do for it.
    pub(crate) fn pop(&mut self) -> Option<ReadRequest> {
        if self.unsent >= REPLY_BYTES || self.staged >= MAX_STAGED_READS {
            return None;
        }
        self.waiting.pop_front()
    }

    /// The cost of an answer while UCX holds it.
    ///
    /// # Errors [`ErrorKind::Exhausted`] for a peer that takes no answers.
    pub(crate) fn cost(&self, answer: &Payload) -> Result<u64> {
        let cost = answer.len().saturating_add(MESSAGE_COST);
        if self.unsent.saturating_add(cost) > MAX_UNSENT {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("the peer takes no answers: {} bytes of them wait, at most {MAX_UNSENT} may", self.unsent),
            ));
        }
        Ok(cost)
    }

    /// UCX, or a device that copies them first, holds answers that count as `bytes`.
    pub(crate) fn hold(&mut self, bytes: u64) {
        self.unsent = self.unsent.saturating_add(bytes);
    }

    /// It does not any more.
    pub(crate) fn release(&mut self, bytes: u64) {
        self.unsent = self.unsent.saturating_sub(bytes);
    }
}

fn has_room(waiting: usize) -> Result<()> {
    if waiting < MAX_WAITING {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Exhausted, format!("the peer has made {MAX_WAITING} requests at once")))
}

/// Whether a frame asks this side for something: then more is to be expected.
pub(crate) fn is_request(kind: FrameKind) -> bool {
    matches!(kind, FrameKind::ReadRequest | FrameKind::WriteRequest | FrameKind::DigestRequest)
}

/// The bytes that a peer's read asks for: as parts where UCX can send those (`in_place`), else gathered into a buffer.
pub(crate) fn read(
    request: &ReadRequest,
    peer: PeerId,
    regions: &Regions,
    worker: &Worker,
    in_place: bool,
) -> Result<Payload> {
    let iovs = locate(regions, &request.pieces)?;
    let long = request.bytes >= PART_BYTES.saturating_mul(iovs.len() as u64);
    let hosts = || iovs.iter().all(|iov| iov.range.kind() == MemoryKind::Host);
    if in_place && long && (1..=MAX_PARTS).contains(&iovs.len()) && hosts() {
        let parts = request.pieces.iter().map(|piece| part_of(regions, piece)).collect::<Option<_>>();
        let gone = || Error::new(ErrorKind::Internal, "a region that was found has no registration");
        return Ok(Payload::Parts { parts: parts.ok_or_else(gone)?, holds: hold(regions, &request.pieces, peer) });
    }
    let mut bytes = worker.buffer(usize::try_from(request.bytes).unwrap_or(0));
    iov::gather(&iovs, &mut bytes)?;
    Ok(Payload::Bytes(bytes))
}

fn part_of(regions: &Regions, piece: &Piece) -> Option<MessagePart> {
    let memory = Arc::clone(regions.memory(piece.region)?);
    Some(MessagePart { memory, offset: usize::try_from(piece.offset).ok()?, len: piece.len as usize })
}

/// Does what a write request asks for. The reply is empty.
pub(crate) fn write(data: &[u8], regions: &Regions) -> Result<Payload> {
    let (pieces, bytes) = write_request(data)?;
    iov::scatter(&locate(regions, &pieces)?, bytes)?;
    Ok(Payload::Bytes(Vec::new()))
}

/// The digest that a request asks for.
pub(crate) fn digest(data: &[u8], regions: &Regions) -> Result<Payload> {
    let pieces = read_request(data)?;
    Ok(Payload::Bytes(iov::digest(&locate(regions, &pieces)?)?.to_vec()))
}

/// Where pieces are. Refuses those of regions that may not be used, before any byte is touched.
pub(crate) fn locate(regions: &Regions, pieces: &[Piece]) -> Result<Vec<Iov>> {
    let place = |piece: &Piece| {
        let range = regions.live_range(piece.region)?;
        if piece.offset.checked_add(piece.len.into()).is_none_or(|end| end > range.len()) {
            return Err(Error::new(
                ErrorKind::OutOfRange,
                format!(
                    "{} bytes at {} leave region {} of {} bytes",
                    piece.len,
                    piece.offset,
                    piece.region,
                    range.len()
                ),
            ));
        }
        Ok(Iov { range: *range, offset: piece.offset, len: piece.len })
    };
    pieces.iter().map(place).collect()
}

/// The uses by a peer of the regions that pieces are of.
pub(crate) fn hold(regions: &Regions, pieces: &[Piece], peer: PeerId) -> Vec<Hold> {
    pieces.iter().filter_map(|piece| regions.hold(piece.region, peer)).collect()
}

/// A refusal's frame and text.
pub(crate) fn refusal(error: &Error) -> (FrameKind, Vec<u8>) {
    (FrameKind::Refusal, error.message().as_bytes().to_vec())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::wire::encode_pieces;
    use super::*;

    #[test]
    fn reads_wait_for_busy_devices() {
        let mut server = Server::default();
        // Of no bytes, they cost nothing else.
        for chunk in 0..100 {
            server.push(chunk, &encode_pieces(&[], 0)).unwrap();
        }
        let take = |server: &mut Server| std::iter::from_fn(|| server.pop().map(|_| server.stage().unwrap())).count();
        assert_eq!(take(&mut server), MAX_STAGED_READS);
        server.has_staged();
        assert_eq!(take(&mut server), 1);
        (0..MAX_STAGED_READS).for_each(|_| server.has_staged());
        assert_eq!(take(&mut server), 100 - MAX_STAGED_READS - 1);
        let room = MAX_WAITING - (100 - MAX_STAGED_READS - 1);
        (0..room).for_each(|_| server.stage().unwrap());
        assert_eq!(server.stage().unwrap_err().kind(), ErrorKind::Exhausted);
    }

    #[test]
    fn reads_wait_for_unsent_replies() {
        let mut server = Server::default();
        let piece = Piece { region: 0, offset: 0, len: 512 << 10 };
        for chunk in 0..12 {
            server.push(chunk, &encode_pieces(&[piece], 0)).unwrap();
        }
        let reply = |server: &mut Server| {
            let bytes = server.pop()?.bytes;
            server.hold(bytes);
            Some(bytes)
        };
        let replies = std::iter::from_fn(|| reply(&mut server)).count();
        assert_eq!(replies, 8, "4 MiB");
        server.release(piece.len.into());
        assert_eq!((reply(&mut server), reply(&mut server)), (Some(piece.len.into()), None));
        for _ in 0..9 {
            server.release(piece.len.into());
        }
        assert_eq!(std::iter::from_fn(|| reply(&mut server)).count(), 3, "what is left");
    }
}
