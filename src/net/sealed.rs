//! The handshake with a key: the frames, and the listener's [`AuthLayer`]. The client's half is in its own file.
//!
//! A request takes two round trips: the first opens a channel of its own, the second carries one request and one reply
//! over it. So a request is fresh by itself: sent again, in this life of the listener or a later one, it belongs to a
//! channel that is gone. And a key that leaks later opens nothing in it.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use super::Address;
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::proto::handshake::ClientId;
use crate::proto::latest::Latest;
use crate::proto::wire::limits::{MAX_REPLY_BYTES, MAX_REQUEST_BYTES};
use crate::proto::wire::{HandshakeReply, Message, RefusalCode, Versions};
use crate::secret::{Channel, Initiator, Key, Protocol, Responder, sealed_len};

/// No message in clear begins so: those are msgpack maps.
const MAGIC: [u8; 4] = *b"KVFS";
const VERSION: u8 = 1;
/// Magic, version, kind, zero u16, the exchange's number u64.
const HEAD_BYTES: usize = 16;
/// Names an open channel of the listener's.
const CHANNEL_BYTES: usize = 16;

/// Channels that wait for their request; the oldest makes room. A client asks at once.
const MAX_CHANNELS: usize = 1024;
/// First messages that are remembered, to refuse them when they come again.
const MAX_SEEN: usize = 65_536;
/// The ephemeral key at the start of a Noise message.
const EPHEMERAL_BYTES: usize = 32;

/// The longest frame of a client with a key.
pub(super) const MAX_SEALED_REPLY: usize = HEAD_BYTES + sealed_len(MAX_REPLY_BYTES);

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SealedKind {
    /// Client: the first Noise message.
    Open,
    /// Listener: the second, whose payload names the channel.
    Opened,
    /// Client: the channel's name and a request, sealed.
    Ask,
    /// Listener: the reply, sealed.
    Reply,
    /// Listener: that channel is gone; open another.
    Again,
}

/// A frame's kind, its exchange's number, and what follows. `None` if it is not of this protocol.
pub(super) fn split(frame: &[u8]) -> Option<(SealedKind, u64, &[u8])> {
    let (head, rest) = frame.split_first_chunk::<HEAD_BYTES>()?;
    let [m0, m1, m2, m3, VERSION, kind, 0, 0, number @ ..] = *head else { return None };
    let kind = match kind {
        1 => SealedKind::Open,
        2 => SealedKind::Opened,
        3 => SealedKind::Ask,
        4 => SealedKind::Reply,
        5 => SealedKind::Again,
        _ => return None,
    };
    ([m0, m1, m2, m3] == MAGIC).then_some((kind, u64::from_le_bytes(number), rest))
}

/// The error for a frame of this protocol in a version that is not spoken; None for any other frame. The first frame of
/// an exchange is not negotiated, so a version stays as long as a protocol version that is spoken has it.
pub(super) fn check_version(frame: &[u8]) -> Option<Error> {
    let (magic, rest) = frame.split_first_chunk::<4>()?;
    let version = rest.first().filter(|version| *magic == MAGIC && **version != VERSION)?;
    let ours = Versions::OURS;
    Some(Error::new(
        ErrorKind::VersionMismatch,
        format!(
            "a sealed frame of version {version} came, this build speaks version {VERSION} (protocol {ours}): upgrade the \
             older side, one protocol version at a time (\"Upgrading\" in docs/guide.md)"
        ),
    ))
}

fn frame(kind: SealedKind, exchange: u64, parts: &[&[u8]]) -> Vec<u8> {
    let kind = match kind {
        SealedKind::Open => 1,
        SealedKind::Opened => 2,
        SealedKind::Ask => 3,
        SealedKind::Reply => 4,
        SealedKind::Again => 5,
    };
    let mut bytes = Vec::with_capacity(HEAD_BYTES + parts.iter().map(|part| part.len()).sum::<usize>());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[VERSION, kind, 0, 0]);
    bytes.extend_from_slice(&exchange.to_le_bytes());
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

