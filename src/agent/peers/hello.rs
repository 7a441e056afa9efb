//! The first message of each connection, and what follows from it.

use serde::{Deserialize, Serialize};

use super::reach::Reach;
use super::{Io, Peers, two_addresses};
use crate::agent::core::effect::Effect;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::Incarnation;
use crate::proto::wire::{self, OLDEST, Versions};
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
    /// The sender's regions that it has deregistered, whatever metadata the receiver has: first and last of
    /// each run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) withdrawn: Vec<(u32, u32)>,
    /// Whether there are more of them: the receiver then uses no memory of the sender's by itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) withdrew_more: bool,
    /// What the receiver is to write into its witness for this connection, before the sender copies its memory. `None` of a
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

impl Peers {
    /// Says hello, and expects the answer in time if the peer has said none yet. Messages follow.
    pub(super) fn send_hello(&mut self, id: PeerId, io: &mut Io<'_>) -> Result<()> {
        if !self.get(id)?.is_ready() {
            self.by_id.set_deadline(id, io.now.checked_add(self.local.connect_timeout));
        }
        if self.are_keyed() {
            return self.send_sealed_hello(id, io);
        }
        let hello = self.own_hello(id, self.get(id)?.connection.remote)?;
        let number = self.hello_numbers.draw();
        let connection = &mut self.get_mut(id)?.connection;
        connection.post(connection.frame(FrameKind::Hello, number), hello.encode()?, 0, io.operations)?;
        connection.begin_messages(io.operations)
    }

    /// Decides whether a peer may use memory of this side by itself, before it is sent a hello or given an answer.
    pub(super) fn trust(&mut self, id: PeerId) -> Result<()> {
        let Peers { by_id, withdrawn, .. } = self;
        let locality = &mut by_id.get_mut(id).ok_or_else(|| id.unknown())?.locality;
        if withdrawn.is_cut(locality.is_near) {
            locality.is_told_part = true;
            // Nor is it one for an older peer, which looks for no answer.
            locality.witness.end();
        }
        Ok(())
    }

