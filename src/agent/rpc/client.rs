//! The asking side of served transfers: what was asked for, and the replies.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

use super::flow_control::Departure;
use super::server::Load;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::iov::{self, Iov};
use crate::agent::engine::Engine;
use crate::agent::rpc::wire::{Piece, StreamReader, encode_pieces};
use crate::agent::thread::affinity;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::Incarnation;
use crate::proto::wire::MemoryKind;
use crate::ucx::MessageSink;

/// What a chunk asks of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    Read,
    Write,
    Digest,
}

/// A chunk whose reply has not been taken. As long as it is one, its transfer is not over, so its memory is registered.
pub(crate) struct Chunk {
    pub(crate) transfer: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) service: Service,
    /// Where the bytes of a read go, or are when their digest is asked for, in this order.
    pub(crate) local: Vec<Iov>,
    pub(crate) bytes: u64,
    /// Whether its bytes come by a stream.
    pub(crate) streamed: bool,
}

struct Asked {
    chunk: Chunk,
    /// The peer's incarnation and its number for the connection, which its reply must have.
    from: (Incarnation, u64),
    departure: Departure,
    /// What came of putting the reply in place, if that was done while it arrived.
    placed: Option<Result<()>>,
}

/// The chunks under way.
#[derive(Default)]
pub(crate) struct Client {
    table: HashMap<u64, Asked>,
    next: u64,
}

impl Client {
    /// Those that were asked for, the first one first.
    #[cfg(test)]
    pub(crate) fn all(&self) -> Vec<&Chunk> {
        let mut all: Vec<_> = self.table.iter().collect();
        all.sort_by_key(|(number, _)| **number);
        all.into_iter().map(|(_, asked)| &asked.chunk).collect()
    }

    /// A chunk that was asked of a peer by a stream.
    pub(crate) fn streamed(&self, number: u64, peer: PeerId) -> Option<&Chunk> {
        self.table.get(&number).map(|asked| &asked.chunk).filter(|chunk| chunk.streamed && chunk.peer == peer)
    }
}

/// Puts the bytes of replies in place straight out of UCX's buffer, which saves a copy.
pub(crate) struct Placer(pub(crate) Rc<RefCell<Client>>);

