//! Messages of any length, sealed: cut into Noise messages of at most 65535 bytes.
//!
//! A channel numbers its messages. The Noise nonce is the message's number times 65536 plus the piece's index, so that
//! no piece can stand at another place or in another message. The first piece begins with the length of the whole.

use std::sync::Arc;

use snow::{HandshakeState, StatelessTransportState};

use super::window::ReplayWindow;
use crate::error::{Error, ErrorKind, Result};

/// The longest Noise message.
pub(super) const MAX_NOISE_BYTES: usize = 65_535;
/// The bytes that sealing adds to a piece.
const TAG_BYTES: usize = 16;
/// Plain bytes of a full piece.
const PIECE_BYTES: usize = MAX_NOISE_BYTES - TAG_BYTES;
/// The length in front.
const LENGTH_BYTES: usize = 8;
/// Pieces of one message: 4 GiB.
const MAX_PIECES: usize = 1 << 16;
/// Message numbers are below it, so that no nonce is that which Noise reserves.
const MAX_NUMBER: u64 = (1 << 48) - 1;

/// How long `len` plain bytes become by sealing.
pub const fn sealed_len(len: usize) -> usize {
    let plain = len.saturating_add(LENGTH_BYTES);
    plain.saturating_add(plain.div_ceil(PIECE_BYTES).saturating_mul(TAG_BYTES))
}

/// Both directions between two sides that went through an exchange.
#[derive(Debug)]
pub struct Channel {
    /// Seals what is sent.
    pub sealer: Sealer,
    /// Opens what arrives.
    pub opener: Opener,
}

impl Channel {
    pub(super) fn new(state: HandshakeState) -> Result<Channel> {
        let state = state
            .into_stateless_transport_mode()
            .map_err(|e| Error::new(ErrorKind::Internal, format!("ending a Noise exchange: {e}")))?;
        let state = Arc::new(state);
        let sealer = Sealer { state: Arc::clone(&state), next: 0 };
        Ok(Channel { sealer, opener: Opener { state, window: ReplayWindow::default() } })
    }
}

/// Seals messages, each under a number of its own.
pub struct Sealer {
    state: Arc<StatelessTransportState>,
    next: u64,
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sealer").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Sealer {
    /// Seals `header` and `data` as one message. Returns its number, which goes along in clear, and the sealed bytes,
    /// [`sealed_len`] of both lengths together.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] over 4 GiB, and after 2^48 messages.
    pub fn seal(&mut self, header: &[u8], data: &[u8]) -> Result<(u64, Vec<u8>)> {
        let number = self.next;
        let total = header.len().saturating_add(data.len());
        if number >= MAX_NUMBER || total.saturating_add(LENGTH_BYTES).div_ceil(PIECE_BYTES) > MAX_PIECES {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{total} bytes cannot be sealed as message {number} of a channel"),
            ));
        }
        // Taken even if sealing fails: a nonce is never used twice.
        self.next += 1;
        let mut sealed = vec![0; sealed_len(total)];
        let mut out = sealed.as_mut_slice();
        // The first piece is put together; all others are sealed where they lie.
        let room = PIECE_BYTES.saturating_sub(LENGTH_BYTES + header.len());
        let (front, rest) = data.split_at_checked(room).unwrap_or((data, &[]));
        let mut first = Vec::with_capacity(LENGTH_BYTES + header.len() + front.len());
        first.extend_from_slice(&(total as u64).to_le_bytes());
        first.extend_from_slice(header);
        first.extend_from_slice(front);
        for (index, piece) in std::iter::once(first.as_slice()).chain(rest.chunks(PIECE_BYTES)).enumerate() {
            let nonce = nonce(number, index);
            let len = self
                .state
                .write_message(nonce, piece, out)
                .map_err(|e| Error::new(ErrorKind::Internal, format!("sealing {} bytes: {e}", piece.len())))?;
            out = out.get_mut(len..).unwrap_or_default();
        }
        Ok((number, sealed))
    }
}

