//! The asking side: what was asked of peers, and the replies. Requests and replies are matched by a chunk number that is
//! never used twice.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::time::Instant;

use super::flow_control::Departure;
use super::wire::{Piece, encode_pieces};
use crate::agent::core::effect::OperationEnd;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::iov::{self, Iov};
use crate::agent::core::stats::PathBytes;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::Incarnation;
use crate::proto::wire::MemoryKind;
use crate::ucx::MessageSink;

/// The service that a chunk asks of the peer.
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
}

impl Chunk {
    /// The request for it; for a write, what stands before its bytes.
    pub(crate) fn request(&self, remote: &[Piece]) -> (FrameKind, Vec<u8>) {
        match self.service {
            Service::Read => (FrameKind::ReadRequest, encode_pieces(remote, 0)),
            Service::Digest => (FrameKind::DigestRequest, encode_pieces(remote, 0)),
            Service::Write => {
                (FrameKind::WriteRequest, encode_pieces(remote, usize::try_from(self.bytes).unwrap_or(0)))
            }
        }
    }

    /// The end of the operation that it is of its transfer.
    pub(crate) fn end(&self, result: Result<()>) -> OperationEnd {
        let moved = match (&result, self.service) {
            (Err(_), _) | (_, Service::Digest) => PathBytes::default(),
            _ => PathBytes { served: self.bytes, ..PathBytes::default() },
        };
        OperationEnd { transfer: self.transfer, windowed: Some(self.bytes), moved, result }
    }

    /// The same where nothing was asked for, because the transfer was stopped before.
    pub(crate) fn cancelled(&self) -> OperationEnd {
        OperationEnd {
            transfer: self.transfer,
            windowed: Some(self.bytes),
            moved: PathBytes::default(),
            result: Ok(()),
        }
    }

    /// Whether what arrived has the digest that the peer tells.
    pub(crate) fn compare(&self, ours: &[u8], theirs: &[u8]) -> Result<()> {
        if ours == theirs {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::DigestMismatch,
            format!(
                "{} of the bytes read have digest {}, the peer's have {}: they were damaged on the way, or the peer changed \
                 them meanwhile",
                self.bytes,
                hex(ours),
                hex(theirs.get(..64).unwrap_or(theirs))
            ),
        ))
    }
}

struct Asked {
    chunk: Chunk,
    /// The peer's incarnation and its number for the connection, which its reply must have.
    from: (Incarnation, u64),
    departure: Departure,
    /// The result of putting the reply in place, if that was done while it arrived.
    placed: Option<Result<()>>,
}

/// A chunk that is no longer asked for.
pub(crate) struct Answered {
    pub(crate) chunk: Chunk,
    pub(crate) departure: Departure,
    pub(crate) result: Result<()>,
    /// Whether a device has still to do with its memory what the reply is for: to put bytes in place, or to bring what is compared.
    pub(crate) is_of_device: bool,
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

    /// How many were asked for and not answered.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// The number of the next request.
    pub(crate) fn next_number(&self) -> u64 {
        self.next
    }

    /// Notes that a chunk was asked for under that number, over the peer's connection `from`.
    pub(crate) fn insert(&mut self, chunk: Chunk, from: (Incarnation, u64), departure: Departure) {
        self.table.insert(self.next, Asked { chunk, from, departure, placed: None });
        self.next += 1;
    }

    /// Takes a reply. With `data` of no bytes, its bytes were put in place as they arrived. Bytes for a device's memory are left
    /// to the caller.
    pub(crate) fn take_reply(&mut self, id: PeerId, frame: Frame, data: &[u8]) -> Result<Answered> {
        let expected = match frame.kind {
            FrameKind::ReadReply => Some(Service::Read),
            FrameKind::WriteReply => Some(Service::Write),
            FrameKind::DigestReply => Some(Service::Digest),
            // A refusal, of any of them.
            _ => None,
        };
        let answers = |chunk: &Chunk| expected.is_none_or(|service| service == chunk.service);
        let is_expected = |asked: &Asked| asked.chunk.peer == id && answers(&asked.chunk);
        let known = self.table.get(&frame.sequence).is_some_and(is_expected);
        let Some(Asked { chunk, placed, departure, .. }) = known.then(|| self.table.remove(&frame.sequence)).flatten()
        else {
            return Err(Error::corrupt(format!("a reply about chunk {}, which was not asked for", frame.sequence)));
        };
        let takes_bytes = matches!(expected, Some(Service::Read | Service::Digest));
        let is_of_device = placed.is_none() && takes_bytes && iov::device_of(&chunk.local).is_some();
        let result = match (placed, expected) {
            _ if is_of_device => Ok(()),
            (Some(placed), _) => placed,
            (None, Some(Service::Read)) => iov::scatter(&chunk.local, data),
            (None, Some(Service::Write)) => Ok(()),
            (None, Some(Service::Digest)) => iov::digest(&chunk.local).and_then(|ours| chunk.compare(&ours, data)),
            (None, None) => Err(Error::new(
                ErrorKind::NotFound,
                format!("the peer refused: {}", String::from_utf8_lossy(data.get(..500).unwrap_or(data))),
            )),
        };
        Ok(Answered { chunk, departure, result, is_of_device })
    }

    /// The peers that owe replies, each with when the first of those was asked for.
    pub(crate) fn debtors(&self) -> BTreeMap<PeerId, Instant> {
        let mut debtors = BTreeMap::new();
        for asked in self.table.values() {
            let at = asked.departure.at();
            let first = debtors.entry(asked.chunk.peer).or_insert(at);
            *first = at.min(*first);
        }
        debtors
    }

    /// Whether nobody owes a reply.
    pub(crate) fn is_idle(&self) -> bool {
        self.table.is_empty()
    }

    /// Takes the chunks that a lost peer will not reply to.
    pub(crate) fn take_all_of(&mut self, id: PeerId) -> Vec<Chunk> {
        self.table.extract_if(|_, asked| asked.chunk.peer == id).map(|(_, asked)| asked.chunk).collect()
    }
}

/// Puts the bytes of replies in place straight out of UCX's buffer, which saves a copy.
pub(crate) struct Placer(pub(crate) Rc<RefCell<Client>>);

impl MessageSink for Placer {
    fn take(&self, header: &[u8], data: &[u8]) -> bool {
        let (Ok(frame), Ok(mut client)) = (Frame::decode(header), self.0.try_borrow_mut()) else { return false };
        let Some(asked) = client.table.get_mut(&frame.sequence) else { return false };
        let local = &asked.chunk.local;
        let expected = frame.kind == FrameKind::ReadReply
            && asked.chunk.service == Service::Read
            && asked.from == (frame.incarnation, frame.connection)
            && asked.placed.is_none()
            && local.iter().all(|iov| iov.range.kind() == MemoryKind::Host);
        // An error of another one is told when it is taken in turn.
        if expected {
            asked.placed = Some(iov::scatter(local, data));
        }
        expected
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
