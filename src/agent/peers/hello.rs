//! The first message of each connection, and what follows from it, with a key and without.
//!
//! Each side says hello once it has made its endpoint, and answers the first hello of the other. Hellos are counted
//! ([`hello_numbers`](super::hello_numbers)), so that a late one changes nothing.

use serde::{Deserialize, Serialize};

use super::connection::Connection;
use super::reach::Reach;
use super::{Io, Peers, two_addresses};
use crate::agent::core::effect::Effect;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::Incarnation;
use crate::proto::wire::{self, OLDEST, Versions};
use crate::secret::{Channel, Responder};
use crate::sys::process::{Challenge, ProcessPlace};

/// The first message on a connection, from either side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The sender's name.
    pub(crate) name: String,
    /// The sender's incarnation.
    pub(crate) incarnation: Incarnation,
    /// The sender's number for its connection to the receiver.
    pub(crate) connection: u64,
    /// The receiver's number for its connection to the sender, if the sender has heard of one. A side that reads its
    /// own current number here need not answer.
    pub(crate) seen: Option<u64>,
    /// The sender's worker address in its checked envelope, so that the receiver can connect back.
    #[serde(with = "serde_bytes")]
    pub(crate) address: Vec<u8>,
    /// Where the sender's process is, for a receiver on the same host.
    #[serde(default)]
    pub(crate) process: Option<ProcessPlace>,
    /// Whether the sender knows revocations of regions.
    #[serde(default)]
    pub(crate) revocations: bool,
    /// Whether the sender knows that memory may be in use for longer than an answer takes.
    #[serde(default)]
    pub(crate) uses: bool,
    /// The sender's regions that it has revoked, whatever metadata the receiver has: first and last of each run.
    #[serde(rename = "withdrawn", default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) revoked: Vec<(u32, u32)>,
    /// Whether there are more of them: the receiver then uses no memory of the sender's by itself.
    #[serde(rename = "withdrew_more", default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) revoked_more: bool,
    /// The words that the receiver writes into its witness for this connection, before the sender copies its memory. `None` of a
    /// sender that knows nothing of it: its own witness has no answers either.
    #[serde(default)]
    pub(crate) challenge: Option<Challenge>,
    /// The protocol versions that the sender speaks; on the wire they are in the envelope.
    #[serde(skip, default = "ours")]
    pub(crate) versions: Versions,
}

fn ours() -> Versions {
    Versions::OURS
}

/// A hello is a name, an address of a few hundred bytes and some numbers.
const MAX_HELLO_BYTES: usize = 64 << 10;

impl Hello {
    /// Encodes it in the oldest version that is spoken: it is the first message of its connection.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        wire::encode("hello", OLDEST, self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Hello> {
        let (hello, versions) = wire::decode::<Hello>("hello", OLDEST, bytes, MAX_HELLO_BYTES)?;
        if hello.name.is_empty() || hello.name.len() > 256 {
            return Err(Error::corrupt(format!(
                "a hello with a name of {} bytes, expected 1 to 256",
                hello.name.len()
            )));
        }
        Ok(Hello { versions, ..hello })
    }

    /// Refuses a hello that contradicts the header that it came with.
    pub(super) fn check(&self, frame: Frame) -> Result<()> {
        if (frame.incarnation, frame.connection) != (self.incarnation, self.connection) || self.incarnation.0 == 0 {
            return Err(Error::corrupt(format!("a hello of agent {} that contradicts its own header", self.name)));
        }
        Ok(())
    }
}

/// How a hello came, and what belongs to its answer.
pub(super) enum Exchange {
    /// In clear.
    Clear,
    /// As the first message of a Noise exchange, whose answer has the same number.
    Begun(Box<Responder>, u64),
    /// As the second one, which brings the channel.
    Ended(Channel),
}

impl Peers {
    /// Says hello, in answer to a hello of that connection if there was one, and expects the answer in time if the peer has said
    /// none yet.
    pub(super) fn send_hello(&mut self, id: PeerId, to: Option<(u64, Exchange)>, io: &mut Io<'_>) -> Result<()> {
        if !self.get(id)?.is_ready() {
            self.by_id.set_deadline(id, io.now.checked_add(self.local.connect_timeout));
        }
        let (seen, exchange) = to.unzip();
        let hello = self.own_hello(id, seen)?;
        let (frame, data) = self.seal_hello(id, &hello, exchange)?;
        let connection = &mut self.get_mut(id)?.connection;
        connection.post(frame, data, 0, io.operations)?;
        // Without a key messages follow at once.
        let is_open = frame.kind == FrameKind::Hello || connection.remote.is_some();
        if is_open { connection.begin_messages(io.operations) } else { Ok(()) }
    }

    /// Decides whether a peer may use memory of this side by itself, before it is sent a hello or given an answer.
    fn trust(&mut self, id: PeerId) -> Result<()> {
        let Peers { by_id, revoked, .. } = self;
        let locality = &mut by_id.get_mut(id).ok_or_else(|| id.unknown())?.locality;
        if revoked.are_cut(locality.is_near) {
            locality.knows_part = true;
            // Nor is it one for an older peer, which looks for no answer.
            locality.witness.end();
        }
        Ok(())
    }

