//! With a key: hellos that only its holders can make and read, and frames sealed under the channel that they agree on.
//!
//! The side that connects sends a sealed hello, the first message of a Noise exchange; the other answers with the
//! second. The channel holds from then on: every later frame is sealed whole, header included, and a frame in clear is
//! dropped. Where both connect at once, the exchange counts that the agent with the lower incarnation began: it ignores
//! the other's hello, which answers.
//!
//! A sealed hello names the life of the agent that it is for. With the number that every hello has
//! ([`HelloNumbers`](super::hello_numbers::HelloNumbers)), a captured one is worth nothing.

use std::time::{Duration, Instant};

use super::hello::Hello;
use super::{Io, Peers};
use crate::agent::core::frame::{FRAME_BYTES, Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::core::limits::MAX_MESSAGE_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::Incarnation;
use crate::secret::{Initiator, Key, Protocol, Responder};

/// A complaint about what others send is logged at most so often.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);

/// What an agent with a key keeps beside its peers.
#[derive(Debug)]
pub(crate) struct Secrets {
    key: Option<Key>,
    complained: Option<Instant>,
}

impl Secrets {
    pub(crate) fn new(key: Option<Key>) -> Secrets {
        Secrets { key, complained: None }
    }

    pub(crate) fn is_keyed(&self) -> bool {
        self.key.is_some()
    }

    /// What a peer that did not answer may be lacking, for an error's text.
    pub(crate) fn hint(&self) -> &'static str {
        match self.key {
            Some(_) => " Has it the same key (key_file, KVFERRY_KEY_FILE)?",
            None => " If it has a key (key_file, KVFERRY_KEY_FILE), this agent needs it too",
        }
    }

    fn key(&self) -> Result<Key> {
        self.key.clone().ok_or_else(|| Error::new(ErrorKind::Internal, "this agent has no key"))
    }

    /// Logs what others do wrong, at most once a minute.
    fn complain(&mut self, agent: &str, text: &Error, now: Instant) {
        if self.complained.is_none_or(|at| now.duration_since(at) >= COMPLAINT_INTERVAL) {
            self.complained = Some(now);
            log::warn!(
                "agent {agent}: a message was dropped: {text} (further ones in the next minute are only counted)"
            );
        }
    }
}

/// What a sealed hello holds: the life of the agent that it is for, then the hello.
fn join(to: Incarnation, hello: &Hello) -> Result<Vec<u8>> {
    Ok([to.0.to_le_bytes().as_slice(), &hello.encode()?].concat())
}

fn divide(payload: &[u8], own: Incarnation) -> Result<Hello> {
    let (to, hello) = payload.split_first_chunk::<8>().ok_or_else(|| Error::corrupt("a sealed hello that is cut"))?;
    if Incarnation(u64::from_le_bytes(*to)) != own {
        return Err(Error::corrupt("a sealed hello for another agent, or for an earlier life of this one"));
    }
    Hello::decode(hello)
}

impl Peers {
    /// Makes of an arrived frame what it is in clear. `None`: it was a sealed hello or an answer to one, which is
    /// taken here.
    pub(super) fn unwrap(
        &mut self,
        frame: Frame,
        header: &[u8],
        data: Vec<u8>,
        io: &mut Io<'_>,
    ) -> Result<Option<(Frame, Vec<u8>)>> {
        let sealed = matches!(frame.kind, FrameKind::SealedHello | FrameKind::SealedAnswer | FrameKind::Sealed);
        if sealed != self.secrets.is_keyed() {
            let error = Error::corrupt(if sealed {
                "it is sealed, and this agent has no key: give both the same one (key_file, KVFERRY_KEY_FILE)"
            } else {
                "it is in clear, and this agent has a key: give both the same one (key_file, KVFERRY_KEY_FILE)"
            });
            self.secrets.complain(&self.local.name, &error, io.now);
            return Err(error);
        }
        if !sealed {
            return Ok(Some((frame, data)));
        }
        // What a header may not say, and the channel would not cover.
        if frame.encode() != header {
            return Err(Error::corrupt("a header with bits set that have no meaning"));
        }
        match frame.kind {
            FrameKind::SealedHello => self.on_sealed_hello(frame, &data, io).map(|()| None),
            FrameKind::SealedAnswer => self.on_sealed_answer(frame, &data, io).map(|()| None),
            _ => self.open(frame, &data).map(Some),
        }
    }

    fn open(&mut self, outer: Frame, data: &[u8]) -> Result<(Frame, Vec<u8>)> {
        let unknown = || Error::not_found(format!("agent {} has no channel to this one", outer.incarnation));
        let id = self.find(outer.incarnation).ok_or_else(unknown)?;
        let peer = self.get_mut(id)?;
        if !peer.connection.is_current(outer.connection) {
            return Err(Error::not_found(format!("it belongs to an earlier connection of agent {}", peer.name)));
        }
        let channel = peer.connection.channel.as_mut().ok_or_else(unknown)?;
        let (header, data) = channel.opener.open(outer.sequence, data, FRAME_BYTES, MAX_MESSAGE_BYTES)?;
        let frame = Frame::decode(&header)?;
        let same = (frame.incarnation, frame.connection) == (outer.incarnation, outer.connection);
        let hello = matches!(frame.kind, FrameKind::Hello | FrameKind::SealedHello | FrameKind::SealedAnswer);
        if !same || hello || frame.kind == FrameKind::Sealed {
            return Err(Error::corrupt(format!("a sealed message of agent {} that contradicts its header", peer.name)));
        }
        Ok((frame, data))
    }

