//! The serving side of a stream: chunks that were asked for, sent one after the other.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoErrorKind, Read};
use std::net::TcpStream;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::wire::{HEADING_BYTES, Heading, Secret};
use super::{Io, Streams, TURN_BYTES, stretches};
use crate::agent::core::effect::Effects;
use crate::agent::core::ids::PeerId;
use crate::agent::core::iov::Iov;
use crate::agent::core::limits::MAX_WAITING;
use crate::agent::core::regions::Regions;
use crate::agent::rpc::pace::Pace;
use crate::agent::rpc::server::{locate, refusal};
use crate::agent::rpc::wire::{Piece, stream_request, total};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::socket::{self, PagePipe, Refusal, Stretches};

/// Pieces shorter than this on average are copied into the socket: to look up a page costs as much as to copy so much.
const PAGES_FROM: u64 = 4 << 10;

/// A stream to a peer.
pub(crate) struct Outbound {
    pub(crate) ticket: Secret,
    pub(crate) answer: Secret,
    /// `None` until the peer has connected.
    socket: Option<TcpStream>,
    waiting: VecDeque<Asked>,
    sending: Option<Sending>,
    /// The regions of each chunk that was begun and that the peer has not said to have. The socket has their pages, so they
    /// stay registered.
    lent: VecDeque<Vec<u32>>,
    /// How many chunks the peer has.
    received: u64,
    pace: Pace,
}

/// A chunk that a peer asked for.
struct Asked {
    chunk: u64,
    pieces: Vec<Piece>,
}

/// The chunk that is being sent.
struct Sending {
    heading: [u8; HEADING_BYTES],
    /// Bytes of the heading that the socket has taken.
    heading_sent: usize,
    /// Where the bytes are that it has not taken, in regions that stay registered.
    left: Stretches,
    /// Whether pages are lent.
    lends: bool,
    /// Whether they are fetched into this processor's caches first, for the reader's to get them from there.
    warm: bool,
}

/// What came of sending on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sent {
    /// The socket took something.
    pub(crate) any: bool,
    /// It takes bytes so fast that the loop spins for it.
    pub(crate) is_fast: bool,
}

impl Outbound {
    pub(crate) fn offered(ticket: Secret, answer: Secret, now: Instant) -> Self {
        Outbound {
            ticket,
            answer,
            socket: None,
            waiting: VecDeque::new(),
            sending: None,
            lent: VecDeque::new(),
            received: 0,
            pace: Pace::new(now),
        }
    }

    pub(crate) fn connect(&mut self, socket: TcpStream) {
        self.socket = Some(socket);
    }
}

impl Streams {
    /// A peer asks for a chunk by its stream.
    pub(crate) fn on_request(&mut self, id: PeerId, chunk: u64, data: &[u8], io: &mut Io<'_>) -> Result<()> {
        let (pieces, reader) = stream_request(data)?;
        self.on_receipt(id, reader.received, io)?;
        // What it may not have is refused before anything is sent.
        let refused = match (locate(io.regions, &pieces), self.outbound.get_mut(&id)) {
            (Err(error), _) => error,
            (_, Some(outbound)) if outbound.socket.is_some() => {
                if outbound.waiting.len() + outbound.lent.len() >= MAX_WAITING {
                    let error = Error::new(
                        ErrorKind::Exhausted,
                        format!("the peer has asked for {MAX_WAITING} reads of which it has said to have none"),
                    );
                    io.effects.lose(id, error.clone());
                    return Err(error);
                }
                if outbound.waiting.is_empty() && outbound.sending.is_none() {
                    outbound.pace.begin(io.now);
                }
                outbound.waiting.push_back(Asked { chunk, pieces });
                self.writing.insert(id);
                return Ok(());
            }
            _ => Error::not_found("this agent has no stream to the peer"),
        };
        refuse(id, chunk, &refused, io.effects);
        Ok(())
    }

