//! Transfers that the peer serves: for connections without one-sided reads and writes, such as TCP.
//!
//! UCX emulates those by messages that the peer's UCX answers, but an answer to a peer that has just died makes UCX
//! abort the answering process (`ucp_request.inl`: "Fatal: unexpected error", UCX 1.22): a consumer that is killed
//! would take its producer along. So here the agents themselves exchange messages, whose failure UCX reports. A
//! message carries many blocks, the owner checks every range against its registrations, and memory of any kind works.
//!
//! - read: a request lists pieces of the peer's regions, the reply holds their bytes one after the other;
//! - write: a request lists pieces and holds their bytes, the reply says that they are in place;
//! - digest: a request lists pieces, the reply holds the digest of their bytes ([`AgentConfig::verify`](super::AgentConfig::verify)), whichever way
//!   the bytes were moved.
//!
//! A request that is not done is answered by a refusal, which holds a text. Requests and answers are matched by a chunk
//! number that the asking side never uses twice.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::ferry::Engine;
use super::hello::{AM_ID, Frame, FrameKind};
use super::ids::PeerId;
use super::operations::InFlight;
use super::spots::{self, Spot};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::proto::wire::MemoryKind;
use crate::ucx::{MAX_PARTS, Part, Posted};

/// Bytes moved by one chunk. Large enough that system calls and wake-ups do not count (over the loopback, 512 KiB took 10 ms
/// for 32 MiB where 256 KiB took 13), small enough that it is still in the processor's cache when it is put in place, and
/// that a message in between waits for a fraction of a millisecond.
pub(super) const CHUNK_BYTES: u64 = 512 << 10;
/// Bytes moved by one chunk whose pieces are gathered first: of 512 KiB, where TCP paces what is sent (BBR), each came as a burst
/// that had to wait, and 32 MiB in blocks of 4 KiB took 12.5 ms in place of 7.4 to 11; without pacing it makes no difference.
pub(super) const GATHERED_BYTES: u64 = 256 << 10;
/// Bytes moved by one chunk of a stream: 32 MiB in blocks of 4 KiB took 10 % longer by half of that, each of which is a message
/// and a look at its pieces, on both sides. Three fit the least window.
pub(super) const STREAM_CHUNK_BYTES: u64 = 1 << 20;
/// Pieces in one chunk, so that a request of scattered tiny pieces stays under 64 KiB.
pub(super) const CHUNK_PIECES: usize = 3000;
/// Pieces that are at least this long on average are sent from where they are, shorter ones are gathered: of those, the
/// few parts that a message may have would make many small messages.
pub(super) const PART_BYTES: u64 = 8 << 10;
/// Bytes of replies to one peer that UCX may hold; more requests wait, as numbers only. With 1 MiB the socket runs dry while
/// the next reply is made.
const REPLY_BYTES: u64 = 4 << 20;
/// Requests of one peer that may wait, 48 MiB of them at the most. A peer keeps to its window, which may not be larger;
/// one that does not is cut off.
pub(super) const MAX_WAITING: usize = 1024;

/// Part of a region: index, offset and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) region: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
}

impl Piece {
    /// Whether this one begins where `before` ends.
    pub(super) fn follows(&self, before: &Piece) -> bool {
        self.region == before.region && before.offset.checked_add(before.len.into()) == Some(self.offset)
    }
}

/// Length of an encoded [`Piece`].
const PIECE_BYTES: usize = 16;

/// A read that a peer asked for.
struct ReadRequest {
    chunk: u64,
    pieces: Vec<Piece>,
    bytes: u64,
}

/// What is to be served to one peer.
#[derive(Default)]
pub(super) struct Served {
    waiting: VecDeque<ReadRequest>,
    /// Bytes of replies that UCX is not done with.
    unsent: u64,
}

/// Pieces as they travel: their number, then each as region (32 bits), length (32 bits), offset (64 bits).
pub(super) fn encode_pieces(pieces: &[Piece], extra: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 + pieces.len() * PIECE_BYTES + extra);
    bytes.extend_from_slice(&(pieces.len() as u32).to_le_bytes());
    for piece in pieces {
        bytes.extend_from_slice(&piece.region.to_le_bytes());
        bytes.extend_from_slice(&piece.len.to_le_bytes());
        bytes.extend_from_slice(&piece.offset.to_le_bytes());
    }
    bytes
}