    /// Begins the exchange with a peer that was just made.
    pub(super) fn send_sealed_hello(&mut self, id: PeerId, io: &mut Io<'_>) -> Result<()> {
        let key = self.secrets.key()?;
        let hello = self.own_hello(id, None)?;
        let number = self.hello_numbers.draw();
        let peer = self.get_mut(id)?;
        let frame = peer.connection.frame(FrameKind::SealedHello, number);
        let payload = join(peer.incarnation, &hello)?;
        let (initiator, message) = Initiator::start(&key, Protocol::Agent, &frame.encode(), &payload)?;
        peer.connection.initiator = Some(initiator);
        peer.connection.post(frame, message, 0, io.operations)
    }

    fn on_sealed_hello(&mut self, frame: Frame, data: &[u8], io: &mut Io<'_>) -> Result<()> {
        let key = self.secrets.key()?;
        let (responder, payload) =
            Responder::read(&key, Protocol::Agent, &frame.encode(), data).inspect_err(|error| {
                self.secrets.complain(&self.local.name, error, io.now);
            })?;
        let hello = divide(&payload, self.local.incarnation)?;
        hello.check(frame)?;
        let number = frame.sequence;
        self.check_hello_number(&hello, number)?;
        let Some(id) = self.find(hello.incarnation) else {
            return self.accept_sealed(&hello, number, responder, io);
        };
        let peer = self.get(id)?;
        match peer.connection.remote {
            // Ours, sent at the same time, was answered already.
            Some(known) if known == hello.connection => Ok(()),
            Some(_) => {
                self.lose_replaced(id, &hello, io);
                self.accept_sealed(&hello, number, responder, io)
            }
            // Both connect at once, and ours counts.
            None if self.local.incarnation < hello.incarnation => Ok(()),
            None => self.answer_hello(id, &hello, number, responder, io),
        }
    }

    fn accept_sealed(&mut self, hello: &Hello, number: u64, responder: Responder, io: &mut Io<'_>) -> Result<()> {
        self.check_open()?;
        let id = self.admit_new(hello, io)?;
        self.answer_hello(id, hello, number, responder, io)
    }

    fn answer_hello(
        &mut self,
        id: PeerId,
        hello: &Hello,
        number: u64,
        responder: Responder,
        io: &mut Io<'_>,
    ) -> Result<()> {
        self.trust(id)?;
        // Before the peer reads the answer and looks.
        self.get_mut(id)?.locality.take_challenge(hello);
        let answer = self.own_hello(id, Some(hello.connection))?;
        let (message, channel) = responder.answer(&answer.encode()?)?;
        let connection = &mut self.get_mut(id)?.connection;
        connection.channel = Some(channel);
        let posted = connection.post(connection.frame(FrameKind::SealedAnswer, number), message, 0, io.operations);
        posted.inspect_err(|error| io.effects.lose(id, error.clone()))?;
        // An agent that is its own peer has both ends of the channel only when it has read its own answer.
        if hello.incarnation == self.local.incarnation { Ok(()) } else { self.greet_sealed(id, hello, io) }
    }

    fn on_sealed_answer(&mut self, frame: Frame, data: &[u8], io: &mut Io<'_>) -> Result<()> {
        let late = || Error::not_found(format!("a late answer of agent {}", frame.incarnation));
        let id = self.find(frame.incarnation).ok_or_else(late)?;
        let own = frame.incarnation == self.local.incarnation;
        let peer = self.get_mut(id)?;
        let initiator = peer.connection.initiator.as_mut().ok_or_else(late)?;
        let (payload, channel) = initiator.finish(data)?;
        peer.connection.initiator = None;
        let hello = Hello::decode(&payload)?;
        hello.check(frame)?;
        if hello.seen != Some(peer.connection.number) {
            return Err(late());
        }
        let peer = self.get_mut(id)?;
        match peer.connection.remote {
            Some(known) if known == hello.connection => Err(late()),
            // It took up our hello after we had taken up its own: it knows another connection than we do.
            Some(_) => {
                let error = Error::new(ErrorKind::PeerDied, format!("agent {} has made a new connection", hello.name));
                io.effects.lose(id, error);
                Ok(())
            }
            None => {
                match (peer.connection.channel.as_mut(), own) {
                    // To itself: the one end seals, the other opens.
                    (Some(answering), true) => answering.sealer = channel.sealer,
                    _ => peer.connection.channel = Some(channel),
                }
                self.greet_sealed(id, &hello, io)
            }
        }
    }

    /// The channel is there: what waited for it goes out.
    fn greet_sealed(&mut self, id: PeerId, hello: &Hello, io: &mut Io<'_>) -> Result<()> {
        self.greet(id, hello, io)?;
        self.get_mut(id)?
            .connection
            .begin_messages(io.operations)
            .inspect_err(|error| io.effects.lose(id, error.clone()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::proto::wire::Versions;

    #[test]
    fn a_sealed_hello_is_for_one_life_of_one_agent() {
        let hello = Hello {
            name: "a".to_owned(),
            incarnation: Incarnation(3),
            connection: 4,
            seen: None,
            address: vec![1, 2, 3],
            process: None,
            revocations: false,
            uses: false,
            withdrawn: Vec::new(),
            withdrew_more: false,
            challenge: None,
            versions: Versions::OURS,
        };
        let payload = join(Incarnation(9), &hello).unwrap();
        assert_eq!(divide(&payload, Incarnation(9)).unwrap(), hello);
        assert!(divide(&payload, Incarnation(8)).unwrap_err().message().contains("another agent"));
        assert!(divide(payload.get(..7).unwrap(), Incarnation(9)).is_err());
    }
}