    /// A peer says how many chunks it has by its stream: their pages are not the socket's any more.
    pub(crate) fn on_receipt(&mut self, id: PeerId, received: u64, io: &mut Io<'_>) -> Result<()> {
        // A receipt may come after the stream has ended.
        let Some(outbound) = self.outbound.get_mut(&id) else { return Ok(()) };
        let more = received.saturating_sub(outbound.received);
        // What is being sent cannot be there.
        let begun = outbound.lent.len().saturating_sub(usize::from(outbound.sending.is_some()));
        if more > begun as u64 {
            let error = Error::corrupt(format!("a receipt for {more} chunks, of {begun} that were sent"));
            io.effects.lose(id, error.clone());
            return Err(error);
        }
        outbound.received = outbound.received.saturating_add(more);
        let free = outbound.lent.drain(..usize::try_from(more).unwrap_or(0));
        free.for_each(|regions| io.regions.leave(&regions));
        Ok(())
    }

    /// Sends on.
    pub(crate) fn send(&mut self, id: PeerId, io: &mut Io<'_>) -> Sent {
        let Streams { outbound, writing, pipe, name, .. } = self;
        let Some(outbound) = outbound.get_mut(&id) else {
            writing.remove(&id);
            return Sent::default();
        };
        let mut moved = 0;
        while moved < TURN_BYTES {
            if outbound.sending.is_none() && !outbound.begin_next(id, io) {
                writing.remove(&id);
                break;
            }
            let (Some(sending), Some(socket)) = (&mut outbound.sending, &outbound.socket) else { break };
            match sending.send_some(socket, pipe, name) {
                Ok(0) => break,
                Ok(bytes) => moved += bytes,
                Err(error) => {
                    io.effects.lose(id, error.context("the stream to the peer broke"));
                    break;
                }
            }
            if sending.is_over() {
                outbound.sending = None;
            }
        }
        if moved > 0 {
            outbound.pace.moved(moved, io.now);
        }
        Sent { any: moved > 0, is_fast: outbound.pace.is_fast(io.now) }
    }

    /// Looks whether a stream that has changed has ended: nothing comes on it.
    pub(super) fn outbound_changed(&mut self, id: PeerId, io: &mut Io<'_>) {
        let Some(mut socket) = self.outbound.get(&id).and_then(|outbound| outbound.socket.as_ref()) else { return };
        let why = match socket.read(&mut [0; 1]) {
            Err(error) if matches!(error.kind(), IoErrorKind::WouldBlock | IoErrorKind::Interrupted) => return,
            Err(error) => error.to_string(),
            Ok(0) => "the peer closed it".to_owned(),
            Ok(_) => "the peer sent bytes on it".to_owned(),
        };
        if self.writing.contains(&id) {
            let text = format!("the stream to the peer broke: {why}");
            io.effects.lose(id, Error::new(ErrorKind::PeerDied, text));
        } else {
            log::debug!("agent {}: the stream to {id} has ended: {why}", self.name);
            self.close_outbound(id, io.regions);
        }
    }

    /// Closes the stream to a peer and gives up its hold on regions.
    pub(super) fn close_outbound(&mut self, id: PeerId, regions: &mut Regions) {
        self.writing.remove(&id);
        if let Some(Outbound { ticket, socket, lent, .. }) = self.outbound.remove(&id) {
            self.tickets.remove(&ticket);
            socket.into_iter().for_each(socket::discard);
            lent.iter().for_each(|used| regions.leave(used));
        }
    }

    /// Whether sockets have pages of this side's regions.
    pub(crate) fn lend(&self) -> bool {
        self.outbound.values().any(|outbound| !outbound.lent.is_empty())
    }