/// The pieces and what follows them.
pub(super) fn decode_pieces(bytes: &[u8]) -> Result<(Vec<Piece>, &[u8])> {
    let short = || Error::corrupt("a request that ends within its list of pieces");
    let (count, rest) = bytes.split_first_chunk::<4>().ok_or_else(short)?;
    let count = u32::from_le_bytes(*count) as usize;
    let (list, rest) = count.checked_mul(PIECE_BYTES).and_then(|len| rest.split_at_checked(len)).ok_or_else(short)?;
    let pieces = list
        .chunks_exact(PIECE_BYTES)
        .filter_map(|bytes| match *bytes {
            [r0, r1, r2, r3, l0, l1, l2, l3, o0, o1, o2, o3, o4, o5, o6, o7] => Some(Piece {
                region: u32::from_le_bytes([r0, r1, r2, r3]),
                len: u32::from_le_bytes([l0, l1, l2, l3]),
                offset: u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            }),
            _ => None,
        })
        .collect();
    Ok((pieces, rest))
}

/// The pieces of a request to read or digest, within the bounds of one chunk.
pub(super) fn read_request(data: &[u8]) -> Result<Vec<Piece>> {
    let (pieces, rest) = decode_pieces(data)?;
    if !rest.is_empty() {
        return Err(Error::corrupt(format!("{} bytes behind the list of pieces of a request", rest.len())));
    }
    check_chunk(pieces, CHUNK_BYTES)
}

/// What stands behind the pieces of a request to read by a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamReader {
    /// How many chunks have come by the stream.
    pub(super) received: u64,
    /// The processor that the reader is on, modulo 2^16, for a peer on its host.
    pub(super) processor: u16,
}

impl StreamReader {
    pub(super) const BYTES: usize = 10;

    pub(super) fn encode(self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.received.to_le_bytes());
        to.extend_from_slice(&self.processor.to_le_bytes());
    }
}

/// The pieces of a request to read by a stream, and what it says of who asks.
pub(super) fn stream_request(data: &[u8]) -> Result<(Vec<Piece>, StreamReader)> {
    let (pieces, rest) = decode_pieces(data)?;
    let [r0, r1, r2, r3, r4, r5, r6, r7, p0, p1] = *rest else {
        let expected = StreamReader::BYTES;
        let found = rest.len();
        return Err(Error::corrupt(format!(
            "{found} bytes behind the list of pieces of a request, expected {expected}"
        )));
    };
    let received = u64::from_le_bytes([r0, r1, r2, r3, r4, r5, r6, r7]);
    Ok((check_chunk(pieces, STREAM_CHUNK_BYTES)?, StreamReader { received, processor: u16::from_le_bytes([p0, p1]) }))
}

fn check_chunk(pieces: Vec<Piece>, most: u64) -> Result<Vec<Piece>> {
    let bytes = total(&pieces);
    if bytes > most || pieces.len() > CHUNK_PIECES {
        return Err(Error::corrupt(format!(
            "a request of {} pieces and {bytes} bytes, at most {CHUNK_PIECES} and {most} are allowed",
            pieces.len()
        )));
    }
    Ok(pieces)
}

pub(super) fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

fn is_request(kind: FrameKind) -> bool {
    use FrameKind::{DigestRequest, ReadRequest, StreamQuestion, StreamRequest, WriteRequest};
    matches!(kind, ReadRequest | WriteRequest | DigestRequest | StreamQuestion | StreamRequest)
}

/// What a request or reply holds.
pub(super) enum Load {
    /// Bytes of its own.
    Bytes(Vec<u8>),
    /// Parts of registered regions, which UCX sends from where they are.
    Parts { parts: Vec<Part>, regions: Vec<u32> },
}

