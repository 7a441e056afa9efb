//! The serving side of a stream: chunks that were asked for, sent one after the other.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoErrorKind, Read};
use std::net::TcpStream;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::super::ferry::Engine;
use super::super::hello::FrameKind;
use super::super::ids::PeerId;
use super::super::served::{MAX_WAITING, Piece, stream_request, total};
use super::super::spots::{self, Spot};
use super::TURN_BYTES;
use super::greeting::{HEADING_BYTES, Heading, Secret};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::socket::{PagePipe, Refusal, Stretch};

/// Pieces shorter than this on average are copied into a buffer first: a socket's buffer has room for 17 pieces of pages.
const PAGES_FROM: u64 = 2 << 10;

/// A stream to a peer.
pub(super) struct Outbound {
    pub(super) ticket: Secret,
    pub(super) answer: Secret,
    /// `None` until the peer has connected.
    socket: Option<TcpStream>,
    waiting: VecDeque<Asked>,
    sending: Option<Sending>,
}

/// A chunk that a peer asked for.
struct Asked {
    chunk: u64,
    pieces: Vec<Piece>,
}

/// The chunk that is being sent.
struct Sending {
    pieces: Vec<Piece>,
    bytes: u64,
    heading: [u8; HEADING_BYTES],
    /// Bytes of the heading, and of the chunk, that the socket has taken.
    heading_sent: usize,
    sent: u64,
    /// Its bytes, where pages are not lent.
    copied: Option<Vec<u8>>,
}

impl Outbound {
    pub(super) fn offered(ticket: Secret, answer: Secret) -> Self {
        Outbound { ticket, answer, socket: None, waiting: VecDeque::new(), sending: None }
    }

    pub(super) fn connect(&mut self, socket: TcpStream) {
        self.socket = Some(socket);
    }
}

impl Engine {
    /// A peer asks for a chunk by its stream.
    pub(in crate::agent) fn on_stream_request(
        &mut self,
        id: PeerId,
        chunk: u64,
        data: &[u8],
        now: Instant,
    ) -> Result<()> {
        let (pieces, processor) = stream_request(data)?;
        if self.peers.get(id).is_ok_and(|peer| peer.on_this_host) {
            self.streams.parting.look(processor, now);
        }
        // What it may not have is refused before anything is sent.
        let refused = match (self.locate(&pieces), self.streams.outbound.get_mut(&id)) {
            (Err(error), _) => error,
            (_, Some(outbound)) if outbound.socket.is_some() => {
                if outbound.waiting.len() >= MAX_WAITING {
                    let error =
                        Error::new(ErrorKind::Exhausted, format!("the peer has asked for {MAX_WAITING} reads at once"));
                    self.lose(id, error.clone(), now);
                    return Err(error);
                }
                outbound.waiting.push_back(Asked { chunk, pieces });
                self.streams.writing.insert(id);
                return Ok(());
            }
            _ => Error::not_found("this agent has no stream to the peer"),
        };
        self.reply(id, FrameKind::ReadReply, chunk, Err(refused), 0, now);
        Ok(())
    }

    /// Sends on. Returns whether the socket took anything.
    pub(super) fn send_stream(&mut self, id: PeerId, now: Instant) -> bool {
        let Some(mut outbound) = self.streams.outbound.remove(&id) else {
            self.streams.writing.remove(&id);
            return false;
        };
        let (mut moved, mut broken) = (0, None);
        while moved < TURN_BYTES {
            if outbound.sending.is_none() {
                let Some(asked) = outbound.waiting.pop_front() else {
                    self.streams.writing.remove(&id);
                    break;
                };
                // A region may have gone meanwhile.
                if let Err(error) = self.locate(&asked.pieces) {
                    self.reply(id, FrameKind::ReadReply, asked.chunk, Err(error), 0, now);
                    continue;
                }
                outbound.sending = Some(Sending::new(asked));
            }
            let (Some(sending), Some(socket)) = (&mut outbound.sending, &outbound.socket) else { break };
            match self.send_some(socket, sending) {
                Ok(0) => break,
                Ok(bytes) => moved += bytes,
                Err(error) => {
                    broken = Some(error);
                    break;
                }
            }
            if sending.is_over() {
                outbound.sending = None;
            }
        }
        // Whom a refusal could not reach is lost, and its stream with it.
        if self.peers.get(id).is_ok() {
            self.streams.outbound.insert(id, outbound);
        }
        if moved > 0 {
            self.served_at = Some(now);
        }
        if let Some(error) = broken {
            self.lose(id, error.context("the stream to the peer broke"), now);
        }
        moved > 0
    }

