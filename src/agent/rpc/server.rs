//! Transfers that the peer serves: for connections without one-sided reads and writes, such as TCP.
//!
//! UCX emulates those by messages that the peer's UCX answers, but an answer to a peer that has just died makes UCX
//! abort the answering process (`ucp_request.inl`: "Fatal: unexpected error", UCX 1.22): a consumer that is killed
//! would take its producer along. So here the agents themselves exchange messages, whose failure UCX reports. A
//! message carries many blocks, the owner checks every range against its registrations, and memory of any kind works.
//!
//! - read: a request lists pieces of the peer's regions, the reply holds their bytes one after the other;
//! - write: a request lists pieces and holds their bytes, the reply says that they are in place;
//! - digest: a request lists pieces, the reply holds the digest of their bytes ([`AgentConfig::verify`](crate::agent::AgentConfig::verify)), whichever way
//!   the bytes were moved.
//!
//! A request that is not done is answered by a refusal, which holds a text. Requests and answers are matched by a chunk
//! number that the asking side never uses twice.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::wire::{Piece, decode_pieces, read_request, total};
use crate::agent::core::frame::{AM_ID, Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::core::in_flight::InFlight;
use crate::agent::core::iov::{self, Iov};
use crate::agent::core::limits::{MAX_WAITING, PART_BYTES};
use crate::agent::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::proto::wire::MemoryKind;
use crate::ucx::{MAX_PARTS, Part, Posted};

/// Bytes of replies to one peer that UCX may hold; more requests wait, as numbers only. With 1 MiB the socket runs dry while
/// the next reply is made.
const REPLY_BYTES: u64 = 4 << 20;
/// A read that a peer asked for.
struct ReadRequest {
    chunk: u64,
    pieces: Vec<Piece>,
    bytes: u64,
}

/// What is to be served to one peer.
#[derive(Default)]
pub(crate) struct Server {
    waiting: VecDeque<ReadRequest>,
    /// Bytes of replies that UCX is not done with.
    unsent: u64,
}

fn is_request(kind: FrameKind) -> bool {
    use FrameKind::{DigestRequest, ReadRequest, StreamQuestion, StreamRequest, WriteRequest};
    matches!(kind, ReadRequest | WriteRequest | DigestRequest | StreamQuestion | StreamRequest)
}

/// What a request or reply holds.
pub(crate) enum Load {
    /// Bytes of its own.
    Bytes(Vec<u8>),
    /// Parts of registered regions, which UCX sends from where they are.
    Parts { parts: Vec<Part>, regions: Vec<u32> },
}

impl Engine {
    /// Sends a request or reply; `held` bytes of the peer's replies are accounted until UCX is done with it.
    pub(crate) fn post_service(
        &mut self,
        id: PeerId,
        kind: FrameKind,
        chunk: u64,
        load: Load,
        held: u64,
    ) -> Result<()> {
        let peer = self.peers.get_mut(id)?;
        let frame = Frame { kind, incarnation: self.incarnation, connection: peer.connection, sequence: chunk };
        let (posted, token) = match load {
            Load::Bytes(data) => {
                let (header, data) = peer.wrap(frame, data)?;
                let token = self.operations.insert(InFlight::Service { peer: id, held, regions: Vec::new() });
                (peer.endpoint.send_am(AM_ID, &header, data, token), token)
            }
            Load::Parts { parts, regions } => {
                self.regions.enter(&regions);
                let token = self.operations.insert(InFlight::Service { peer: id, held, regions });
                (peer.endpoint.send_am_parts(AM_ID, &frame.encode(), &parts, token), token)
            }
        };
        if matches!(posted, Ok(Posted::Pending)) {
            peer.server.unsent += held;
        } else if let Some(InFlight::Service { regions, .. }) = self.operations.remove(token) {
            self.regions.leave(&regions);
        }
        posted.map(drop).map_err(|e| ucx_error(e).context(format!("sending to agent {}", peer.name)))
    }

    /// UCX is done with a request or reply.
    pub(crate) fn service_ended(&mut self, id: PeerId, held: u64, result: Result<()>, now: Instant) {
        let Ok(peer) = self.peers.get_mut(id) else { return };
        peer.server.unsent = peer.server.unsent.saturating_sub(held);
        match result {
            Ok(()) => self.serve_reads(id, now),
            // The other side would wait for it for ever.
            Err(error) => self.lose(id, error.context("a request or reply could not be sent"), now),
        }
    }

    /// Takes a request or reply that arrived from a peer over its current connection.
    pub(crate) fn on_service(&mut self, id: PeerId, frame: Frame, data: &[u8], now: Instant) -> Result<()> {
        // After a reply or a receipt nothing more is to be expected, or what is under way tells.
        if is_request(frame.kind) {
            self.served_at = Some(now);
        }
        match frame.kind {
            FrameKind::ReadRequest => self.on_read_request(id, frame.sequence, data, now),
            FrameKind::WriteRequest => {
                let reply = self.put_in_place(data).map(|()| Load::Bytes(Vec::new()));
                self.reply(id, FrameKind::WriteReply, frame.sequence, reply, 0, now);
                Ok(())
            }
            FrameKind::StreamQuestion => self.on_stream_question(id, now),
            FrameKind::StreamOffer => self.on_stream_offer(id, data, now),
            FrameKind::StreamRequest => self.on_stream_request(id, frame.sequence, data, now),
            FrameKind::StreamReceipt => self.on_stream_receipt(id, frame.sequence, now),
            FrameKind::DigestRequest => {
                let digest = read_request(data).and_then(|pieces| iov::digest(&self.locate(&pieces)?));
                let reply = digest.map(|digest| Load::Bytes(digest.to_vec()));
                self.reply(id, FrameKind::DigestReply, frame.sequence, reply, 0, now);
                Ok(())
            }
            FrameKind::ReadReply | FrameKind::WriteReply | FrameKind::DigestReply | FrameKind::Refusal => {
                self.on_reply(id, frame, data, now)
            }
            // Taken before it comes here.
            FrameKind::Hello | FrameKind::Data | FrameKind::Goodbye => Ok(()),
            FrameKind::SealedHello | FrameKind::SealedAnswer | FrameKind::Sealed => Ok(()),
        }
    }

    fn on_read_request(&mut self, id: PeerId, chunk: u64, data: &[u8], now: Instant) -> Result<()> {
        let pieces = read_request(data)?;
        let bytes = total(&pieces);
        let peer = self.peers.get_mut(id)?;
        if peer.server.waiting.len() >= MAX_WAITING {
            let error = Error::new(ErrorKind::Exhausted, format!("the peer has asked for {MAX_WAITING} reads at once"));
            self.lose(id, error.clone(), now);
            return Err(error);
        }
        peer.server.waiting.push_back(ReadRequest { chunk, pieces, bytes });
        self.serve_reads(id, now);
        Ok(())
    }

    /// Replies to reads as long as UCX does not hold too many of this peer's replies.
    fn serve_reads(&mut self, id: PeerId, now: Instant) {
        while let Ok(peer) = self.peers.get_mut(id) {
            if peer.server.unsent >= REPLY_BYTES {
                return;
            }
            let Some(request) = peer.server.waiting.pop_front() else { return };
            let keyed = self.secrets.is_keyed();
            let load = self.locate(&request.pieces).and_then(|iovs| self.load(&request, &iovs, !keyed));
            self.reply(id, FrameKind::ReadReply, request.chunk, load, request.bytes, now);
        }
    }

    /// What a request asked for: as parts where UCX can send those, else gathered into a buffer.
    fn load(&self, request: &ReadRequest, iovs: &[Iov], parts: bool) -> Result<Load> {
        let long = request.bytes >= PART_BYTES.saturating_mul(iovs.len() as u64);
        let hosts = || iovs.iter().all(|iov| iov.range.kind() == MemoryKind::Host);
        if parts && long && (1..=MAX_PARTS).contains(&iovs.len()) && hosts() {
            let regions = request.pieces.iter().map(|piece| piece.region).collect();
            let parts = request.pieces.iter().map(|piece| self.part_of(piece)).collect::<Option<_>>();
            let gone = || Error::new(ErrorKind::Internal, "a region that was found has no registration");
            return Ok(Load::Parts { parts: parts.ok_or_else(gone)?, regions });
        }
        let mut bytes = self.worker.buffer(usize::try_from(request.bytes).unwrap_or(0));
        iov::gather(iovs, &mut bytes)?;
        Ok(Load::Bytes(bytes))
    }

    fn part_of(&self, piece: &Piece) -> Option<Part> {
        let memory = Arc::clone(self.regions.memory(piece.region)?);
        Some(Part { memory, offset: usize::try_from(piece.offset).ok()?, len: piece.len as usize })
    }

    /// Does what a write request asks for.
    fn put_in_place(&self, data: &[u8]) -> Result<()> {
        let (pieces, bytes) = decode_pieces(data)?;
        iov::scatter(&self.locate(&pieces)?, bytes)
    }

    /// Where pieces are. Refuses those of regions that may not be used, before any byte is touched.
    pub(crate) fn locate(&self, pieces: &[Piece]) -> Result<Vec<Iov>> {
        pieces
            .iter()
            .map(|piece| {
                let range = self.regions.live_range(piece.region)?;
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
            })
            .collect()
    }

    pub(crate) fn reply(
        &mut self,
        id: PeerId,
        kind: FrameKind,
        chunk: u64,
        reply: Result<Load>,
        held: u64,
        now: Instant,
    ) {
        let (kind, load) = match reply {
            Ok(load) => (kind, load),
            Err(error) => (FrameKind::Refusal, Load::Bytes(error.message().as_bytes().to_vec())),
        };
        if let Err(error) = self.post_service(id, kind, chunk, load, held) {
            self.lose(id, error, now);
        }
    }
}