    fn own_hello(&mut self, id: PeerId, seen: Option<u64>) -> Result<Hello> {
        self.trust(id)?;
        let peer = self.get(id)?;
        let (connection, locality) = (&peer.connection, &peer.locality);
        Ok(Hello {
            name: self.local.name.clone(),
            incarnation: self.local.incarnation,
            connection: connection.number,
            seen,
            address: self.local.address.clone(),
            process: self.local.place.as_ref().map(|here| locality.witness.place(here)),
            revocations: true,
            uses: true,
            revoked: self.revoked.named(locality.is_near),
            revoked_more: locality.knows_part,
            challenge: Some(locality.challenge),
            versions: Versions::OURS,
        })
    }

    /// Takes a hello that arrived.
    pub(super) fn on_hello(&mut self, frame: Frame, data: &[u8], io: &mut Io<'_>) -> Result<()> {
        let (hello, exchange) = self.open_hello(frame, data)?;
        hello.check(frame)?;
        // The answer to a sealed hello has that one's number. In clear an older kvferry has none.
        if frame.kind == FrameKind::SealedHello || frame.kind == FrameKind::Hello && frame.sequence != 0 {
            let Peers { hello_numbers, by_incarnation, .. } = self;
            let sender = (hello.incarnation, &*hello.address);
            let number = hello_numbers.take(sender, frame.sequence, |agent| by_incarnation.contains_key(&agent));
            if let Err(late) = number {
                // Of one connection, a later hello says all that an earlier one does.
                let known = self.find(hello.incarnation).and_then(|id| self.get(id).ok());
                let is_current = known.is_some_and(|peer| peer.connection.is_current(hello.connection));
                return if is_current && !self.are_keyed() { Ok(()) } else { Err(late) };
            }
        }
        let Some(id) = self.find(hello.incarnation) else {
            return match hello.seen {
                // An answer to a connection that was given up here meanwhile.
                Some(_) => Err(Error::not_found(format!("a late hello of agent {}", hello.name))),
                None => self.accept(&hello, exchange, io),
            };
        };
        let Connection { number, remote, ref address, .. } = self.get(id)?.connection;
        // A sealed hello says whom it is for, and only holders of the key can make it.
        if !self.are_keyed() && *address != hello.address {
            return Err(two_addresses(&hello.name, hello.incarnation));
        }
        match (hello.seen, remote) {
            (Some(seen), _) if seen != number => {
                Err(Error::not_found(format!("a hello of agent {} about an earlier connection", hello.name)))
            }
            // It says nothing new.
            (_, Some(known)) if known == hello.connection => Ok(()),
            // The peer took up this side's hello after this side had taken up one of its own: it knows another connection.
            (Some(_), Some(_)) if !self.are_keyed() => {
                self.by_id.drop_held(id);
                self.greet(id, &hello, io)
            }
            (Some(_), Some(_)) => {
                let error = Error::new(ErrorKind::PeerDied, format!("agent {} has made a new connection", hello.name));
                io.effects.lose(id, error);
                Ok(())
            }
            (Some(_), None) => {
                if let Exchange::Ended(channel) = exchange {
                    self.get_mut(id)?.connection.take_channel(channel);
                }
                self.greet(id, &hello, io)?;
                let begun = self.get_mut(id)?.connection.begin_messages(io.operations);
                begun.inspect_err(|error| io.effects.lose(id, error.clone()))
            }
            (None, Some(_)) => {
                self.lose_replaced(id, &hello, io);
                self.accept(&hello, exchange, io)
            }
            // Both connect at once. One exchange counts: the one that the lower incarnation has begun.
            (None, None) if self.are_keyed() && self.local.incarnation < hello.incarnation => Ok(()),
            (None, None) => self.answer(id, &hello, exchange, io),
        }
    }

    /// Loses a peer that has made a new connection.
    fn lose_replaced(&mut self, id: PeerId, hello: &Hello, io: &mut Io<'_>) {
        if let Ok(peer) = self.get_mut(id) {
            peer.connection.has_left = true;
        }
        let text = format!("agent {} lost the connection and has made a new one", hello.name);
        // It has given up the old one, and what is copied over that.
        self.lose(id, Error::new(ErrorKind::PeerDied, text), false, io);
    }

    /// Makes a peer of an agent that connected to this one.
    fn accept(&mut self, hello: &Hello, exchange: Exchange, io: &mut Io<'_>) -> Result<()> {
        self.check_open()?;
        self.make_room(io)?;
        let mut peer = self.make(hello.name.clone(), hello.incarnation, &hello.address, io)?;
        peer.silent = true;
        let id = peer.id;
        self.insert(peer, io.live);
        self.admission.note(id);
        self.answer(id, hello, exchange, io)
    }