/// A client's exchange.
pub(super) enum Exchange {
    /// The first message is out.
    Opening(Initiator),
    /// The request is out.
    Asked(Channel),
}

impl Exchange {
    /// Begins the exchange `number`; the frame to send.
    pub(super) fn begin(key: &Key, number: u64) -> Result<(Exchange, Vec<u8>)> {
        let (initiator, message) = Initiator::start(key, Protocol::Handshake, &number.to_le_bytes(), &[])?;
        Ok((Exchange::Opening(initiator), frame(SealedKind::Open, number, &[&message])))
    }

    /// The listener opened the channel: the frame with the request `clear`.
    pub(super) fn ask(&mut self, number: u64, opened: &[u8], clear: &[u8]) -> Result<Vec<u8>> {
        let Exchange::Opening(initiator) = self else { return Err(Error::corrupt("a channel was opened twice")) };
        let (name, mut channel) = initiator.finish(opened)?;
        let (_, sealed) = channel.sealer.seal(&[], clear)?;
        *self = Exchange::Asked(channel);
        Ok(frame(SealedKind::Ask, number, &[&name, &sealed]))
    }

    /// The reply in clear.
    pub(super) fn reply(&mut self, sealed: &[u8]) -> Result<Vec<u8>> {
        let Exchange::Asked(channel) = self else { return Err(Error::corrupt("a reply to no request")) };
        Ok(channel.opener.open(0, sealed, 0, MAX_REPLY_BYTES)?.1)
    }
}

/// Stands in front of a listener's answering function. With a key, only sealed requests get through, and only
/// their senders can read the replies. Without one, only requests in clear do.
///
/// Refusals go out in clear and have nothing of the engine in them.
#[derive(Debug)]
pub struct AuthLayer {
    key: Option<Key>,
    /// With the numbers of their exchanges.
    channels: Latest<[u8; CHANNEL_BYTES], (u64, Channel)>,
    /// Channels of requests whose replies come later, in the order in which they came.
    later: HashMap<ClientId, VecDeque<(u64, Channel)>>,
    seen: Latest<[u8; EPHEMERAL_BYTES], ()>,
    log: LogLimit,
}

impl AuthLayer {
    /// A gate for the listener at `address`. Warns if other hosts can reach that and there is no key.
    pub fn new(key: Option<Key>, address: &Address) -> AuthLayer {
        if key.is_none() && !address.bind.is_loopback() {
            let (what, other) = if address.bind.is_unspecified() {
                ("this host by any of its addresses".to_owned(), "bind one address that only they reach (bind), ")
            } else {
                (address.bind.to_string(), "")
            };
            log::warn!(
                "kvferry listener: other hosts can reach {what}, and no key is set: any client learns where this \
                 engine's memory is and how to read it; give all engines one key (key_file or {}), {other}or keep \
                 others out of this network",
                crate::secret::ENV
            );
        }
        AuthLayer {
            key,
            channels: Latest::new(MAX_CHANNELS),
            later: HashMap::new(),
            seen: Latest::new(MAX_SEEN),
            log: LogLimit::default(),
        }
    }

    /// The refusal of a request, which is logged too: of a wrong key the owner of this side would learn nothing else.
    fn refuse(&mut self, code: RefusalCode, message: &str) -> Vec<u8> {
        if let Some(left_out) = self.log.pass(Instant::now()) {
            let more = if left_out == 0 { String::new() } else { format!(" ({left_out} similar lines suppressed)") };
            log::warn!("kvferry listener: a request was refused: {message}{more}");
        }
        HandshakeReply::Refused { id: 0, code, message: message.to_owned() }.to_bytes().unwrap_or_default()
    }

    fn refuse_key(&mut self, error: &Error) -> Vec<u8> {
        self.refuse(RefusalCode::Key, error.message())
    }