    /// The peers whose sockets have pages of a region.
    pub(crate) fn borrowers(&self, region: u32) -> impl Iterator<Item = PeerId> {
        let borrows = move |outbound: &Outbound| outbound.lent.iter().any(|regions| regions.contains(&region));
        self.outbound.iter().filter(move |(_, outbound)| borrows(outbound)).map(|(id, _)| *id)
    }
}

impl Outbound {
    /// Begins with the next chunk that can be sent. Returns whether there is one.
    fn begin_next(&mut self, id: PeerId, io: &mut Io<'_>) -> bool {
        while let Some(Asked { chunk, pieces }) = self.waiting.pop_front() {
            // Where no chunk waits the reader is the slower side, and there is time to spare it some work.
            let warm = self.waiting.is_empty() && io.peers.get(id).is_ok_and(|peer| peer.on_this_host);
            // A region may have gone meanwhile.
            let located = locate(io.regions, &pieces);
            match located.and_then(|iovs| Sending::new(chunk, total(&pieces), &iovs, warm)) {
                Ok(sending) => self.sending = Some(sending),
                Err(error) => {
                    refuse(id, chunk, &error, io.effects);
                    continue;
                }
            }
            let mut regions: Vec<u32> = pieces.iter().map(|piece| piece.region).collect();
            regions.sort_unstable();
            regions.dedup();
            io.regions.enter(&regions);
            self.lent.push_back(regions);
            return true;
        }
        false
    }
}

fn refuse(id: PeerId, chunk: u64, error: &Error, effects: &mut Effects) {
    let (kind, text) = refusal(error);
    effects.send(id, kind, chunk, text);
}

impl Sending {
    fn new(chunk: u64, bytes: u64, iovs: &[Iov], warm: bool) -> Result<Self> {
        // At most a chunk's, so it fits.
        let heading = Heading { chunk, len: bytes as u32 }.encode();
        let lends = bytes >= PAGES_FROM.saturating_mul(iovs.len() as u64);
        Ok(Sending { heading, heading_sent: 0, left: stretches(iovs)?, lends, warm })
    }

    /// Gives the socket more of the chunk. Returns how many bytes it took, 0 when it is full.
    fn send_some(&mut self, socket: &TcpStream, pipe: &mut Option<PagePipe>, name: &str) -> Result<u64> {
        let heading = self.heading.get(self.heading_sent..).unwrap_or_default();
        if !heading.is_empty() {
            let Some(taken) = push(socket, heading, SendFlags::MORE)? else { return Ok(0) };
            self.heading_sent = self.heading_sent.saturating_add(taken);
            return Ok(taken as u64);
        }
        if self.lends && pipe.is_none() {
            *pipe = PagePipe::new().ok();
        }
        let sent = match pipe.as_ref().filter(|_| self.lends) {
            Some(pages) => match pages.send(socket, self.left.left(), self.warm) {
                Err(Refusal::Pipe(error)) => {
                    // What is left in it would come before the next bytes, on whichever stream.
                    *pipe = None;
                    Err(error)
                }
                Err(Refusal::Pages(error)) => {
                    log::debug!("agent {name}: pages are copied, not lent: {error}");
                    self.lends = false;
                    socket::send(socket, self.left.left())
                }
                Err(Refusal::Socket(error)) => Err(error),
                Ok(sent) => Ok(sent),
            },
            None => socket::send(socket, self.left.left()),
        };
        let sent = sent.map_err(|e| Error::new(ErrorKind::PeerDied, e.to_string()))?;
        self.left.advance(sent);
        Ok(sent as u64)
    }

    fn is_over(&self) -> bool {
        self.heading_sent == HEADING_BYTES && self.left.left().is_empty()
    }
}

/// Gives a socket bytes. Returns how many it took; `None` when it is full.
fn push(socket: &TcpStream, bytes: &[u8], flags: SendFlags) -> Result<Option<usize>> {
    match send(socket, bytes, flags | SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(taken) => Ok(Some(taken)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(Error::new(ErrorKind::PeerDied, error.to_string())),
    }
}