    /// Answers the first hello that a peer has said.
    fn answer(&mut self, id: PeerId, hello: &Hello, exchange: Exchange, io: &mut Io<'_>) -> Result<()> {
        // With a key, an agent that is its own peer has both ends of the channel only when it has read its own answer.
        if !self.are_keyed() || hello.incarnation != self.local.incarnation {
            self.greet(id, hello, io)?;
        }
        let said = self.send_hello(id, Some((hello.connection, exchange)), io);
        said.inspect_err(|error| io.effects.lose(id, error.clone()))
    }

    /// Notes that the peer is there and itself.
    fn greet(&mut self, id: PeerId, hello: &Hello, io: &mut Io<'_>) -> Result<()> {
        self.trust(id)?;
        let Peers { by_id, local, .. } = self;
        by_id.set_deadline(id, None);
        let peer = by_id.get_mut(id).ok_or_else(|| id.unknown())?;
        // Before the peer reads the answer and looks.
        peer.locality.take_challenge(hello);
        peer.connection.remote = Some(hello.connection);
        peer.connection.version = hello.versions.common();
        peer.reach = Reach::of(&peer.connection.endpoint.describe());
        if peer.locality.knows_part && !hello.uses && peer.reach.by_cuda_ipc {
            let error = Error::new(
                ErrorKind::Incompatible,
                format!(
                    "agent {} is of an older kvferry, which would copy device memory that this agent has deregistered; update it",
                    peer.name
                ),
            );
            io.effects.lose(id, error.clone());
            return Err(error);
        }
        if hello.revoked_more {
            peer.reach = peer.reach.without_cuda_ipc();
            log::info!(
                "agent {}: agent {} has deregistered more regions than it can list: its memory goes by messages",
                local.name,
                peer.name
            );
        }
        for (first, last) in &hello.revoked {
            // UCX is given no device memory before the hello, and a hello is too short for too many runs: so there is
            // no connection to be ended for that.
            let _ = peer.take_revoked(*first..=*last);
        }
        if peer.locality.learn(hello, local.place.as_ref()) {
            log::info!(
                "agent {}: agent {} is of an older kvferry and cannot prove which process it is: its memory goes by \
                 messages",
                local.name,
                peer.name
            );
        }
        peer.locality.find_neighbour((&peer.name, peer.incarnation), &local.address);
        io.effects.push(Effect::PeerReady { peer: id });
        Ok(())
    }
}

#[cfg(test)]
impl Hello {
    /// The hello of an older agent "a" over its connection, which knows of no challenges and uses, for tests.
    pub(crate) fn older((incarnation, connection): (Incarnation, u64), seen: Option<u64>, address: &[u8]) -> Hello {
        Hello {
            name: "a".to_owned(),
            incarnation,
            connection,
            seen,
            address: address.to_vec(),
            process: None,
            revocations: true,
            uses: false,
            revoked: Vec::new(),
            revoked_more: false,
            challenge: None,
            versions: Versions::OURS,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;
    use crate::proto::wire::VERSION;
    use crate::sys::process::Witness;

    /// The hello of a build that has streams, and knows no challenges and no revocations.
    #[derive(Serialize)]
    struct Older {
        name: &'static str,
        incarnation: Incarnation,
        connection: u64,
        seen: Option<u64>,
        #[serde(with = "serde_bytes")]
        address: Vec<u8>,
        streams: bool,
    }

    #[test]
    fn hello_survives_the_wire() {
        let hello = Hello {
            process: ProcessPlace::here().map(|here| Witness::new(3, &[1]).place(&here)),
            uses: true,
            revoked: vec![(3, 5)],
            revoked_more: true,
            challenge: Some((6, 7)),
            ..Hello::older((Incarnation(3), 4), Some(5), &[1, 2, 3])
        };
        assert_eq!(Hello::decode(&hello.encode().unwrap()).unwrap(), hello);
        assert!(Hello::decode(b"something else").is_err());
        // It would take the field's absence for a refusal.
        assert!(!hello.encode().unwrap().windows(7).any(|bytes| bytes == b"streams"));
        let (name, incarnation, address) = ("a", Incarnation(3), vec![1, 2, 3]);
        let older = Older { name, incarnation, connection: 4, seen: None, address, streams: true };
        let older = wire::encode("hello", OLDEST, &older).unwrap();
        let decoded = Hello::decode(&older).unwrap();
        assert_eq!((decoded.revocations, decoded.challenge), (false, None));
        assert!(!decoded.uses && !decoded.revoked_more);
        // A build of version 4 speaks only that.
        let text = older.windows(7).position(|bytes| bytes == b"\xa6speaks").unwrap();
        let before = [&[0x84], &older[1..text], &older[text + 10..]].concat();
        let before = Hello::decode(&before).unwrap();
        assert_eq!((before.versions, before.versions.common()), (Versions { oldest: 4, newest: 4 }, 4));
        let newer = wire::encode("hello", VERSION, &hello).unwrap();
        assert_eq!(Hello::decode(&newer).unwrap().versions.common(), VERSION);
        let nameless = Hello { name: String::new(), ..hello };
        assert!(Hello::decode(&nameless.encode().unwrap()).is_err());
    }
}
