//! The exchange of two messages that gives a [`Channel`]: Noise NNpsk0.

use snow::{Builder, HandshakeState};

use super::channel::{Channel, MAX_NOISE_BYTES};
use super::key::Key;
use crate::error::{Error, ErrorKind, Result};

/// The Noise protocol. NN: nobody has an identity of its own, every holder of the key belongs; psk0: the key is in from the
/// first byte, so that a first message of somebody without it is refused before any Diffie-Hellman.
const NOISE: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// The use of a channel. A message of one protocol is not one of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Between a handshake client and a listener.
    Handshake,
    /// Between agents.
    Agent,
}

impl Protocol {
    fn prologue(self) -> &'static [u8] {
        match self {
            Protocol::Handshake => b"kvferry handshake 1",
            Protocol::Agent => b"kvferry agent 1",
        }
    }
}

fn bug(what: &str, e: &snow::Error) -> Error {
    Error::new(ErrorKind::Internal, format!("{what}: {e}"))
}

/// A message that the key does not open. What is in it is not known, so the text can only name what is likely.
fn not_opened(what: &str) -> Error {
    Error::new(
        ErrorKind::Incompatible,
        format!(
            "{what} cannot be opened: the two sides probably have different keys (key_file, KVFERRY_KEY_FILE), or it \
             was damaged on its way"
        ),
    )
}

