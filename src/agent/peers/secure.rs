//! With a key: hellos that only its holders can make and read, and frames sealed under the channel that they agree on.
//!
//! The side that connects sends a sealed hello, the first message of a Noise exchange; the other answers with the
//! second. The channel holds from then on: every later frame is sealed whole, header included, and a frame in clear is
//! dropped. Where both connect at once, the exchange counts that the agent with the lower incarnation began: it ignores
//! the other's hello, which answers.
//!
//! A sealed hello names the life of the agent that it is for. With the number that every hello has
//! ([`HelloNumbers`](super::hello_numbers::HelloNumbers)), a captured one is worth nothing.

use super::hello::{Exchange, Hello};
use super::{Peer, Peers};
use crate::agent::core::frame::{FRAME_BYTES, Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::core::limits::MAX_MESSAGE_BYTES;
use crate::error::{Error, Result};
use crate::proto::ids::Incarnation;
use crate::secret::{Initiator, Protocol, Responder};

/// The contents of a sealed hello: the incarnation of the agent that it is for, then the hello.
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
    /// Makes of an arrived frame what it is in clear. Hellos and answers to them stay as they are.
    pub(super) fn unwrap(&mut self, frame: Frame, header: &[u8], data: Vec<u8>) -> Result<(Frame, Vec<u8>)> {
        let sealed = matches!(frame.kind, FrameKind::SealedHello | FrameKind::SealedAnswer | FrameKind::Sealed);
        if sealed != self.are_keyed() {
            return Err(Error::corrupt(if sealed {
                "it is sealed, and this agent has no key: give both the same one (key_file, KVFERRY_KEY_FILE)"
            } else {
                "it is in clear, and this agent has a key: give both the same one (key_file, KVFERRY_KEY_FILE)"
            }));
        }
        // The channel does not cover these bits.
        if sealed && frame.encode() != header {
            return Err(Error::corrupt("a header with bits set that have no meaning"));
        }
        if frame.kind == FrameKind::Sealed { self.open(frame, &data) } else { Ok((frame, data)) }
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

    /// Reads a hello, or the answer to one.
    pub(super) fn open_hello(&mut self, frame: Frame, data: &[u8]) -> Result<(Hello, Exchange)> {
        match (frame.kind, &self.key) {
            (FrameKind::SealedHello, Some(key)) => {
                let (responder, payload) = Responder::read(key, Protocol::Agent, &frame.encode(), data)?;
                // It begins an exchange, whatever it repeats.
                let hello = Hello { seen: None, ..divide(&payload, self.local.incarnation)? };
                Ok((hello, Exchange::Begun(Box::new(responder), frame.sequence)))
            }
            (FrameKind::SealedAnswer, _) => {
                let late = || Error::not_found(format!("a late answer of agent {}", frame.incarnation));
                let id = self.find(frame.incarnation).ok_or_else(late)?;
                let initiator = &mut self.get_mut(id)?.connection.initiator;
                let (payload, channel) = initiator.as_mut().ok_or_else(late)?.finish(data)?;
                *initiator = None;
                let hello = Hello::decode(&payload)?;
                hello.seen.ok_or_else(late)?;
                Ok((hello, Exchange::Ended(channel)))
            }
            _ => Ok((Hello::decode(data)?, Exchange::Clear)),
        }
    }

    /// This side's hello to a peer as it goes out: in answer to `exchange` if there was one, else with the next number.
    pub(super) fn seal_hello(
        &mut self,
        id: PeerId,
        hello: &Hello,
        exchange: Option<Exchange>,
    ) -> Result<(Frame, Vec<u8>)> {
        let Peers { by_id, hello_numbers, key, .. } = self;
        let Peer { connection, incarnation, .. } = by_id.get_mut(id).ok_or_else(|| id.unknown())?;
        match (exchange, key) {
            (Some(Exchange::Begun(responder, number)), _) => {
                let (message, channel) = responder.answer(&hello.encode()?)?;
                connection.take_channel(channel);
                Ok((connection.frame(FrameKind::SealedAnswer, number), message))
            }
            (_, Some(key)) => {
                let frame = connection.frame(FrameKind::SealedHello, hello_numbers.draw());
                let payload = join(*incarnation, hello)?;
                let (initiator, message) = Initiator::start(key, Protocol::Agent, &frame.encode(), &payload)?;
                connection.initiator = Some(initiator);
                Ok((frame, message))
            }
            (_, None) => Ok((connection.frame(FrameKind::Hello, hello_numbers.draw()), hello.encode()?)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sealed_hello_names_its_receiver() {
        let hello = Hello::older((Incarnation(3), 4), None, &[1, 2, 3]);
        let payload = join(Incarnation(9), &hello).unwrap();
        assert_eq!(divide(&payload, Incarnation(9)).unwrap(), hello);
        assert!(divide(&payload, Incarnation(8)).unwrap_err().message().contains("another agent"));
        assert!(divide(payload.get(..7).unwrap(), Incarnation(9)).is_err());
    }
}