/// Opens messages in any order, each once.
pub struct Opener {
    state: Arc<StatelessTransportState>,
    window: ReplayWindow,
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opener").field("window", &self.window).finish_non_exhaustive()
    }
}

impl Opener {
    /// Opens message `number`. Its header has `header_len` bytes, its data at most `limit`. After an error nothing
    /// has changed.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] for a number that came before or is 65536 behind the newest, and for bytes that were not
    /// sealed so by the other side; [`ErrorKind::Exhausted`] over the limit.
    pub fn open(&mut self, number: u64, sealed: &[u8], header_len: usize, limit: usize) -> Result<(Vec<u8>, Vec<u8>)> {
        if number >= MAX_NUMBER {
            return Err(Error::corrupt(format!("a sealed message of the number {number}, which is none")));
        }
        if sealed.len() > sealed_len(header_len.saturating_add(limit)) {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("a sealed message of {} bytes is over the limit of {limit}", sealed.len()),
            ));
        }
        self.window.check(number)?;
        let mut pieces = sealed.chunks(MAX_NOISE_BYTES).enumerate();
        let (_, front) = pieces.next().unwrap_or_default();
        let mut first = vec![0; front.len()];
        let len = self.state.read_message(nonce(number, 0), front, &mut first).map_err(|_| damaged(number))?;
        first.truncate(len);
        let (length, mut front) = first.split_first_chunk::<LENGTH_BYTES>().ok_or_else(|| damaged(number))?;
        let total = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| damaged(number))?;
        // The lengths decide each other, so that a message cannot be cut between two pieces.
        let data_len = total.checked_sub(header_len).ok_or_else(|| damaged(number))?;
        if sealed_len(total) != sealed.len() {
            return Err(damaged(number));
        }
        let header = front.split_off(..header_len).ok_or_else(|| damaged(number))?.to_vec();
        // With room for a tag at the end: each piece is decrypted in place, tag included, over which the next one goes.
        let mut data = Vec::with_capacity(data_len.saturating_add(TAG_BYTES));
        data.extend_from_slice(front);
        if data.len() < data_len {
            let mut at = data.len();
            data.resize(data_len.saturating_add(TAG_BYTES), 0);
            for (index, piece) in pieces {
                let out = data.get_mut(at..).unwrap_or_default();
                at += self.state.read_message(nonce(number, index), piece, out).map_err(|_| damaged(number))?;
            }
            data.truncate(data_len);
        }
        self.window.mark(number);
        Ok((header, data))
    }
}

fn nonce(number: u64, index: usize) -> u64 {
    (number << 16) | index as u64
}

