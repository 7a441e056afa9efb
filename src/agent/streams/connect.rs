//! The asking side: a stream is asked for and connected to.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::recv::{Inbound, Receiver};
use super::wire::{Offer, Secret, greeting};
use super::{INBOUND, Io, Streams, prepare};
use crate::agent::core::effect::Effects;
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::peers::{Peer, Peers};
use crate::error::{Error, ErrorKind, Result};
use crate::net::connecting;

/// How long an address may take to connect and to answer. Bytes go by messages meanwhile, and for as long as the connection
/// lasts if none answers.
const CONNECT_TIME: Duration = Duration::from_secs(10);

/// What the asking side has yet to try.
pub(crate) struct Attempt {
    socket: TcpStream,
    to: SocketAddr,
    left: VecDeque<SocketAddr>,
    ticket: Secret,
    answer: Secret,
    /// Bytes of the answer that have come; `None` until the ticket was shown.
    heard: Option<Vec<u8>>,
    pub(crate) deadline: Instant,
}

impl Streams {
    /// Asks a peer for a stream if there may be one and was none.
    pub(crate) fn ask(&mut self, peer: &Peer, effects: &mut Effects) {
        if peer.may_stream && !self.inbound.contains_key(&peer.id) {
            self.inbound.insert(peer.id, Inbound::Asked);
            effects.send(peer.id, FrameKind::StreamQuestion, 0, Vec::new());
        }
    }

    /// A peer says where its stream is.
    pub(crate) fn on_offer(&mut self, id: PeerId, data: &[u8], io: &mut Io<'_>) -> Result<()> {
        let offer = Offer::decode(data)?;
        let asked = matches!(self.inbound.get(&id), Some(Inbound::Asked));
        if !asked || self.attempts.contains_key(&id) {
            return Err(Error::corrupt("an offer of a stream that was not asked for"));
        }
        self.try_next(id, offer.parsed()?, offer.ticket, offer.answer, io);
        Ok(())
    }

    /// Connects to the next address of an offer.
    fn try_next(&mut self, id: PeerId, mut left: VecDeque<SocketAddr>, ticket: Secret, answer: Secret, io: &Io<'_>) {
        while let Some(to) = left.pop_front() {
            let opened = connecting(to).map_err(|e| Error::new(ErrorKind::Unreachable, e.to_string()));
            let socket = match opened.and_then(|socket| self.watch(&socket, INBOUND | id.raw()).map(|()| socket)) {
                Ok(socket) => socket,
                Err(error) => {
                    self.tell_failed(id, to, &error, io.peers);
                    continue;
                }
            };
            prepare(&socket);
            let deadline = io.now + CONNECT_TIME;
            self.attempts.insert(id, Attempt { socket, to, left, ticket, answer, heard: None, deadline });
            return;
        }
        log::info!(
            "agent {}: bytes of {} come in UCX's messages, because no stream to it could be made",
            self.name,
            io.peers.name(id)
        );
        self.inbound.insert(id, Inbound::Failed);
    }

    fn tell_failed(&self, id: PeerId, to: SocketAddr, why: &dyn std::fmt::Display, peers: &Peers) {
        log::debug!("agent {}: no stream to {} at {to}: {why}", self.name, peers.name(id));
    }

    /// Goes on with a stream that is being made, or looks at one that has changed.
    pub(super) fn inbound_changed(&mut self, id: PeerId, io: &mut Io<'_>) {
        let Some(mut attempt) = self.attempts.remove(&id) else {
            if let Some(Inbound::Up(_)) = self.inbound.get(&id) {
                self.reading.insert(id);
            }
            return;
        };
        match attempt.advance() {
            Ok(false) => drop(self.attempts.insert(id, attempt)),
            Ok(true) => {
                log::debug!("agent {}: a stream from {} at {}", self.name, io.peers.name(id), attempt.to);
                if let Ok(peer) = io.peers.get_mut(id) {
                    peer.streamed = true;
                    self.inbound.insert(id, Inbound::Up(Receiver::new(attempt.socket)));
                }
            }
            Err(error) => {
                self.tell_failed(id, attempt.to, &error, io.peers);
                self.try_next(id, attempt.left, attempt.ticket, attempt.answer, io);
            }
        }
    }

    /// Goes on to the next address where one takes too long.
    pub(super) fn end_late_attempts(&mut self, io: &mut Io<'_>) {
        let late: Vec<(PeerId, Attempt)> = self.attempts.extract_if(|_, attempt| attempt.deadline <= io.now).collect();
        for (id, attempt) in late {
            self.tell_failed(id, attempt.to, &format!("no answer within {CONNECT_TIME:?}"), io.peers);
            self.try_next(id, attempt.left, attempt.ticket, attempt.answer, io);
        }
    }
}

impl Attempt {
    /// Goes on. Returns whether the peer has answered.
    fn advance(&mut self) -> Result<bool> {
        let failed = |what: &str, e: std::io::Error| Error::new(ErrorKind::Unreachable, format!("{what}: {e}"));
        if let Some(error) = self.socket.take_error().map_err(|e| failed("connecting", e))? {
            return Err(failed("connecting", error));
        }
        let heard = match &mut self.heard {
            Some(heard) => heard,
            None => {
                if self.socket.peer_addr().is_err() {
                    return Ok(false);
                }
                let greeting = greeting(&self.ticket);
                // There is room for it in a new connection.
                if self.socket.write(&greeting).map_err(|e| failed("greeting", e))? != greeting.len() {
                    return Err(Error::new(ErrorKind::Unreachable, "the connection takes no greeting"));
                }
                self.heard.insert(Vec::new())
            }
        };
        loop {
            let mut part = [0; size_of::<Secret>()];
            // Not more than the answer: what follows is the first chunk's.
            let room = part.get_mut(heard.len()..).unwrap_or_default();
            if room.is_empty() {
                break;
            }
            match self.socket.read(room) {
                Ok(0) => return Err(Error::new(ErrorKind::Unreachable, "the other side closed the connection")),
                Ok(len) => heard.extend_from_slice(room.get(..len).unwrap_or_default()),
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(failed("reading the answer", error)),
            }
        }
        if *heard != self.answer {
            return Err(Error::new(ErrorKind::Unreachable, "somebody else answers there"));
        }
        Ok(true)
    }
}