    /// Answers any bytes. If the request in them may pass, `answer` makes the reply, else it is a refusal.
    pub fn answer(&mut self, request: &[u8], answer: impl FnOnce(&[u8]) -> Vec<u8>) -> Vec<u8> {
        self.answer_to(&[], request, |clear| Some(answer(clear))).unwrap_or_default()
    }

    /// As [`AuthLayer::answer`]; when `answer` gives nothing, its reply comes later and goes through [`AuthLayer::seal`].
    pub fn answer_to(
        &mut self,
        client: &[u8],
        request: &[u8],
        answer: impl FnOnce(&[u8]) -> Option<Vec<u8>>,
    ) -> Option<Vec<u8>> {
        if let Some(error) = check_version(request) {
            return Some(self.refuse(RefusalCode::Version, error.message()));
        }
        let sealed = split(request);
        let Some(key) = self.key.clone() else {
            if sealed.is_some() {
                return Some(self.refuse(
                    RefusalCode::Key,
                    "a sealed request came, and this listener has no key: give both engines the same key file \
                     (key_file, KVFERRY_KEY_FILE), or none",
                ));
            }
            return answer(request);
        };
        match sealed {
            Some((SealedKind::Open, number, message)) => {
                Some(self.open(&key, number, message).unwrap_or_else(|e| self.refuse_key(&e)))
            }
            Some((SealedKind::Ask, number, message)) => {
                self.ask(client, number, message, answer).unwrap_or_else(|e| Some(self.refuse_key(&e)))
            }
            Some(_) => Some(self.refuse(RefusalCode::Key, "a frame that only listeners send")),
            None => Some(self.refuse(
                RefusalCode::Key,
                "this listener takes sealed requests only: give both engines the same key file (key_file, \
                 KVFERRY_KEY_FILE)",
            )),
        }
    }

    /// Seals a later reply, for the oldest of the client's requests without one. `None` if there is no such request.
    pub fn seal(&mut self, client: &[u8], clear: Vec<u8>) -> Option<Vec<u8>> {
        if self.key.is_none() {
            return Some(clear);
        }
        let waiting = self.later.get_mut(client)?;
        let (number, mut channel) = waiting.pop_front()?;
        if waiting.is_empty() {
            self.later.remove(client);
        }
        match channel.sealer.seal(&[], &clear) {
            Ok((_, sealed)) => Some(frame(SealedKind::Reply, number, &[&sealed])),
            Err(e) => Some(self.refuse_key(&e)),
        }
    }

    fn open(&mut self, key: &Key, number: u64, message: &[u8]) -> Result<Vec<u8>> {
        let (responder, _) = Responder::read(key, Protocol::Handshake, &number.to_le_bytes(), message)?;
        let ephemeral = *message
            .first_chunk::<EPHEMERAL_BYTES>()
            .ok_or_else(|| Error::corrupt("a first message without its key"))?;
        if self.seen.contains_key(&ephemeral) {
            return Err(Error::corrupt("this request came before; each can be sent once"));
        }
        self.seen.insert(ephemeral, ());
        let mut name = [0; CHANNEL_BYTES];
        getrandom::fill(&mut name).map_err(|e| Error::new(ErrorKind::Io, format!("drawing a name: {e}")))?;
        let (second, channel) = responder.answer(&name)?;
        self.channels.insert(name, (number, channel));
        Ok(frame(SealedKind::Opened, number, &[&second]))
    }