fn state(
    key: &Key,
    protocol: Protocol,
    context: &[u8],
    build: impl FnOnce(Builder<'_>) -> std::result::Result<HandshakeState, snow::Error>,
) -> Result<HandshakeState> {
    let prologue = [protocol.prologue(), context].concat();
    let make = || build(Builder::new(NOISE.parse()?).psk(0, key.bytes())?.prologue(&prologue)?);
    make().map_err(|e| bug("setting up the Noise protocol", &e))
}

fn write(state: &mut HandshakeState, payload: &[u8]) -> Result<Vec<u8>> {
    // The ephemeral key and the tag, generously.
    let mut message = vec![0; payload.len().saturating_add(64).min(MAX_NOISE_BYTES)];
    let len = state.write_message(payload, &mut message).map_err(|e| bug("writing a Noise message", &e))?;
    message.truncate(len);
    Ok(message)
}

fn read(state: &mut HandshakeState, message: &[u8], what: &str) -> Result<Vec<u8>> {
    let mut payload = vec![0; message.len().min(MAX_NOISE_BYTES)];
    let len = state.read_message(message, &mut payload).map_err(|_| not_opened(what))?;
    payload.truncate(len);
    Ok(payload)
}

/// The side that begins.
pub struct Initiator(Option<Box<HandshakeState>>);

impl Initiator {
    /// Begins an exchange. `context` are bytes that both sides know, such as a header that goes along; they are
    /// authenticated. Returns the first message, which holds `payload` (at most 65000 bytes): encrypted, but without
    /// forward secrecy, and a listener on the wire can send it again.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] for a payload that is too long, or without randomness.
    pub fn start(key: &Key, protocol: Protocol, context: &[u8], payload: &[u8]) -> Result<(Initiator, Vec<u8>)> {
        let mut state = state(key, protocol, context, |builder| builder.build_initiator())?;
        let message = write(&mut state, payload)?;
        Ok((Initiator(Some(Box::new(state))), message))
    }

    /// Takes the answer: its payload, which is fresh, and the channel. After an error the right answer is still taken.
    ///
    /// # Errors
    /// [`ErrorKind::Incompatible`] for an answer that cannot be opened.
    pub fn finish(&mut self, answer: &[u8]) -> Result<(Vec<u8>, Channel)> {
        let state = self.0.as_mut().ok_or_else(|| Error::corrupt("an exchange was answered twice"))?;
        let payload = read(state, answer, "the answer")?;
        let state = self.0.take().ok_or_else(|| Error::corrupt("an exchange was answered twice"))?;
        Ok((payload, Channel::new(*state)?))
    }
}

/// The side that answers.
pub struct Responder(HandshakeState);

impl Responder {
    /// Takes a first message and gives its payload. Costs somebody without the key no more than hashing here.
    ///
    /// # Errors
    /// [`ErrorKind::Incompatible`] for a message that cannot be opened.
    pub fn read(key: &Key, protocol: Protocol, context: &[u8], message: &[u8]) -> Result<(Responder, Vec<u8>)> {
        let mut state = state(key, protocol, context, |builder| builder.build_responder())?;
        let payload = read(&mut state, message, "the first message")?;
        Ok((Responder(state), payload))
    }

    /// Answers with `payload` (at most 65000 bytes).
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] for a payload that is too long, or without randomness.
    pub fn answer(mut self, payload: &[u8]) -> Result<(Vec<u8>, Channel)> {
        let message = write(&mut self.0, payload)?;
        Ok((message, Channel::new(self.0)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Key {
        Key::from_bytes([byte; 32])
    }

    #[test]
    fn two_holders_of_the_key_agree() {
        let (mut a, first) = Initiator::start(&key(1), Protocol::Agent, b"ctx", b"from a").unwrap();
        let (b, payload) = Responder::read(&key(1), Protocol::Agent, b"ctx", &first).unwrap();
        assert_eq!(payload, b"from a");
        let (second, mut to_a) = b.answer(b"from b").unwrap();
        let (payload, mut to_b) = a.finish(&second).unwrap();
        assert_eq!(payload, b"from b");
        assert!(a.finish(&second).is_err());
        let (number, sealed) = to_a.sealer.seal(b"h", b"data").unwrap();
        assert_eq!(to_b.opener.open(number, &sealed, 1, 100).unwrap(), (b"h".to_vec(), b"data".to_vec()));
        let (number, sealed) = to_b.sealer.seal(b"h", b"more").unwrap();
        assert_eq!(to_a.opener.open(number, &sealed, 1, 100).unwrap().1, b"more");
    }

    #[test]
    fn another_key_protocol_or_context_does_not_open() {
        let (mut a, first) = Initiator::start(&key(1), Protocol::Agent, b"ctx", b"from a").unwrap();
        for (other, protocol, context) in [
            (2, Protocol::Agent, b"ctx".as_slice()),
            (1, Protocol::Handshake, b"ctx"),
            (1, Protocol::Agent, b"ctX"),
            (1, Protocol::Agent, b""),
        ] {
            let error = Responder::read(&key(other), protocol, context, &first).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Incompatible);
            assert!(error.message().contains("different keys"), "{error}");
        }
        let (_, other) = Initiator::start(&key(1), Protocol::Agent, b"ctx", b"").unwrap();
        let foreign = Responder::read(&key(1), Protocol::Agent, b"ctx", &other).unwrap().0.answer(b"x").unwrap().0;
        assert!(a.finish(&foreign).is_err());
        // The right answer still counts.
        let right = Responder::read(&key(1), Protocol::Agent, b"ctx", &first).unwrap().0.answer(b"y").unwrap().0;
        assert_eq!(a.finish(&right).unwrap().0, b"y");
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_refused() {
        let (mut a, first) = Initiator::start(&key(1), Protocol::Handshake, b"", b"payload").unwrap();
        let second = Responder::read(&key(1), Protocol::Handshake, b"", &first).unwrap().0.answer(b"p").unwrap().0;
        for at in 0..first.len() {
            let mut bad = first.clone();
            bad[at] ^= 1 << (at % 7);
            assert!(Responder::read(&key(1), Protocol::Handshake, b"", &bad).is_err(), "byte {at}");
            assert!(Responder::read(&key(1), Protocol::Handshake, b"", &first[..at]).is_err(), "cut at {at}");
        }
        for at in 0..second.len() {
            let mut bad = second.clone();
            bad[at] ^= 1 << (at % 7);
            assert!(a.finish(&bad).is_err(), "byte {at}");
            assert!(a.finish(&second[..at]).is_err(), "cut at {at}");
        }
        assert!(Responder::read(&key(1), Protocol::Handshake, b"", &vec![7; 70_000]).is_err());
        assert_eq!(a.finish(&second).unwrap().0, b"p");
    }

    #[test]
    fn a_payload_that_is_too_long_is_refused() {
        assert!(Initiator::start(&key(1), Protocol::Agent, b"", &vec![0; 65_000]).is_ok());
        assert!(Initiator::start(&key(1), Protocol::Agent, b"", &vec![0; 65_536]).is_err());
    }
}