impl MessageSink for Placer {
    fn take(&self, header: &[u8], data: &[u8]) -> bool {
        let (Ok(frame), Ok(mut chunks)) = (Frame::decode(header), self.0.try_borrow_mut()) else { return false };
        let Some(asked) = chunks.table.get_mut(&frame.sequence) else { return false };
        let local = &asked.chunk.local;
        let expected = frame.kind == FrameKind::ReadReply
            && asked.chunk.service == Service::Read
            && asked.from == (frame.incarnation, frame.connection)
            && asked.placed.is_none()
            && !asked.chunk.streamed
            && local.iter().all(|iov| iov.range.kind() == MemoryKind::Host);
        // What is wrong with another one is said when it is taken in turn.
        if expected {
            asked.placed = Some(iov::scatter(local, data));
        }
        expected
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Engine {
    /// Asks the peer for a chunk. `Err`: nothing was sent.
    pub(crate) fn request_chunk(&mut self, chunk: Chunk, remote: &[Piece]) -> Result<()> {
        let peer = self.peers.get(chunk.peer)?;
        let connection = peer
            .remote_connection()
            .ok_or_else(|| Error::new(ErrorKind::Internal, format!("agent {} has not said hello", peer.name)))?;
        let (from, departure) = ((peer.incarnation, connection), peer.flow.depart(Instant::now()));
        let (kind, data) = match chunk.service {
            Service::Read if chunk.streamed => {
                let mut data = encode_pieces(remote, StreamReader::BYTES);
                let received = self.streams.received(chunk.peer);
                StreamReader { received, processor: affinity::processor() as u16 }.encode(&mut data);
                (FrameKind::StreamRequest, data)
            }
            Service::Read => (FrameKind::ReadRequest, encode_pieces(remote, 0)),
            Service::Digest => (FrameKind::DigestRequest, encode_pieces(remote, 0)),
            Service::Write => {
                let mut data = encode_pieces(remote, usize::try_from(chunk.bytes).unwrap_or(0));
                iov::gather(&chunk.local, &mut data)?;
                (FrameKind::WriteRequest, data)
            }
        };
        let number = self.rpc.borrow().next;
        self.post_service(chunk.peer, kind, number, Load::Bytes(data), 0)?;
        if chunk.streamed {
            self.expect_streamed(chunk.peer);
        }
        let mut chunks = self.rpc.borrow_mut();
        chunks.next += 1;
        chunks.table.insert(number, Asked { chunk, from, departure, placed: None });
        Ok(())
    }

    /// Takes a reply. With `data` of no bytes, its bytes were put in place as they arrived.
    pub(crate) fn on_reply(&mut self, id: PeerId, frame: Frame, data: &[u8], now: Instant) -> Result<()> {
        let expected = match frame.kind {
            FrameKind::ReadReply => Some(Service::Read),
            FrameKind::WriteReply => Some(Service::Write),
            FrameKind::DigestReply => Some(Service::Digest),
            // A refusal, of any of them.
            _ => None,
        };
        let mut chunks = self.rpc.borrow_mut();
        let known = chunks.table.get(&frame.sequence).map(|asked| &asked.chunk);
        // Of what comes by a stream, only a refusal comes as a message.
        let answers = |chunk: &Chunk| expected.is_none_or(|service| service == chunk.service && !chunk.streamed);
        if !known.is_some_and(|chunk| chunk.peer == id && answers(chunk)) {
            return Err(Error::corrupt(format!("a reply about chunk {}, which was not asked for", frame.sequence)));
        }
        let Some(Asked { chunk, placed, departure, .. }) = chunks.table.remove(&frame.sequence) else { return Ok(()) };
        drop(chunks);
        if chunk.streamed {
            self.streamed_ended(id);
        }
        if let Ok(peer) = self.peers.get_mut(id) {
            peer.flow.arrive(departure, chunk.bytes, now);
        }
        let result = match (placed, expected) {
            (Some(placed), _) => placed,
            (None, Some(Service::Read)) => iov::scatter(&chunk.local, data),
            (None, Some(Service::Write)) => Ok(()),
            (None, Some(Service::Digest)) => compare(&chunk, data),
            (None, None) => Err(Error::new(
                ErrorKind::NotFound,
                format!("the peer refused: {}", String::from_utf8_lossy(data.get(..500).unwrap_or(data))),
            )),
        };
        self.chunk_ended(&chunk, result, now);
        Ok(())
    }

    /// All bytes of a chunk have come by a stream.
    pub(crate) fn streamed_arrived(&mut self, id: PeerId, number: u64, now: Instant) {
        let Some(Asked { chunk, departure, .. }) = self.rpc.borrow_mut().table.remove(&number) else { return };
        if let Ok(peer) = self.peers.get_mut(id) {
            peer.flow.arrive(departure, chunk.bytes, now);
        }
        self.chunk_ended(&chunk, Ok(()), now);
        self.streamed_ended(id);
    }

    /// Ends the chunks that a lost peer will not reply to.
    pub(crate) fn fail_chunks_of(&mut self, id: PeerId, error: &Error, now: Instant) {
        let lost: Vec<Asked> =
            self.rpc.borrow_mut().table.extract_if(|_, asked| asked.chunk.peer == id).map(|(_, asked)| asked).collect();
        for asked in lost {
            self.chunk_ended(&asked.chunk, Err(error.clone()), now);
        }
    }
}

/// Whether what arrived has the digest that the peer tells.
fn compare(chunk: &Chunk, theirs: &[u8]) -> Result<()> {
    let ours = iov::digest(&chunk.local)?;
    if ours == theirs {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::DigestMismatch,
        format!(
            "{} of the bytes read have digest {}, the peer's have {}: they were damaged on the way, or the peer changed \
             them meanwhile",
            chunk.bytes,
            hex(&ours),
            hex(theirs.get(..64).unwrap_or(theirs))
        ),
    ))
}