impl Engine {
    /// Sends a request or reply; `held` bytes of the peer's replies are accounted until UCX is done with it.
    pub(super) fn post_service(
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
                self.registry.enter(&regions);
                let token = self.operations.insert(InFlight::Service { peer: id, held, regions });
                (peer.endpoint.send_am_parts(AM_ID, &frame.encode(), &parts, token), token)
            }
        };
        if matches!(posted, Ok(Posted::Pending)) {
            peer.service.unsent += held;
        } else if let Some(InFlight::Service { regions, .. }) = self.operations.remove(token) {
            self.registry.leave(&regions);
        }
        posted.map(drop).map_err(|e| ucx_error(e).context(format!("sending to agent {}", peer.name)))
    }

    /// UCX is done with a request or reply.
    pub(super) fn service_ended(&mut self, id: PeerId, held: u64, result: Result<()>, now: Instant) {
        let Ok(peer) = self.peers.get_mut(id) else { return };
        peer.service.unsent = peer.service.unsent.saturating_sub(held);
        match result {
            Ok(()) => self.serve_reads(id, now),
            // The other side would wait for it for ever.
            Err(error) => self.lose(id, error.context("a request or reply could not be sent"), now),
        }
    }

    /// Takes a request or reply that arrived from a peer over its current connection.
    pub(super) fn on_service(&mut self, id: PeerId, frame: Frame, data: &[u8], now: Instant) -> Result<()> {
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
                let digest = read_request(data).and_then(|pieces| spots::digest(&self.locate(&pieces)?));
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
        if peer.service.waiting.len() >= MAX_WAITING {
            let error = Error::new(ErrorKind::Exhausted, format!("the peer has asked for {MAX_WAITING} reads at once"));
            self.lose(id, error.clone(), now);
            return Err(error);
        }
        peer.service.waiting.push_back(ReadRequest { chunk, pieces, bytes });
        self.serve_reads(id, now);
        Ok(())
    }

    /// Replies to reads as long as UCX does not hold too many of this peer's replies.
    fn serve_reads(&mut self, id: PeerId, now: Instant) {
        while let Ok(peer) = self.peers.get_mut(id) {
            if peer.service.unsent >= REPLY_BYTES {
                return;
            }
            let Some(request) = peer.service.waiting.pop_front() else { return };
            let keyed = self.secrets.is_keyed();
            let load = self.locate(&request.pieces).and_then(|spots| self.load(&request, &spots, !keyed));
            self.reply(id, FrameKind::ReadReply, request.chunk, load, request.bytes, now);
        }
    }

    /// What a request asked for: as parts where UCX can send those, else gathered into a buffer.
    fn load(&self, request: &ReadRequest, spots: &[Spot], parts: bool) -> Result<Load> {
        let long = request.bytes >= PART_BYTES.saturating_mul(spots.len() as u64);
        let hosts = || spots.iter().all(|spot| spot.range.kind() == MemoryKind::Host);
        if parts && long && (1..=MAX_PARTS).contains(&spots.len()) && hosts() {
            let regions = request.pieces.iter().map(|piece| piece.region).collect();
            let parts = request.pieces.iter().map(|piece| self.part_of(piece)).collect::<Option<_>>();
            let gone = || Error::new(ErrorKind::Internal, "a region that was found has no registration");
            return Ok(Load::Parts { parts: parts.ok_or_else(gone)?, regions });
        }
        let mut bytes = self.worker.buffer(usize::try_from(request.bytes).unwrap_or(0));
        spots::gather(spots, &mut bytes)?;
        Ok(Load::Bytes(bytes))
    }

    fn part_of(&self, piece: &Piece) -> Option<Part> {
        let memory = Arc::clone(self.registry.memory(piece.region)?);
        Some(Part { memory, offset: usize::try_from(piece.offset).ok()?, len: piece.len as usize })
    }

    /// Does what a write request asks for.
    fn put_in_place(&self, data: &[u8]) -> Result<()> {
        let (pieces, bytes) = decode_pieces(data)?;
        spots::scatter(&self.locate(&pieces)?, bytes)
    }

    /// Where pieces are. Refuses those of regions that may not be used, before any byte is touched.
    pub(super) fn locate(&self, pieces: &[Piece]) -> Result<Vec<Spot>> {
        pieces
            .iter()
            .map(|piece| {
                let range = self.registry.live_range(piece.region)?;
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
                Ok(Spot { range: *range, offset: piece.offset, len: piece.len })
            })
            .collect()
    }

    pub(super) fn reply(
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_follows_only_the_one_that_ends_where_it_begins() {
        let piece = |region, offset, len| Piece { region, offset, len };
        assert!(piece(1, 12, 3).follows(&piece(1, 4, 8)));
        for before in [piece(2, 4, 8), piece(1, 4, 7), piece(1, 12, 3), piece(1, u64::MAX, 13)] {
            assert!(!piece(1, 12, 3).follows(&before), "{before:?}");
        }
    }

    #[test]
    fn pieces_survive_the_wire_and_cut_lists_are_refused() {
        let pieces = [
            Piece { region: 1, offset: u64::MAX, len: 3 },
            Piece { region: u32::MAX, offset: 7, len: u32::MAX },
            Piece { region: 0, offset: 0, len: 0 },
        ];
        let mut bytes = encode_pieces(&pieces, 2);
        let list = bytes.len();
        bytes.extend_from_slice(&[8, 9]);
        assert_eq!(decode_pieces(&bytes).unwrap(), (pieces.to_vec(), &[8u8, 9][..]));
        for cut in 0..list {
            assert_eq!(decode_pieces(&bytes[..cut]).unwrap_err().kind(), ErrorKind::Corrupt);
        }
        // A count that promises more than memory holds.
        assert!(decode_pieces(&[255; 64]).is_err());
        assert_eq!(total(&pieces), 3 + u64::from(u32::MAX));
    }
}