    fn ask(
        &mut self,
        client: &[u8],
        number: u64,
        message: &[u8],
        answer: impl FnOnce(&[u8]) -> Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>> {
        let (name, sealed) = message
            .split_first_chunk::<CHANNEL_BYTES>()
            .ok_or_else(|| Error::corrupt("a sealed request that ends within its head"))?;
        let again = || Ok(Some(frame(SealedKind::Again, number, &[])));
        let Some((exchange, channel)) = self.channels.get_mut(name) else { return again() };
        // Damaged bytes cost the sender of the right ones nothing: the channel stays.
        if *exchange != number {
            return Err(Error::corrupt("a sealed request with the number of another exchange"));
        }
        let (_, clear) = channel.opener.open(0, sealed, 0, MAX_REQUEST_BYTES)?;
        let Some((_, mut channel)) = self.channels.remove(name) else { return again() };
        let Some(reply) = answer(&clear) else {
            self.later.entry(client.to_owned()).or_default().push_back((number, channel));
            return Ok(None);
        };
        let (_, sealed) = channel.sealer.seal(&[], &reply)?;
        Ok(Some(frame(SealedKind::Reply, number, &[&sealed])))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn auth_layer(key: Option<u8>) -> AuthLayer {
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let address = Address { bind: ip, advertise: ip, note: None };
        AuthLayer::new(key.map(|byte| Key::from_bytes([byte; 32])), &address)
    }

    fn echo(request: &[u8]) -> Vec<u8> {
        [b"echo:", request].concat()
    }

    fn never(_: &[u8]) -> Vec<u8> {
        unreachable!("a request passed that should not have")
    }

    fn refused_text(reply: &[u8]) -> String {
        match HandshakeReply::from_bytes(reply).unwrap() {
            HandshakeReply::Refused { id: 0, code: RefusalCode::Key | RefusalCode::Version, message } => message,
            other => panic!("{other:?}"),
        }
    }

    /// The first half of an exchange: its state, the frame sent, and the frame that asks.
    fn opened(auth: &mut AuthLayer, key: u8, request: &[u8]) -> (Exchange, Vec<u8>, Vec<u8>) {
        let (mut exchange, first) = Exchange::begin(&Key::from_bytes([key; 32]), 7).unwrap();
        let reply = auth.answer(&first, never);
        let (kind, number, message) = split(&reply).unwrap();
        assert_eq!((kind, number), (SealedKind::Opened, 7));
        let ask = exchange.ask(7, message, request).unwrap();
        (exchange, first, ask)
    }

    #[test]
    fn a_request_passes_once_and_its_reply_is_for_its_sender() {
        let mut auth = auth_layer(Some(1));
        let (mut exchange, first, ask) = opened(&mut auth, 1, b"request");
        let reply = auth.answer(&ask, echo);
        let (kind, number, sealed) = split(&reply).unwrap();
        assert_eq!((kind, number), (SealedKind::Reply, 7));
        assert!(!reply.windows(4).any(|bytes| bytes == b"echo"));
        let (mut other, ..) = opened(&mut auth, 1, b"another");
        assert!(other.reply(sealed).is_err());
        assert_eq!(exchange.reply(sealed).unwrap(), b"echo:request");
        assert!(exchange.reply(sealed).is_err());
        // Both captured frames again, and in a later life of the listener.
        assert!(refused_text(&auth.answer(&first, never)).contains("came before"));
        assert_eq!(split(&auth.answer(&ask, never)).unwrap(), (SealedKind::Again, 7, [].as_slice()));
        let mut later = auth_layer(Some(1));
        assert_eq!(split(&later.answer(&ask, never)).unwrap().0, SealedKind::Again);
        // Its answer to the first frame gives nothing to who can't read it, and does not fit the captured request.
        assert_eq!(split(&later.answer(&first, never)).unwrap().0, SealedKind::Opened);
        assert_eq!(split(&later.answer(&ask, never)).unwrap().0, SealedKind::Again);
    }

    #[test]
    fn a_later_reply_is_sealed_for_the_oldest_request_of_its_asker() {
        let mut auth = auth_layer(Some(1));
        let asked = [b"x", b"x", b"y"].map(|client| {
            let (exchange, _, ask) = opened(&mut auth, 1, b"request");
            assert_eq!(auth.answer_to(client, &ask, |_| None), None);
            exchange
        });
        let replies = [b"x", b"y", b"x"].map(|client| auth.seal(client, b"over".to_vec()).unwrap());
        for (mut exchange, reply) in asked.into_iter().zip([&replies[0], &replies[2], &replies[1]]) {
            assert_eq!(exchange.reply(split(reply).unwrap().2).unwrap(), b"over");
        }
        assert!(auth.seal(b"x", b"over".to_vec()).is_none() && auth.later.is_empty());
        assert_eq!(auth_layer(None).seal(b"x", b"clear".to_vec()).unwrap(), b"clear");
    }

    #[test]
    fn without_the_key_nothing_passes() {
        let mut closed = auth_layer(Some(1));
        let (_, foreign) = Exchange::begin(&Key::from_bytes([2; 32]), 7).unwrap();
        assert!(refused_text(&closed.answer(&foreign, never)).contains("different keys"));
        for clear in [b"".as_slice(), b"KVFS", b"in clear", &[0; 4096]] {
            assert!(refused_text(&closed.answer(clear, never)).contains("key_file"));
        }
        for kind in [SealedKind::Opened, SealedKind::Reply, SealedKind::Again] {
            refused_text(&closed.answer(&frame(kind, 7, &[&[1; 64]]), never));
        }
        let mut open = auth_layer(None);
        assert!(refused_text(&open.answer(&foreign, never)).contains("has no key"));
        assert_eq!(open.answer(b"in clear", echo), b"echo:in clear");
    }

    #[test]
    fn another_version_of_the_frames_is_refused_with_both_numbers() {
        let (_, first) = Exchange::begin(&Key::from_bytes([1; 32]), 7).unwrap();
        for (key, version) in [(Some(1), 0), (Some(1), 2), (None, 2)] {
            let mut frame = first.clone();
            frame[4] = version;
            match HandshakeReply::from_bytes(&auth_layer(key).answer(&frame, never)).unwrap() {
                HandshakeReply::Refused { id: 0, code: RefusalCode::Version, message } => {
                    let expected = format!("of version {version} came, this build speaks version 1");
                    assert!(message.contains(&expected), "{message}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(check_version(&first), None);
    }

    #[test]
    fn every_damaged_byte_is_refused_and_the_right_request_still_passes() {
        let mut auth = auth_layer(Some(1));
        let (mut exchange, first, ask) = opened(&mut auth, 1, b"request");
        // A first message of another exchange, which the gate has not seen.
        let (_, unseen) = Exchange::begin(&Key::from_bytes([1; 32]), 8).unwrap();
        for good in [&unseen, &first, &ask] {
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 1;
                for bad in [bad.as_slice(), &good[..at]] {
                    let reply = auth.answer(bad, never);
                    // Another name of a channel is one that is not there.
                    if split(&reply).is_none_or(|(kind, ..)| kind != SealedKind::Again) {
                        refused_text(&reply);
                    }
                }
            }
        }
        let reply = auth.answer(&ask, echo);
        let (_, _, sealed) = split(&reply).unwrap();
        for at in 0..sealed.len() {
            let mut bad = sealed.to_vec();
            bad[at] ^= 1;
            assert!(exchange.reply(&bad).is_err() && exchange.reply(&sealed[..at]).is_err(), "byte {at}");
        }
        assert_eq!(exchange.reply(sealed).unwrap(), b"echo:request");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut auth = auth_layer(Some(1));
        let (_, _, oldest) = opened(&mut auth, 1, b"oldest");
        let (mut second, _, ask) = opened(&mut auth, 1, b"second");
        for _ in 0..MAX_CHANNELS - 1 {
            opened(&mut auth, 1, b"");
        }
        assert_eq!(auth.channels.len(), MAX_CHANNELS);
        assert_eq!(split(&auth.answer(&oldest, never)).unwrap().0, SealedKind::Again);
        let reply = auth.answer(&ask, echo);
        assert_eq!(second.reply(split(&reply).unwrap().2).unwrap(), b"echo:second");
    }
}