    /// Gives the socket more of a chunk. Returns how many bytes it took, 0 when it is full.
    fn send_some(&mut self, socket: &TcpStream, sending: &mut Sending) -> Result<u64> {
        let heading = sending.heading.get(sending.heading_sent..).unwrap_or_default();
        if !heading.is_empty() {
            let Some(taken) = push(socket, heading, SendFlags::MORE)? else { return Ok(0) };
            sending.heading_sent = sending.heading_sent.saturating_add(taken);
            return Ok(taken as u64);
        }
        // Each time anew: a region that was deregistered is not touched again.
        let spots = self.locate(&sending.pieces)?;
        if sending.copied.is_none() && sending.bytes >= PAGES_FROM.saturating_mul(sending.pieces.len() as u64) {
            let stretches = stretches_from(&spots, sending.sent)?;
            if self.streams.pipe.is_none() {
                self.streams.pipe = PagePipe::new().ok();
            }
            let lent = self.streams.pipe.as_ref().map(|pipe| pipe.send(socket, &stretches));
            match lent {
                Some(Ok(sent)) => {
                    sending.sent = sending.sent.saturating_add(sent as u64);
                    return Ok(sent as u64);
                }
                Some(Err(Refusal::Socket(error))) => return Err(Error::new(ErrorKind::PeerDied, error.to_string())),
                Some(Err(Refusal::Pages(error))) => {
                    log::debug!("agent {}: pages are copied, not lent: {error}", self.config.name);
                }
                None => {}
            }
        }
        let copied = match &mut sending.copied {
            Some(copied) => copied,
            None => {
                let mut bytes = Vec::with_capacity(usize::try_from(sending.bytes).unwrap_or(0));
                spots::gather(&spots, &mut bytes)?;
                sending.copied.insert(bytes)
            }
        };
        let left = usize::try_from(sending.sent).ok().and_then(|sent| copied.get(sent..)).unwrap_or_default();
        let Some(taken) = push(socket, left, SendFlags::empty())? else { return Ok(0) };
        sending.sent = sending.sent.saturating_add(taken as u64);
        Ok(taken as u64)
    }

    /// Looks whether a stream that has changed has ended: nothing comes on it.
    pub(super) fn outbound_changed(&mut self, id: PeerId, now: Instant) {
        let Some(mut socket) = self.streams.outbound.get(&id).and_then(|outbound| outbound.socket.as_ref()) else {
            return;
        };
        let why = match socket.read(&mut [0; 1]) {
            Err(error) if matches!(error.kind(), IoErrorKind::WouldBlock | IoErrorKind::Interrupted) => return,
            Err(error) => error.to_string(),
            Ok(0) => "the peer closed it".to_owned(),
            Ok(_) => "the peer sent bytes on it".to_owned(),
        };
        if self.streams.writing.contains(&id) {
            self.lose(id, Error::new(ErrorKind::PeerDied, format!("the stream to the peer broke: {why}")), now);
        } else {
            log::debug!("agent {}: the stream to {id} has ended: {why}", self.config.name);
            self.streams.forget_outbound(id);
        }
    }
}

impl super::Streams {
    /// Closes the stream to a peer.
    pub(super) fn forget_outbound(&mut self, id: PeerId) {
        self.writing.remove(&id);
        if let Some(outbound) = self.outbound.remove(&id) {
            self.tickets.remove(&outbound.ticket);
        }
    }
}

impl Sending {
    fn new(asked: Asked) -> Self {
        let bytes = total(&asked.pieces);
        // At most a chunk's, so it fits.
        let heading = Heading { chunk: asked.chunk, len: bytes as u32 }.encode();
        Sending { pieces: asked.pieces, bytes, heading, heading_sent: 0, sent: 0, copied: None }
    }

    fn is_over(&self) -> bool {
        self.heading_sent == HEADING_BYTES && self.sent >= self.bytes
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

/// Where the bytes of spots are, but for the first `skip`.
pub(super) fn stretches_from(spots: &[Spot], mut skip: u64) -> Result<Vec<Stretch>> {
    let mut stretches = Vec::with_capacity(spots.len());
    for spot in spots {
        let len = u64::from(spot.len);
        if skip < len {
            stretches.push(Stretch::new(&spot.range, spot.offset.saturating_add(skip), len - skip)?);
        }
        skip = skip.saturating_sub(len);
    }
    Ok(stretches)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::mem::MemoryRange;
    use crate::proto::wire::MemoryKind;

    #[test]
    fn what_was_sent_is_skipped_within_and_across_spots() {
        // SAFETY: it is not registered, and nothing is read or written: only addresses are compared.
        let range = unsafe { MemoryRange::new(4096, 64, MemoryKind::Host) }.unwrap();
        let spots = [(0, 10), (20, 5), (40, 8)].map(|(offset, len)| Spot { range, offset, len });
        let shown = |skip| format!("{:?}", stretches_from(&spots, skip).unwrap());
        let made = |parts: &[(u64, u64)]| {
            let made: Vec<Stretch> = parts.iter().map(|(at, len)| Stretch::new(&range, *at, *len).unwrap()).collect();
            format!("{made:?}")
        };
        assert_eq!(shown(0), made(&[(0, 10), (20, 5), (40, 8)]));
        assert_eq!(shown(9), made(&[(9, 1), (20, 5), (40, 8)]));
        assert_eq!(shown(10), made(&[(20, 5), (40, 8)]));
        assert_eq!(shown(17), made(&[(42, 6)]));
        assert_eq!(shown(23), made(&[]));
        assert_eq!(shown(u64::MAX), made(&[]));
    }
}