fn damaged(number: u64) -> Error {
    Error::corrupt(format!("sealed message {number} cannot be opened: it was damaged, cut, or is not this channel's"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;
    use crate::secret::{Initiator, Key, Protocol, Responder};

    fn pair() -> (Channel, Channel) {
        let key = Key::from_bytes([3; 32]);
        let (mut a, first) = Initiator::start(&key, Protocol::Agent, b"", b"").unwrap();
        let (second, b) = Responder::read(&key, Protocol::Agent, b"", &first).unwrap().0.answer(b"").unwrap();
        (a.finish(&second).unwrap().1, b)
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|index| (index * 7 + index / 251) as u8).collect()
    }

    const HEADER: &[u8] = b"a header of thirty-two bytes ...";

    #[test]
    fn every_length_survives_both_ways() {
        let (mut a, mut b) = pair();
        let full = PIECE_BYTES - LENGTH_BYTES - HEADER.len();
        for len in [0, 1, 100, full - 1, full, full + 1, full + PIECE_BYTES, full + PIECE_BYTES + 1, 1 << 20] {
            let data = bytes(len);
            for (from, to) in [(&mut a.sealer, &mut b.opener), (&mut b.sealer, &mut a.opener)] {
                let (number, sealed) = from.seal(HEADER, &data).unwrap();
                assert_eq!(sealed.len(), sealed_len(HEADER.len() + len));
                assert!(len == 0 || to.open(number, &sealed, HEADER.len(), len - 1).is_err());
                assert_eq!(to.open(number, &sealed, HEADER.len(), len).unwrap(), (HEADER.to_vec(), data.clone()));
            }
        }
    }

    #[test]
    fn what_was_sealed_cannot_be_seen_and_never_looks_the_same() {
        let (mut a, _) = pair();
        let (_, first) = a.sealer.seal(HEADER, &[0; 1000]).unwrap();
        let (_, second) = a.sealer.seal(HEADER, &[0; 1000]).unwrap();
        assert_ne!(first, second);
        for sealed in [first, second] {
            assert!(!sealed.windows(8).any(|bytes| bytes == [0; 8] || HEADER.windows(8).any(|h| h == bytes)));
        }
    }

    #[test]
    fn order_does_not_matter_but_nothing_counts_twice() {
        let (mut a, mut b) = pair();
        let sealed: Vec<_> = (0..100u8).map(|byte| a.sealer.seal(&[], &[byte]).unwrap()).collect();
        for index in (0..100).rev() {
            let (number, bytes) = &sealed[index];
            assert_eq!(b.opener.open(*number, bytes, 0, 1).unwrap().1, [index as u8]);
            assert_eq!(b.opener.open(*number, bytes, 0, 1).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn damage_anywhere_is_refused_and_harms_nothing() {
        let (mut a, mut b) = pair();
        let data = bytes(2 * PIECE_BYTES);
        let (number, sealed) = a.sealer.seal(HEADER, &data).unwrap();
        let places = (0..200).chain(MAX_NOISE_BYTES - 40..MAX_NOISE_BYTES + 40).chain(sealed.len() - 40..sealed.len());
        for at in places {
            let mut bad = sealed.clone();
            bad[at] ^= 0x10;
            assert!(b.opener.open(number, &bad, HEADER.len(), data.len()).is_err(), "byte {at}");
            assert!(b.opener.open(number, &sealed[..at], HEADER.len(), data.len()).is_err(), "cut at {at}");
        }
        let mut longer = sealed.clone();
        longer.push(0);
        assert!(b.opener.open(number, &longer, HEADER.len(), data.len() + 100).is_err());
        // Pieces in another order, a piece left out, a piece as a message, another number, another length of header.
        let piece = |index: usize| sealed.chunks(MAX_NOISE_BYTES).nth(index).unwrap();
        for bad in [[piece(1), piece(0), piece(2)].concat(), [piece(0), piece(2)].concat(), piece(0).to_vec()] {
            assert!(b.opener.open(number, &bad, HEADER.len(), data.len()).is_err());
        }
        assert!(b.opener.open(number, piece(1), HEADER.len(), data.len()).is_err());
        for other in [number + 1, number | 1 << 40, MAX_NUMBER, u64::MAX] {
            assert!(b.opener.open(other, &sealed, HEADER.len(), data.len()).is_err());
        }
        assert!(b.opener.open(number, &sealed, data.len() * 2, data.len()).is_err());
        // Its own, sent back.
        assert!(a.opener.open(number, &sealed, HEADER.len(), data.len()).is_err());
        assert_eq!(b.opener.open(number, &sealed, HEADER.len(), data.len()).unwrap().1, data);
    }

    #[test]
    fn numbers_do_not_run_over() {
        let (mut a, mut b) = pair();
        a.sealer.next = MAX_NUMBER - 1;
        let (number, sealed) = a.sealer.seal(&[], b"last").unwrap();
        assert_eq!(b.opener.open(number, &sealed, 0, 4).unwrap().1, b"last");
        assert_eq!(a.sealer.seal(&[], b"one more").unwrap_err().kind(), ErrorKind::Exhausted);
    }
}