    pub(super) fn own_hello(&mut self, id: PeerId, seen: Option<u64>) -> Result<Hello> {
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
            withdrawn: self.withdrawn.told(locality.is_near),
            withdrew_more: locality.is_told_part,
            challenge: Some(locality.challenge),
            versions: Versions::OURS,
        })
    }

    /// Refuses a hello of an agent at another address than the one that was connected to.
    fn check_address(&self, id: PeerId, hello: &Hello) -> Result<()> {
        if self.get(id)?.connection.address == hello.address {
            return Ok(());
        }
        Err(two_addresses(&hello.name, hello.incarnation))
    }

    /// Refuses a hello that others of its sender have overtaken.
    pub(super) fn check_hello_number(&mut self, hello: &Hello, number: u64) -> Result<()> {
        let known = &self.by_incarnation;
        let sender = (hello.incarnation, &*hello.address);
        self.hello_numbers.take(sender, number, |agent| known.contains_key(&agent))
    }

    /// Takes a hello that arrived.
    pub(super) fn on_hello(&mut self, frame: Frame, data: &[u8], io: &mut Io<'_>) -> Result<()> {
        let hello = Hello::decode(data)?;
        hello.check(frame)?;
        let known = self.find(hello.incarnation);
        // An older kvferry numbers none.
        if frame.sequence != 0
            && let Err(late) = self.check_hello_number(&hello, frame.sequence)
        {
            // Of one connection, a later hello says all that an earlier one does.
            let is_current =
                known.is_some_and(|id| self.get(id).is_ok_and(|peer| peer.connection.is_current(hello.connection)));
            return if is_current { Ok(()) } else { Err(late) };
        }
        let Some(id) = known else {
            return match hello.seen {
                // An answer to a connection that was given up here meanwhile.
                Some(_) => Err(Error::not_found(format!("a late hello of agent {}", hello.name))),
                None => self.accept(&hello, io),
            };
        };
        self.check_address(id, &hello)?;
        let connection = &self.get(id)?.connection;
        match (hello.seen, connection.remote) {
            (Some(seen), _) if seen != connection.number => {
                Err(Error::not_found(format!("a hello of agent {} about an earlier connection", hello.name)))
            }
            (Some(_), known) => {
                if known != Some(hello.connection) {
                    self.by_id.drop_held(id);
                }
                self.greet(id, &hello, io)
            }
            (None, Some(known)) if known == hello.connection => Ok(()),
            (None, None) => {
                self.greet(id, &hello, io)?;
                self.send_hello(id, io).inspect_err(|error| io.effects.lose(id, error.clone()))
            }
            (None, Some(_)) => {
                self.lose_replaced(id, &hello, io);
                self.accept(&hello, io)
            }
        }
    }

    /// Loses a peer that has made a new connection.
    pub(super) fn lose_replaced(&mut self, id: PeerId, hello: &Hello, io: &mut Io<'_>) {
        if let Ok(peer) = self.get_mut(id) {
            peer.connection.has_left = true;
        }
        let text = format!("agent {} lost the connection and has made a new one", hello.name);
        // It has given up the old one, and what is copied over that.
        self.lose(id, Error::new(ErrorKind::PeerDied, text), false, io);
    }

    /// Makes a peer of an agent that connected to this one.
    fn accept(&mut self, hello: &Hello, io: &mut Io<'_>) -> Result<()> {
        self.check_open()?;
        let id = self.admit_new(hello, io)?;
        self.greet(id, hello, io)?;
        if let Err(error) = self.send_hello(id, io) {
            io.effects.lose(id, error);
        }
        Ok(())
    }

    /// Connects back to an agent that said hello.
    pub(super) fn admit_new(&mut self, hello: &Hello, io: &mut Io<'_>) -> Result<PeerId> {
        self.make_room(io)?;
        let mut peer = self.make(hello.name.clone(), hello.incarnation, &hello.address, io)?;
        peer.silent = true;
        let id = peer.id;
        self.insert(peer, io.live);
        self.admission.note(id);
        Ok(id)
    }

    /// Notes that the peer is there and itself.
    pub(super) fn greet(&mut self, id: PeerId, hello: &Hello, io: &mut Io<'_>) -> Result<()> {
        self.trust(id)?;
        let Peers { by_id, local, .. } = self;
        by_id.set_deadline(id, None);
        let peer = by_id.get_mut(id).ok_or_else(|| id.unknown())?;
        peer.locality.take_challenge(hello);
        if peer.connection.remote.replace(hello.connection).is_some() {
            return Ok(());
        }
        peer.connection.version = hello.versions.common();
        peer.reach = Reach::of(&peer.connection.endpoint.describe());
        if peer.locality.is_told_part && !hello.uses && peer.reach.by_cuda_ipc {
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
        if hello.withdrew_more {
            peer.reach = peer.reach.without_cuda_ipc();
            log::info!(
                "agent {}: agent {} has deregistered more regions than it can list: its memory goes by messages",
                local.name,
                peer.name
            );
        }
        peer.withdraw(&hello.withdrawn);
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
    fn a_hello_survives_the_wire_and_foreign_bytes_are_refused() {
        let hello = Hello {
            name: "a".to_owned(),
            incarnation: Incarnation(3),
            connection: 4,
            seen: Some(5),
            address: vec![1, 2, 3],
            process: ProcessPlace::here().map(|here| Witness::new(3, &[1]).place(&here)),
            revocations: true,
            uses: true,
            withdrawn: vec![(3, 5)],
            withdrew_more: true,
            challenge: Some((6, 7)),
            versions: Versions::OURS,
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
        assert!(!decoded.uses && !decoded.withdrew_more);
        // What a build of version 4 says speaks only that.
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
